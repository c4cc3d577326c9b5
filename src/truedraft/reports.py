"""The report of a call: as it begins, and as it ends."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.accept._base import AttributingRule, Rule
from truedraft.accept._ties import NearTies
from truedraft.card import lacking
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.drafters._compose import name_of
from truedraft.sampling import Laws
from truedraft.stats import Report
from truedraft.stopping import Stops
from truedraft.targets._base import Target
from truedraft.tree import Row


def new_report(target: Target, drafter: Drafter, rule: Rule, control: Control, seconds: dict[str, float]) -> Report:
    """The report of a call that begins: the names of its parts, and the reference of its guarantee."""
    dtype = str(target.dtype).removeprefix("torch.")
    report = Report(
        name_of(drafter), name_of(rule), guarantee_of(target, rule), name_of(control), target.runtime, dtype=dtype,
        reference=_reference(target, rule, dtype), seconds=seconds,
    )  # fmt: skip
    report.notes += [*drafter.notes, *lacking(rule)]
    if target.view is not None:
        report.notes += [*target.view.notes, *target.fitting(target.view)]
    lossy = [name_of(rule)] if rule.guarantee == "none" else []
    lossy += [] if target.view is None else [target.view.lossy]
    report.notes += [f"{name} is lossy: this is not the text that the model alone would generate" for name in lossy]
    return report


def guarantee_of(target: Target, rule: Rule | None) -> str:
    """What holds of the text beside the model's own; rule: None for those of `model.generate`."""
    if target.view is not None:
        return "none"
    return "tokens" if rule is None else rule.guarantee


def complete(report: Report, target: Target, rule: Rule | NearTies) -> None:
    """Complete a report after the last pass: runtime, attributions, near-ties."""
    report.runtime = target.runtime
    if isinstance(rule, AttributingRule):
        report.attributions = rule.attributions()
    if isinstance(rule, NearTies):
        report.near_ties = rule.rate


def notes_on(rows: Sequence[Row], laws: Laws, stops: Stops) -> list[str]:
    """The note on why rows advanced in lockstep; none where they did not."""
    if len(rows) == 1 or not stops.lockstep:
        return []
    if unknown := laws.unknown_processors + stops.unknown_processors:
        return [f"rows advanced together, because {', '.join(unknown)} may look across rows"]
    cause = "the scores of every step are returned" if laws.lockstep else "there is no end-of-text token"
    return [f"rows advanced together, because {cause}"]


def notes_on_ties(why: str) -> list[str]:
    """The note on why near-ties are scored again by a pass of their own; none where `why` is empty."""
    return [f"near-ties are scored again by the model's own forward, token by token: {why}"] if why else []


def _reference(target: Target, rule: Rule, dtype: str) -> str:
    if guarantee_of(target, rule) == "none":
        return "none"
    of = {"tokens": "plain decoding", "distribution": "the law of plain sampling"}[rule.guarantee]
    if target.decides_as_generate:
        return f"{of} by model.generate, to the bit"
    ties = f"up to ties of {dtype}"
    if target.batch_invariant:
        return f"{of} through the same pass, to the bit; model.generate {ties}"
    return f"{of} through the same pass and model.generate, both {ties}"
