"""Training of filters that tell which predictions of a diffusion model are final, on traces of its decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from truedraft import registry
from truedraft.accelerated import accelerate
from truedraft.canvas._base import CanvasRow, Fixed, Policy, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._filter import Filter, confidences
from truedraft.card import knob
from truedraft.errors import Refused
from truedraft.train.checkpoints import write_state
from truedraft.train.loop import Plan, Run, announce, fit

FILE = "filter"  # file name in the folder of a run
HELD_OUT = 10  # one step in this many is held out for validation
LOG = "filter.jsonl"  # file name beside that of the filter


@dataclass(frozen=True)
class Traces:
    """Steps of step-by-step decoding, n of them.

    confidences: (n, block) of the predictions, 1 where a position is known.
    final: (n, block) bool, whether a prediction is the token of the text.
    masked: (n, block) bool, the positions that are not known.
    """

    confidences: Tensor
    final: Tensor
    masked: Tensor

    def __len__(self) -> int:
        return len(self.masked)

    def at(self, steps: Sequence[int] | Tensor) -> Traces:
        """Some of the steps."""
        return Traces(self.confidences[steps], self.final[steps], self.masked[steps])

    def loss(self, module: torch.nn.Module) -> Tensor:
        """Mean binary cross-entropy of a filter at the masked positions."""
        return binary_cross_entropy_with_logits(module(self.confidences)[self.masked], self.final[self.masked].float())


@dataclass
class _Recorder(Policy):
    """A reference that keeps the predictions of each step in the memory of the row."""

    reference: Policy
    guarantee = "tokens"
    found: dict[int, list[Predictions]] = field(default_factory=dict)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        self.found.setdefault(row.index, []).append(predictions)
        return self.reference.choose(predictions, row)


def traces_of(model: Any, layout: Layout, prompts: Sequence[Sequence[int]], new: int, reference: Policy) -> Traces:
    """The steps of a model's step-by-step decoding behind prompts.

    Args:
        new: most new tokens of a text.

    Raises:
        Refused: it writes nothing.
    """
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    rule: Any = _Recorder(reference)
    fast: Any = accelerate(model, draft=None, rule=rule, layout=layout)
    for prompt in prompts:
        rows = list[CanvasRow]()
        fast.generate(torch.tensor([list(prompt)]), max_new_tokens=new, do_sample=False, on_canvas=rows.extend)
        text = rows[-1].canvas.tokens
        steps += [_step(predictions, text, layout.block) for predictions in rule.found.pop(0)]
    if not steps:
        raise Refused("--data: the model writes nothing behind these prompts: give others")
    return Traces(*map(torch.stack, zip(*steps, strict=True)))


def _step(predictions: Predictions, text: Sequence[int], block: int) -> tuple[Tensor, Tensor, Tensor]:
    final, masked = torch.zeros(2, block, dtype=torch.bool)
    for place, token in zip(predictions.positions, predictions.tokens, strict=True):
        at = place - predictions.block.start
        final[at], masked[at] = token == text[place], True
    return confidences(predictions, block), final, masked


@dataclass
class FilterTraining:
    """The training of `lossy/learn2pd`."""

    checkpoint: ClassVar[str] = FILE
    hidden: int = knob(64, 1, 4096)  # units of the perceptron (64)
    batch: int = knob(256, 1, 1 << 16)  # steps of decoding in a batch (256)

    def train(
        self, model: Any, tokenizer: Any, layout: Layout, prompts: Sequence[Sequence[int]], new: int, out: Path,
        plan: Plan, state: dict[str, Any] | None, report: Callable[[str], None],
    ) -> str:  # fmt: skip
        """Train a filter on traces of the model's decoding, which a run that is continued makes again; see
        `canvases.Training`.

        Raises:
            Refused: the loss is not a number.
        """
        report(f"the steps of {len(prompts)} texts")
        traces = traces_of(model, layout, prompts, new, registry.load("canvas.policies", "low-confidence"))
        train_filter(traces, out / FILE, plan, hidden=self.hidden, batch=self.batch, state=state, report=report)
        return f"{out / FILE}: use it as --rule lossy/learn2pd:model={out / FILE}"


def train_filter(
    traces: Traces, out: Path, plan: Plan, *, hidden: int = 64, batch: int = 256,
    state: dict[str, Any] | None = None, report: Callable[[str], None] = announce,
) -> Filter:  # fmt: skip
    """Train a filter for `lossy/learn2pd` on the CPU, and write it with its log beside it.

    Args:
        traces: of the model that it is for; of `traces_of`.
        out: its file; the best by the loss on steps that are held out.
        batch: steps per step of the training.
        state: of the run that is continued.

    Raises:
        Refused: the loss is not a number.
        OSError: the file cannot be written.
    """
    torch.manual_seed(plan.seed)
    module = Filter(traces.masked.shape[1], hidden)
    held = traces.at(range(0, len(traces), HELD_OUT))
    learnt = traces.at([i for i in range(len(traces)) if i % HELD_OUT] or [0])

    def save(run: Run) -> None:
        if run.rows[-1]["held_out"] <= min(row["held_out"] for row in run.rows):
            module.save(out)
        write_state(out.parent, run.state())

    fit(
        module, lambda steps: learnt.at(steps).loss(module),
        islice(_drawn(len(learnt), batch, plan.seed), state["steps"] if state else 0, None), plan, state=state,
        validate=lambda: {"held_out": round(held.loss(module).item(), 6)}, save=save, log=out.parent / LOG,
        report=report,
    )  # fmt: skip
    return Filter.read(out)


def _drawn(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(count, (batch,), generator=generator)
