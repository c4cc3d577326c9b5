"""Audit of diffusion models: what the canvas loop fixes, step by step, against plain step-by-step decoding.

The oracle is `canvas/reference.py` over the model's own forward, without caches. Every speculator is run on the same
prompts, alone and in batches, greedily and under seeds. At the first step that differs, the canvas before it is scored
again in higher precision: where the confidences or scores that decide are closer than the noise of the model's own
logits the divergence is a tie, else a bug. In one of several passes the logits of all canvases are compared too, with
those of plain forwards over their texts; what is not the model's is a bug, even where the text is the same. The order
of fixing is the policy's in oracle and engine: it is compared with a statement of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from truedraft.audit.precise import Precise
from truedraft.audit.tokens import FAR, Audit, Divergence, Mode, Progress, finished, runs_of
from truedraft.canvas._base import Canvas, CanvasRow, Fixed, Policy, Predictions
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.canvas.engine import CanvasEngine
from truedraft.canvas.layout import Layout
from truedraft.canvas.reference import step_by_step
from truedraft.canvas.settings import Settings, prompts_of, settings_of
from truedraft.canvas.targets import Variant, plain_logits
from truedraft.card import method_name
from truedraft.errors import Refused

EVERY = 5  # of so many passes one is compared in its logits
ORDERS: dict[str, Callable[[Predictions, Sequence[float]], list[int]]] = {  # policy -> indices in the order of fixing
    "low-confidence": lambda found, sure: sorted(range(len(sure)), key=lambda i: (-sure[i], found.positions[i])),
    "left-to-right": lambda found, sure: sorted(range(len(sure)), key=lambda i: found.positions[i]),
}


class Watched(Policy):
    """A reference whose order of fixing is compared with a statement of it.

    wrong: the first step that differs, what it should have fixed, and what it did.
    """

    guarantee = "tokens"

    def __init__(self, policy: Any):
        self.policy, self.order = policy, ORDERS.get(method_name(policy))
        self.wrong: tuple[int, Fixed, Fixed] | None = None

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        fixed = self.policy.choose(predictions, row)
        if self.order is not None and self.wrong is None:
            sure = [float(scores[token]) for scores, token in zip(predictions.scores, predictions.tokens, strict=True)]
            first = self.order(predictions, sure)[: self.policy.tokens]
            stated = frozenset((predictions.positions[i], predictions.tokens[i]) for i in first)
            if fixed != stated:
                self.wrong = row.step, stated, fixed
        return fixed


class Oracle:
    """Step-by-step decoding of one model, and the noise of its logits.

    noise: largest error of the logits at masked positions seen so far.
    """

    def __init__(self, model: Any, layout: Layout, unmasked: bool):
        self.model, self.layout, self.unmasked = model, layout, unmasked
        self.precise = Precise(model)
        self.noise = 0.0

    def plain(self, text: Sequence[int], layout: Layout) -> Tensor:
        """(length, V) of the model's own forward."""
        found = plain_logits(self.model, [text], layout, self.unmasked)[0].float().cpu()
        true = self.exact(text, layout)
        rounding = torch.finfo(self.model.dtype).eps * float(true.abs().max())
        self.noise = max(self.noise, float((found - true).abs().max()), 4 * rounding)
        return found

    def exact(self, text: Sequence[int], layout: Layout) -> Tensor:
        """The same in higher precision, fp64."""
        return plain_logits(self.precise.model, [text], layout, self.unmasked)[0].double().cpu()

    def row(self, policy: Policy, prompt: Sequence[int], index: int, settings: Settings) -> CanvasRow:
        """A prompt decoded step by step."""
        return step_by_step(
            self.plain, settings.layout, prompt, settings.new, policy, settings.chooser, settings.ends, index,
            settings.stops,
        )  # fmt: skip


def audit_canvases(
    model: Any, tokenizer: Any, sides: Mapping[str, AcceleratedCanvas], prompts: Sequence[str], name: str = "",
    tokens: int = 64, batches: Sequence[int] = (1, 4), modes: Sequence[Mode] = (Mode(False), Mode(True)),
    progress: Progress = lambda *_: None,
) -> Audit:  # fmt: skip
    """Compare accelerated diffusion models with their step-by-step decoding; arguments as `tokens.audit`.

    Raises:
        Refused: the model fixes no positions.
        KeyboardInterrupt: Ctrl-C; its `finished` is the audit of what was compared before it.
    """
    first = next(iter(sides.values()))
    if (layout := getattr(first, "layout", None)) is None:
        kind = type(model).__name__
        raise Refused(
            f"{kind}: its texts are rewritten as a whole, so no later canvas can be verified ahead, or audited"
        )
    oracle = Oracle(model, layout, getattr(first.target, "unmasked", False))
    found = Audit(name, str(model.dtype).removeprefix("torch."), oracle.precise.dtype, first.target.runtime)
    found.drafters, found.prompts = list(sides), len(prompts)
    runs = runs_of(prompts, batches, modes, len(sides))
    found.texts = len(sides) * sum(len(run.texts) for run in runs)
    with finished(found):
        for run in runs:
            run.show(progress, 0, "the model alone")
            given: dict[str, Any] = {"max_new_tokens": tokens, "seed": run.mode.seed, "do_sample": run.mode.sample}
            if run.mode.sample:
                given["temperature"] = run.mode.temperature
            inputs = tokenizer(run.texts, return_tensors="pt", padding=len(run.texts) > 1, padding_side="left")
            settings = settings_of(model, first.layout, inputs.input_ids.shape[1], given)
            lines = prompts_of(inputs.input_ids, inputs.attention_mask, first.layout, first.target.vocabulary)
            watched = Watched(first.policy)
            expected = [oracle.row(watched, line, i, settings) for i, line in enumerate(lines)]
            found.noise = oracle.noise
            if watched.wrong is not None:
                step, (_, stated), (_, did) = watched.wrong[0], min(watched.wrong[1]), min(watched.wrong[2])
                found.found.append(Divergence(
                    "order of fixing", str(run.mode), len(run.texts), run.start, step, stated, did, None, oracle.noise,
                    0.0, "bug",
                ))  # fmt: skip
            for number, (drafter, side) in enumerate(sides.items(), 1):
                run.show(progress, number, drafter)
                apart = list(_compared(side, oracle, inputs, given, settings, expected, found))
                found.count(drafter, run, [len(reference.text) for reference in expected])
                place = dict(drafter=drafter, mode=str(run.mode), batch=len(run.texts), noise=oracle.noise)
                found.found += [Divergence(**place, prompt=run.start + row, **facts) for row, facts in apart]  # type: ignore[arg-type]
    found.noise = oracle.noise
    return found


def _compared(
    side: AcceleratedCanvas, oracle: Oracle, inputs: Any, given: Mapping[str, Any], settings: Settings,
    expected: Sequence[CanvasRow], found: Audit,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """The rows that differ, each with the fields of its `Divergence`."""
    rows: list[CanvasRow] = []
    with _checked(oracle, found) as wrong:
        side.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, on_canvas=lambda now: rows.extend(now[len(rows) :]),
            **given,
        )  # fmt: skip
    for index, (reference, row) in enumerate(zip(expected, rows, strict=True)):
        steps = list(zip_longest(reference.taken, row.taken))
        at = next((i for i, (one, other) in enumerate(steps) if one != other), None)
        error = wrong.get(index, 0.0)
        if at is None and not error:
            continue
        gap, kind, a, b = None, "bug", -1, -1
        if at is not None and None not in steps[at]:
            gap = _gap(oracle, reference, at, *steps[at], settings)
            (_, a), (_, b) = min(steps[at][0]), min(steps[at][1])
            kind = "tie" if gap <= 4 * oracle.noise and not error else "bug"
        yield index, dict(position=at or 0, expected=a, got=b, gap=gap, row_error=error, kind=kind)


def _gap(oracle: Oracle, row: CanvasRow, at: int, expected: Fixed, got: Fixed, settings: Settings) -> float:
    """How far apart the two steps are by the model's own scores, in higher precision."""
    canvas = Canvas(list(row.canvas.tokens), list(row.canvas.known))
    for step in row.taken[at:]:
        for position, _ in step:
            canvas.tokens[position], canvas.known[position] = settings.layout.mask, False
    block = next(block for block in row.blocks if canvas.masked(block))
    masked = canvas.masked(block)
    text = canvas.tokens if settings.layout.attention == "whole" else canvas.tokens[: block.stop]
    logits = oracle.exact(text, settings.layout)[[place - settings.layout.shifted for place in masked]]
    [true] = settings.chooser.predictions(logits, row.index, [at], [masked], [block])
    places = {place: i for i, place in enumerate(true.positions)}
    scores = true.logits.double().log_softmax(-1)
    if settings.chooser.noise is not None:
        scores -= settings.chooser.noise.at(row.index, masked, at, scores.shape[-1]).double().log()
    gaps = [float(scores[places[p]].max() - scores[places[p], token]) for p, token in expected | got if p in places]
    confidences = [true.confidence[places[p]] for p, _ in expected ^ got if p in places]
    return max([*gaps, max(confidences, default=0.0) - min(confidences, default=0.0)])


@contextmanager
def _checked(oracle: Oracle, found: Audit) -> Iterator[dict[int, float]]:
    """Within the block, the logits of all canvases of one in `EVERY` passes are compared with plain forwards over their
    texts; by row the largest error, where it is not the model's own noise."""
    score, wrong, passes = CanvasEngine.score, dict[int, float](), 0

    def compared(self: CanvasEngine, variants: Sequence[Sequence[Variant]]) -> list[Tensor]:
        nonlocal passes
        logits, passes = score(self, variants), passes + 1
        if passes % EVERY:
            return logits
        layout = self.target.layout
        for row, of_row, scored in zip(self.rows, variants, logits, strict=True):
            true = []
            for one in of_row:
                text = oracle.exact([*row.canvas.tokens[: one.start], *one.tokens], layout)
                true.append(text[[place - layout.shifted for place in one.masked]])
            error = float((scored.double().cpu() - torch.cat(true)).abs().max())
            found.rows += len(scored)
            if error > FAR * oracle.noise:
                wrong[row.index] = max(wrong.get(row.index, 0.0), error)
            else:
                found.worst_row = max(found.worst_row, error / oracle.noise)
        return logits

    CanvasEngine.score = compared  # type: ignore[method-assign]
    try:
        yield wrong
    finally:
        CanvasEngine.score = score  # type: ignore[method-assign]
