"""Training a learned drafter for a target, on the target's own responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accelerated import accelerate
from truedraft.drafters._learned import Learner, Metrics
from truedraft.errors import Refused, why
from truedraft.files import write_whole
from truedraft.train.batches import Feed, Line, Reader, SourceReader, sorted_groups
from truedraft.train.checkpoints import LOG, STATE, check_fresh, read_state, write_state
from truedraft.train.curves import drawn
from truedraft.train.loop import Plan, Run, announce, check_bf16, fit
from truedraft.train.responses import Given, Responding, given_lines, given_texts, target_responses

T = TypeVar("T")
HELD_OUT = 100  # one line in this many is held out for validation,
FEW, SHARE = 20, 10  # or more often, for this many lines, but at most one line in so many,
MOST = 200  # and at most this many lines
CURVES = "curves.svg"  # file name in a checkpoint's folder


def train_drafter(
    learner: Learner,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Given],
    out: Path,
    plan: Plan,
    *,
    answers: Sequence[Given | None] | None = None,
    weights: Sequence[float] = (),
    texts: Sequence[str] = (),
    share: float = 0.1,
    responses: Path | None = None,
    how: Responding | None = None,
    batch: int = 2048,
    resume: bool = False,
    start: Path | None = None,
    report: Callable[[str], None] = announce,
) -> dict[str, float]:
    """Train a drafter for a model. The best checkpoint, the run's state, its log with a picture, and the model's
    responses are kept in a folder.

    Args:
        learner: the drafter's module, its loss and its evaluation.
        model: the target, in eval mode; its weights are frozen.
        sources: prompts; an encoder-decoder's inputs.
        out: the folder; a checkpoint in it is continued with `resume`, and refused without. A run that was interrupted
            goes on from its last validation, as if it had not been; one without a state begins anew with the weights.
        answers: responses to use instead of the target's own; None for a text of its own, see `given_responses`.
        weights: of the answers: how often each is trained on, relative to the others; by default equally often.
        texts: that other lines are mixed with, for decoders: all of their tokens but the first are predicted.
        share: the share of lines that is drawn from these.
        responses: folder of the target's responses; by default `out`.
        how: how the target responds, and how long texts may be.
        batch: tokens of a step, with padding; of an encoder-decoder those of the longer side.
        start: the folder of a checkpoint of the same knobs to start from; `out` has it until one is better on the
            held-out lines.
        report: called with lines of text on the progress.

    Returns:
        The figure of the best validation, whose checkpoint is kept.

    Raises:
        Refused: the drafter does not support this model, the model cannot be hosted, or the contents of the folder do
            not fit, before any work; later, the loss is not a number, or a file cannot be written. The last checkpoint
            is kept.
    """
    check_bf16(plan, model.device)
    model.requires_grad_(False)
    learner.tokenizer = tokenizer
    with model.device:
        learner.begin(model)
    state = _checked(learner, model, out, resume, plan)
    if start is not None and (note := learner.restore(start, model)):
        report(note)
    with _writing(out, learner):
        out.mkdir(parents=True, exist_ok=True)
        if start is not None:
            learner.save(out, model)
        how = how or Responding()
        kept = responses or out
        lines, others, read, places = _read(model, tokenizer, sources, answers, texts, kept, how, learner, report)
        (held, trained), (_, often) = held_out(lines), held_out([weights[i] for i in places] if weights else [])
        training = _Training(learner, model, out, read, held, batch)
        with model.device:
            begun = training.begin(trained, state, continued=resume or start is not None)
            size = sum(p.numel() for p in learner.module.parameters())
            mixture = f" and {len(others):,} texts" if others else ""
            report(f"{size:,} weights, {len(trained):,} lines{mixture} to train on, {len(held):,} held out")
            drawn_before = 0 if state is None else state["steps"] * plan.micro
            training.feed = Feed(trained, batch, plan.seed, read, drawn_before, others, share, scaled(often))
            fit(
                learner.module, learner.loss, training.feed, plan, validate=training.validate, save=training.save,
                log=out / LOG, groups=learner.parameter_groups(), state=state, begun=begun,
                on_progress=partial(setattr, learner, "progress"), report=report,
            )  # fmt: skip
    return {"tokens_per_pass": training.best}


def held_out(lines: Sequence[T]) -> tuple[list[T], list[T]]:
    """The lines that are held out for validation, and those to train on."""
    step = max(min(HELD_OUT, max(len(lines) // FEW, SHARE)), len(lines) // MOST)
    held = [*lines[::step]]
    return held, [line for i, line in enumerate(lines) if i % step] or held


def scaled(weights: Sequence[float]) -> list[float]:
    """Weights with a mean of 1.

    Raises:
        Refused: there are some, and all are 0.
    """
    total = sum(weights)
    if weights and not total:
        raise Refused("--weights: all lines to train on have the weight 0: give others")
    return [weight * len(weights) / total for weight in weights]


@dataclass
class _Training:
    """Validation and saving of a run. best: `tokens_per_pass` of the checkpoint in the folder."""

    learner: Learner
    model: PreTrainedModel
    out: Path
    read: Reader
    held: Sequence[Line]
    batch: int
    best: float = 0.0
    feed: Feed | None = None

    @torch.no_grad()
    def begin(self, lines: Sequence[Line], state: dict[str, Any] | None, continued: bool) -> Metrics | None:
        """Set the module up for the lines to train on; its figures before, where weights are trained on from which no
        run with a state goes on."""
        if state is not None:
            self.best = _number(state["best"])
            return None
        if continued:
            self.learner.module.eval()
            figures = self.validate()
            self.best = _number(figures["tokens_per_pass"])
            return figures
        tokens = torch.tensor([*chain.from_iterable(map(self.read.predicted, lines))])
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        self.learner.prepare(tokens.bincount(minlength=vocabulary))
        return None

    def validate(self) -> Metrics:
        tokens: Metrics = {"tokens": self.feed.tokens} if self.feed is not None else {}
        return {
            **tokens,
            **self.learner.evaluate(map(self.read, sorted_groups(self.held, self.batch, self.read.width))),
        }

    def save(self, run: Run) -> None:
        """Write the checkpoint where it is the best so far, then the run's state and its picture."""
        reached = _number(run.rows[-1]["tokens_per_pass"])
        if reached >= self.best:
            self.best = reached
            self.learner.save(self.out, self.model)
        write_state(self.out, {"best": self.best, **run.state()})
        write_whole(self.out / CURVES, drawn(run.rows))


def _checked(learner: Learner, model: PreTrainedModel, out: Path, resume: bool, plan: Plan) -> dict[str, Any] | None:
    """Load the checkpoint that is continued; the state of its run, None where there is none."""
    if not resume:
        check_fresh(out, learner.checkpoint)
        return None
    if not (out / learner.checkpoint).exists():
        raise Refused(f"--resume: there is no checkpoint in {str(out)!r}")
    if note := learner.restore(out, model):
        raise Refused(f"--resume: {note}, and a run goes on with one target alone: give --from {out} and another --out")
    state = read_state(out)
    if state is not None and plan.fraction_done(state["minutes"], state["steps"]) >= 1:
        raise Refused(
            f"--resume: the run in {str(out)!r} is complete after {state['minutes']:.1f} minutes: give more --minutes, "
            f"or remove {STATE} there to begin another from its weights"
        )
    return state


def _read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Given],
    answers: Sequence[Given | None] | None, texts: Sequence[str], out: Path, how: Responding, learner: Learner,
    report: Callable[[str], None],
) -> tuple[list[Line], list[Line], Reader, list[int]]:  # fmt: skip
    """The lines to train on, those that are mixed with them, what makes batches, and the places of the former among
    `answers`; the target is hosted for its responses alone."""
    fast = accelerate(model, tokenizer, draft=None)
    read = (SourceReader if fast.target.reads_sources else Reader)(model, learner.needs.hidden)
    others = given_texts(fast, tokenizer, texts, report, how) if texts else []
    if answers is None:
        return target_responses(fast, tokenizer, sources, out, report, how), others, read, []
    found = given_lines(fast, tokenizer, sources, answers, report, how)
    return [line for _, line in found], others, read, [place for place, _ in found]


@contextmanager
def _writing(out: Path, learner: Learner) -> Iterator[None]:
    """Within the block, a file that cannot be written is refused in one sentence."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        rest = "the last checkpoint is kept: make room, and go on with --resume"
        if not (out / learner.checkpoint).exists():
            rest = "make room, and give the command again, which goes on from the responses that were kept"
        raise Refused(f"{e.filename or out}: {why(e)}; {rest}") from e


def _number(value: Any) -> float:
    assert isinstance(value, float | int)
    return float(value)
