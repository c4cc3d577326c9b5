"""Public checkpoint formats of learned drafters: writers of tiny random folders, and plain references of their drafts.

Nothing here reads the package: each reference follows the published law alone, without caches, and is the oracle for
the readers of `truedraft.drafters.heads`. Every format follows one calling convention, that of `Foreign`:

    form = FORMATS["eagle3-speculators"]
    target = form.target(dtype=torch.float64)
    folder = form.write(tmp_path / "head", target, seed=0, **form.variants["norm before fc"])
    logits = form.logits(folder, target, tokens=[5, 17, 3], drafted=[8, 2])  # (3, V)

`tokens` ends with the pending token, which the target has not processed yet; row j of the logits is the draft for the
token after `tokens + drafted[:j]`, over the target's vocabulary, -inf outside the draft's. `wrong=`, a key of
`form.controls`, plants that error of a reader into the law, so that a test can show that it would notice it.

Weights are stored in float32, those inside a checkpoint in its own type, and computed with in the target's type.
transformers takes norms in float32 whatever the type of a model, and angles too, so two right readers of a float64
target differ by about 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from foreign.common import llama

Variant = Mapping[str, Any]


@dataclass(frozen=True)
class Foreign:
    """One format of checkpoints."""

    name: str
    write: Callable[..., Path]  # write(folder, target, seed, **variant) -> folder
    logits: Callable[..., Tensor]  # logits(folder, target, tokens, drafted, wrong="") -> (1 + drafted, V)
    # What row j may depend on: "recurrent": on drafted[:j], any number of rows; "conditional": likewise, at most
    # `rows`; "parallel": on tokens alone, at most `rows`
    kind: Literal["recurrent", "conditional", "parallel"]
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"published": {}})  # by name, arguments of write
    controls: Mapping[str, Variant] = field(default_factory=dict)  # error of a reader -> the variant that shows it
    target: Callable[..., PreTrainedModel] = llama  # target(seed=0, dtype=torch.float32)
    rows: int | None = None  # of the published variant; None: no limit
    file: str = "model.safetensors"  # the weights' file of the published variant


def _formats() -> dict[str, Foreign]:
    from foreign import dflash, eagle1, eagle3, hydra, medusa, mlp_speculator, mtp

    families = (eagle1, eagle3, medusa, hydra, mlp_speculator, dflash, mtp)
    return {form.name: form for family in families for form in family.FORMATS}


FORMATS = _formats()  # by name
