"""How a diffusion language model reads a canvas: what positions attend to, and which position a logit is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

from truedraft.errors import Refused

Attention = Literal["whole", "blocks"]
FIELD = "canvas_config"  # of a model's configuration: the arguments of `Layout`
KNOWN: dict[str, dict[str, Any]] = {  # model type -> layout, without what the configuration itself has
    "llada": {"attention": "whole", "block": 32},
    "Dream": {"attention": "whole", "block": 32, "shifted": True},
    "sdar": {"attention": "blocks", "block": 4},
    "llada2_moe": {"attention": "blocks", "block": 32},
    "Fast_dLLM_Qwen": {"attention": "blocks", "block": 32, "shifted": True},
}
SUBSETS = ("xlnet",)  # model types of any-subset models, which have no layout (`canvas/subset.py`)

REFUSED = {
    "diffusion_gemma": "its canvas is no text with masks: whatever a step does not accept is drawn anew from the whole "
    "vocabulary; truedraft.accelerate(model) hosts it with the steps of its own generate"
}


@dataclass(frozen=True)
class Layout:
    """The canvas of a model.

    mask: id of the mask token.
    attention: "whole": every position attends to all (LLaDA, Dream); "blocks": to its own block and all earlier ones
        (block diffusion), so that keys and values of complete blocks never change.
    block: positions in a block. With attention in blocks they are counted from the first token of the text, else from
        the first one behind the prompt.
    shifted: the logits at a position are for the token behind it (models made from autoregressive ones).
    """

    mask: int
    attention: Attention = "whole"
    block: int = 32
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ("whole", "blocks"):
            raise Refused(f"attention={self.attention!r}: give 'whole' or 'blocks'")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise Refused(f"block_length={self.block!r}: give a whole number of at least 1")

    def of_length(self, block: int | None) -> Layout:
        """The same with blocks of another length; None for its own."""
        return self if block is None else replace(self, block=block)

    def blocks(self, prompt: int, new: int) -> list[range]:
        """The blocks with positions to fill behind a prompt, in order; of attention in blocks the first one may begin
        within the prompt, and the last one may exceed the new tokens."""
        if self.attention == "whole":
            ends = range(prompt, prompt + new, self.block)
            return [range(start, min(start + self.block, prompt + new)) for start in ends]
        first = prompt // self.block * self.block
        return [range(start, start + self.block) for start in range(first, prompt + new, self.block)]


def attending(config: Any, tokenizer: Any, attention: str | None, model: str) -> Layout | None:
    """The layout of `layout_of` with another attention than the model declares; None where none was given.

    attention: "whole" or "blocks". model: what the message calls the model.

    Raises:
        Refused: it is no diffusion model with masks.
    """
    if attention is None:
        return None
    if (layout := layout_of(config, tokenizer)) is None:
        raise Refused(f"--attention {attention} is for diffusion models, and {model} is none: drop it")
    return replace(layout, attention=cast(Attention, attention))


def declares(config: Mapping[str, Any]) -> bool:
    """Whether the configuration in a model's folder is that of a diffusion model with a canvas."""
    return config.get(FIELD) is not None or config.get("model_type") in KNOWN.keys() | REFUSED.keys()


def layout_of(config: Any, tokenizer: Any = None) -> Layout | None:
    """The layout that a configuration declares, or that its model type is known for; None for other models.

    config: None of what is no model of `transformers`.

    Raises:
        Refused: a diffusion model without a mask token, or of another kind.
    """
    if config is None:
        return None
    if (why := REFUSED.get(config.model_type)) is not None:
        raise Refused(f"{config.model_type} has no layout with masks: {why}")
    declared = getattr(config, FIELD, None)
    if declared is None and (declared := KNOWN.get(config.model_type)) is None:
        return None
    given = {"block": getattr(config, "block_size", None), "mask": getattr(config, "mask_token_id", None)}
    settings = {**{key: value for key, value in given.items() if value is not None}, **declared}
    if "mask" not in settings:
        if (mask := getattr(tokenizer, "mask_token_id", None)) is None:
            raise Refused(
                f"{config.model_type} has no mask token: set config.mask_token_id, or give its tokenizer, with one"
            )
        settings["mask"] = mask
    known = {each.name for each in fields(Layout)}
    if unknown := sorted({*settings} - known):
        raise Refused(f"{FIELD} of the configuration has {unknown[0]!r}: a layout has {', '.join(sorted(known))}")
    return Layout(**settings)
