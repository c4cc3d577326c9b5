"""DFlash: published checkpoints against the references, drafts against plain forwards, and training against serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING, GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import seq2seq_models
import truedraft
from foreign import FORMATS
from foreign.common import features, opened, randomise, save
from models import V, ragged, tiny
from truedraft import Refused, registry
from truedraft.drafters._learned import save_learnt
from truedraft.drafters.heads._checkpoint import read_head
from truedraft.train.batches import Line, Reader
from truedraft.train.loop import Plan, fit
from truedraft.tree import Accepted, Row, Scores

NAMES = ("dflash", "dflash-speculators")
VARIANTS = [(name, variant) for name in NAMES for variant in FORMATS[name].variants]
CONTROLS = [(name, wrong) for name in NAMES for wrong in FORMATS[name].controls]
TOKENS, LATER = [5, 17, 3, 44, 9, 60], [7, 31, 12]


def read(folder: Path, target: PreTrainedModel) -> Any:
    method = registry.method("drafters", "dflash")
    return read_head("dflash", folder, method.formats, target, method.rebuilt).to(target.dtype).eval()


def learner(model: PreTrainedModel, **knobs: Any) -> Any:
    made = registry.method("drafters", "dflash").learner(**knobs)
    made.begin(model)
    return made


def loaded(model: PreTrainedModel, head: Any, **knobs: Any) -> truedraft.Accelerated:
    return truedraft.accelerate(model, draft=registry.load("drafters", "dflash", model=head, **knobs), control="fixed")


def filled(head: Any, target: PreTrainedModel, *parts: list[int]) -> list[Tensor]:
    """The logits of the block after each part of a text, the parts read one after the other beside another row."""
    reader: Any = registry.method("drafters", "dflash").reads(head)
    rows = [Row(0, [8, 2], 2, 40), Row(1, [], 0, 40)]
    reader.start(rows, head.block_size)
    observe(reader, rows[0], target, 0)
    found = []
    for part in parts:
        before = max(len(rows[1].tokens) - 1, 0)
        rows[1].tokens += part
        observe(reader, rows[1], target, before)
        some = rows if not found else rows[1:]
        found.append(reader.filled(some)[-1])
    return found


def observe(reader: Any, row: Row, target: PreTrainedModel, before: int) -> None:
    count = len(row.tokens) - 1 - before
    states = {layer: [features(target, row.tokens, [layer])[before:]] for layer in reader.head.layers}
    reader.observe([row], Scores(torch.zeros(1), states, [0]), [Accepted(tuple(range(count)), row.tokens[-1], False)])


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference in probability."""
    return (found[: len(expected)].softmax(-1) - expected.softmax(-1)).abs().max().item()


# ---------------------------------------------------------------- checkpoints of others


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_blocks_are_those_of_the_reference(name: str, variant: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    form.write(tmp_path, target, 0, **form.variants[variant])
    head = read(tmp_path, target)
    text: list[int] = []
    for part, logits in zip((TOKENS, LATER, [1]), filled(head, target, TOKENS, LATER, [1]), strict=True):
        text += part
        expected = form.logits(tmp_path, target, text, [0] * (head.drafts - 1))
        assert logits.shape == expected.shape and len(logits) == head.block_size - (variant != "from the anchor")
        assert torch.equal(logits.isinf(), expected.isinf())
        assert apart(logits, expected) < 1e-5


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_a_reader_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    form.write(tmp_path, target, 0, **form.controls[wrong])
    (logits,) = filled(read(tmp_path, target), target, TOKENS)
    assert apart(logits, form.logits(tmp_path, target, TOKENS, [0, 0], wrong=wrong)) > 1e-3
