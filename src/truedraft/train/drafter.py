"""Training a learned drafter for a target, on the target's own responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accelerated import Accelerated, accelerate
from truedraft.drafters._learned import WEIGHTS, Learner, Line, read_learnt, save_learnt
from truedraft.errors import Refused
from truedraft.train.loop import Plan, fit
from truedraft.train.pairs import bucketed, shuffled
from truedraft.train.responses import longest, target_responses

HELD_OUT = 100  # one line in this many is held out for validation,
MOST = 200  # at most this many lines


def train_drafter(
    learner: Learner,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    out: Path,
    plan: Plan,
    *,
    answers: Sequence[str] | None = None,
    batch: int = 2048,
    resume: bool = False,
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Train a drafter for a model; the best checkpoint, the log and the model's responses are kept in a folder.

    Args:
        learner: the drafter's module, its loss and its evaluation.
        model: the target, in eval mode; its weights are frozen.
        sources: its inputs, one text per line.
        out: the folder; a checkpoint in it is continued with `resume`, and refused without.
        answers: responses to use instead of the target's own.
        batch: tokens of a step, on the longer side, with padding.
        report: called with lines of text on the progress.

    Returns:
        The figure of the best validation, whose checkpoint is kept.

    Raises:
        Refused: the drafter does not support this model, or the contents of the folder do not fit; before any work.
    """
    with model.device:
        learner.begin(model)
    _check_folder(out, resume)
    if resume:
        learner.resume(*read_learnt(out, learner.name, model))
    out.mkdir(parents=True, exist_ok=True)
    fast = accelerate(model, tokenizer, draft=None)
    if answers is None:
        lines = target_responses(fast, tokenizer, sources, out, report)
    else:
        lines = _given(fast, tokenizer, sources, answers, report)
    step = max(HELD_OUT, len(lines) // MOST)
    held = lines[::step]
    trained = [line for i, line in enumerate(lines) if i % step] or held
    weights = sum(p.numel() for p in learner.module.parameters())
    report(f"{weights:,} weights, {len(trained):,} lines to train on, {len(held):,} held out")
    figures: dict[str, float] = {}
    best = 0.0

    def validate() -> dict[str, float]:
        figures.update(learner.evaluate(held))
        return figures

    def save() -> None:
        nonlocal best
        if figures["tokens_per_pass"] >= best:
            best = figures["tokens_per_pass"]
            save_learnt(out, learner.name, learner.module, model, learner.config())

    groups = bucketed(shuffled(trained, plan.seed), batch, plan.seed)
    with model.device:
        if resume:
            best = _initial(learner, held)
        fit(
            learner.module, learner.loss, groups, plan, validate=validate, save=save, log=out / "log.jsonl",
            on_progress=partial(setattr, learner, "progress"),
        )  # fmt: skip
    return {"tokens_per_pass": best}


def _check_folder(out: Path, resume: bool) -> None:
    if (out / WEIGHTS).exists() != resume:
        raise Refused(
            f"--resume: there is no checkpoint in {str(out)!r}" if resume
            else f"--out: {str(out)!r} holds a checkpoint: go on from it with --resume, or give another folder"
        )  # fmt: skip


@torch.no_grad()
def _initial(learner: Learner, held: Sequence[Line]) -> float:
    """Tokens per pass before training is continued."""
    learner.module.eval()
    return learner.evaluate(held)["tokens_per_pass"]


def _given(
    fast: Accelerated, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str], answers: Sequence[str],
    report: Callable[[str], None],
) -> list[Line]:  # fmt: skip
    start, most = fast.model.generation_config.decoder_start_token_id, longest(fast)
    inputs, labels = tokenizer(list(sources))["input_ids"], tokenizer(text_target=list(answers))["input_ids"]
    lines = [
        (a, [start, *b]) for a, b in zip(inputs, labels, strict=True)
        if 1 < len(a) <= most and 1 < len(b) < most
    ]  # fmt: skip
    if not lines:
        raise Refused(f"--data has no line with both sides of 1 to {most} tokens")
    if len(lines) < len(sources):
        report(f"{len(sources) - len(lines):,} lines have a side that is empty or longer than {most} tokens: left out")
    return lines
