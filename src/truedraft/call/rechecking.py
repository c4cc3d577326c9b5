"""`ties="recheck"`: checks of whether a call supports it, and the source of recomputed logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from truedraft.accept._base import ArgmaxRule, Rule
from truedraft.drafters._compose import name_of
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.targets._base import Target
from truedraft.tree import Row


def check_ties(ties: str, target: Target, rule: Rule | None) -> None:
    """Raises Refused for a value of `ties` that is unknown, or that this target or rule does not support."""
    if ties not in ("keep", "recheck"):
        raise Refused(f"ties={ties!r}: give 'keep', or 'recheck' (near-ties scored again as model.generate does)")
    if ties == "recheck" and target.reads_sources:
        raise Refused("ties='recheck' is for decoder language models, and this is an encoder-decoder: leave it out")
    if ties == "recheck" and target.view is not None:
        raise Refused(
            f"ties='recheck' is for the model's own text, and {target.view.lossy} is not: leave one of them out"
        )
    if ties == "recheck" and rule is not None and not (rule.guarantee == "tokens" and isinstance(rule, ArgmaxRule)):
        raise Refused(
            f"ties='recheck' is for rules that give the tokens of model.generate, and {name_of(rule)} does not: "
            "leave one of them out"
        )


def reference_of(ties: str, target: Target, rows: int, capacity: int, laws: Laws) -> Callable[[Row], Tensor] | None:
    """A function that recomputes the (V,) logits of a row's next token, for near-ties; None for `ties="keep"`, and
    where the target's passes have the bits of `model.generate` as they are.

    Raises:
        Refused: a processor may count its calls; or there is no memory for a second cache.
    """
    if ties == "keep" or target.decides_as_generate:
        return None
    if laws.unknown_processors:
        raise Refused(
            f"ties='recheck' scores some tokens twice, and {', '.join(laws.unknown_processors)} may count its calls: "
            "leave one of them out"
        )
    return target.reference(rows, capacity)
