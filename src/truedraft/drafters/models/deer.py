"""DEER: a diffusion language model fills masks behind the text in one pass, whatever the length of the draft.

Cheng et al., "DEER: Draft with Diffusion, Verify with Autoregressive Models", 2025 (arXiv 2512.15176). Each mask has a
distribution of its own, given the text alone: a token of the draft does not depend on those before it, so that an error
does not spread, and neither does what was right. Under rules that verify drawn drafts the tokens are drawn from these
distributions, independently, and verified against them; else they are the likeliest ones. It wins where a diffusion
model with the target's tokenizer is much faster than the target and text is predictable for many tokens; where the text
is open, masks further behind predict mixtures of continuations, and heads that read their own drafts reach further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters.models._mask_drafter import SEQ2SEQ, MaskDrafter


@dataclass
class Deer(MaskDrafter):
    card = Card(
        paper="arXiv 2512.15176 (2025)",
        idea="A diffusion language model fills in several masks behind the text in one pass.",
        family="diffusion model",
        needs=("diffusion model",),
        cannot=SEQ2SEQ,
        presets={"deer-tree": {"top_k": 8}},
        published="5.5x on HumanEval for Qwen3-30B-A3B, where EAGLE-3 gives 2.4x (one GPU); drafts of up to 32 tokens.",
        lacks={
            "deer": "drafts are made as published; neither stage of its training is here, so that the diffusion model "
            "is one that was trained for whole texts",
        },
    )
    model: Any = None  # a diffusion model of transformers, or its name: a folder, an embedded model, one on the hub
    depth: int = knob(16, 1, 64)  # masks, that is tokens of a chain; published 32
    top_k: int = knob(1, 1, 256)  # tokens of a mask, 1 for a chain; published 1
    nodes: int = knob(24, 1, 1024)  # of a tree; published: the chain
    drawn: bool = knob(True)  # a chain drawn from the masks, for rules that verify such drafts; published True
