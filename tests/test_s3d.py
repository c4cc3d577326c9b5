"""S3D: drafts against a model with layers removed, which reads the masks behind the pending token in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import truedraft
from models import sibling, tiny
from test_heads import learner_of
from test_views import COMPILED, CutModel
from truedraft import Refused, registry
from truedraft.drafters._learned import Batch, save_learnt
from truedraft.drafters.heads.s3d import Masks, MaskReader, Training, middle

RUNTIMES = [pytest.param("auto", marks=COMPILED), "stock", "graphs"]
LAYERS, SKIPPED, MASKS = 4, (1, 2), 3


def target(architecture: str = "llama") -> PreTrainedModel:
    return tiny(architecture, torch.float32, layers=LAYERS)


def trained(model: PreTrainedModel, **knobs: Any) -> Masks:
    return learner_of("s3d", model, skip="1-2", masks=MASKS, **knobs).module.eval()
