"""Drafters, rules and controls from what callers give: themselves, their names, or a model that drafts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import registry
from truedraft.drafters._base import Drafter, Plain
from truedraft.drafters._compose import name_of
from truedraft.errors import Refused
from truedraft.targets.unwrapping import unwrapped

DRAWN = {
    "certain": "certain",
    "one": "drawn one by one",
    "independent": "drawn independently of each other",
    "distinct": "drawn without replacement",
    "last": "certain but for the last of each node",
}


BY_ITSELF = "input-guided+suffix-wide+token-recycling"  # "auto": what drafts where nothing was chosen


def part(given: Any, kind: str, base: type) -> Any:
    """A drafter, rule or control, from itself or its name."""
    if isinstance(given, str):
        return registry.load(kind, given)
    if isinstance(given, base):
        return given
    what = {"drafters": "draft", "accept": "rule"}.get(kind, kind)
    raise Refused(f"{what}={given!r}: give a {base.__name__} or the name of one (`truedraft methods` lists them)")


def drafter_of(given: Any) -> Drafter:
    """A drafter from itself, its name, "auto", a model that is to draft, or None."""
    if given is None:
        return Plain()
    if given == "auto":
        given = BY_ITSELF
    if isinstance(given := unwrapped(given), PreTrainedModel):
        return registry.load("drafters", "draft-model", model=given)
    return part(given, "drafters", Drafter)


def check_vocabulary(drafter: Drafter, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
    """Raises Refused where a drafter has other tokens than the target."""
    name = name_of(drafter)
    if drafter.tokenizer is not None and tokenizer is not None:
        if drafter.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise Refused(
                f"the tokenizer of {name} ({len(drafter.tokenizer)} entries) differs from the model's "
                f"({len(tokenizer)}): use a drafter made for this model"
            )
    elif drafter.tokenizer is not None and drafter.knows != vocabulary:
        raise Refused(f"{name} has a tokenizer of its own: give accelerate() the model's, so they can be compared")
    elif drafter.knows not in (None, vocabulary):
        raise Refused(
            f"{name} knows {drafter.knows} tokens, the model {vocabulary}: use a drafter made for this model, or, "
            "if only the padding differs, give accelerate() the tokenizer and the draft model by its name"
        )
