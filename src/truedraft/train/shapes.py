"""Shapes of draft models: the rate at which a target decodes with each, predicted from measured times and acceptance.

Yan, Agarwal & Venkataraman, "Decoding Speculative Decoding", 2024 (arXiv 2402.01528): with chains of k tokens a target
emits TAR(k) / (k t_draft + t_target(k)) tokens per second, where TAR(k) is the tokens per pass, found by replaying the
target's stored responses against the draft model, t_draft the time of a level of a draft, and t_target(k) that of a
pass over the pending token and k drafted ones. Latency grows with layers more than with width, so that of models of as
many weights the shallow and wide ones often decode faster, at a lower acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from truedraft import registry
from truedraft.accelerated import accelerate
from truedraft.drafters._learned import Batch
from truedraft.drafters._walking import Walk
from truedraft.drafters.models._distilling import head_size, reach_of, rights, shaped
from truedraft.errors import Refused
from truedraft.runtime._base import GreedyChain
from truedraft.train.batches import Reader, sorted_groups
from truedraft.train.drafter import held_out, train_drafter
from truedraft.train.loop import Plan, announce
from truedraft.train.responses import Responding, target_responses
from truedraft.tree import DraftTree

if TYPE_CHECKING:
    from truedraft.targets._base import Target

METHOD = "draft-model"
BATCH = 2048  # tokens of a batch that is replayed, with padding
ROUNDS = 5  # of timing, of which the shortest counts: other work only adds time


@dataclass(frozen=True)
class Shape:
    """A shape, what was measured of it, and what follows.

    tokens_per_pass: TAR(k) by k from 0 on; empty for a model that is not trained.
    level_seconds: t_draft.
    drafted: the k of the highest rate; 0 where no draft pays. None for a model that is not trained.
    rate: tokens per second there.
    needed: the least tokens per pass, at some k, of a draft model of that cost that is as fast as plain decoding.
    """

    name: str
    layers: int
    width: int
    parameters: int
    level_seconds: float
    tokens_per_pass: tuple[float, ...]
    drafted: int | None
    rate: float | None
    needed: float


class Shapes:
    """Measures draft models for a target on its responses to some prompts, on lines that training holds out.

    passes: seconds of the target's pass over the pending token and k drafted ones, by k from 0 on.
    context: tokens of the text behind which times are measured, half of a response included.

    Args:
        folder: of the target's responses, which are made where there are none, and of what is trained.
        length: tokens drafted at once, at most.

    Raises:
        Refused: as `target_responses`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], folder: Path,
        how: Responding, length: int, report: Callable[[str], None] = announce,
    ):  # fmt: skip
        self._model, self._tokenizer, self._prompts, self._folder = model, tokenizer, prompts, folder
        self._how, self._length, self._report = how, length, report
        fast = accelerate(model, tokenizer, draft=None)
        self._held, _ = held_out(target_responses(fast, tokenizer, prompts, folder, report, how))
        self._read = Reader(model, ())
        self.context = int(median(len(prompt) + len(response) // 2 for prompt, response in self._held))
        self.passes = pass_seconds(fast.target, self.context, range(1, length + 2))

    def given(self, name: str) -> Shape:
        """What is measured of a draft model that exists.

        Raises:
            Refused: it cannot be loaded or hosted, or has another tokenizer than the target.
        """
        return self._measured(name, self._learner(model=name).module, trained=True)

    def searched(self, layers: int, parameters: int, minutes: float, **knobs: Any) -> Shape:
        """What is measured of a fresh draft model of so many layers and weights.

        minutes: of its training; 0 for its costs alone. knobs: of the training.
        """
        config = self._model.config.get_text_config(decoder=True)
        width = of_size(config, layers, parameters, knobs.get("tied", True))
        learner = self._learner(layers=layers, width=width, **knobs)
        name = f"{layers}x{width}"
        if minutes:
            self._report(f"{name}: {minutes:g} minutes of training")
            plan = Plan(minutes=minutes, lr=learner.lr, every=minutes, seed=self._how.seed)
            train_drafter(
                learner, self._model, self._tokenizer, self._prompts, self._folder / name, plan, how=self._how,
                responses=self._folder, report=self._report,
            )  # fmt: skip
        return self._measured(name, learner.module, trained=minutes > 0)

    def _learner(self, **knobs: Any) -> Any:
        torch.manual_seed(self._how.seed)
        made = registry.method("drafters", METHOD).learner(**knobs)
        made.tokenizer = self._tokenizer
        with self._model.device:
            made.begin(self._model)
        return made

    def _measured(self, name: str, student: Any, trained: bool) -> Shape:
        batches: Iterable[Batch] = map(self._read, sorted_groups(self._held, BATCH, self._read.width))
        tokens = replayed(student.eval(), batches, self._length) if trained else ()
        level = level_seconds(accelerate(student, draft=None).target, self.context, self._length)
        return described(name, student, level, self.passes, tokens)


def of_size(config: Any, layers: int, parameters: int, tied: bool) -> int:
    """The width at which a draft model of so many layers has nearest to so many weights.

    Raises:
        Refused: the narrowest has more than twice as many.
    """
    step = head_size(config)

    def counted(heads: int) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shaped(config, layers, heads * step, 0, 0, tied))
        return sum(weight.numel() for weight in model.parameters())

    low, high = 1, 1
    while counted(high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted(middle) < parameters else (low, middle)
    best = min((low, high), key=lambda heads: abs(counted(heads) - parameters))
    if counted(best) > 2 * parameters:
        raise Refused(
            f"--parameters {parameters:,}: the narrowest draft model of {layers} layers has {counted(best):,}, most of "
            "them in its embeddings: give more"
        )
    return best * step


@torch.no_grad()
def replayed(model: Any, batches: Iterable[Batch], most: int) -> tuple[float, ...]:
    """Tokens per pass with chains of 0 to `most` of a draft model's likeliest tokens, on texts that a target has
    written; the target is not run."""
    walks = [Walk(most) for _ in range(most + 1)]
    for batch in batches:
        for row, span in zip(rights(model, batch).tolist(), batch.spans(), strict=True):
            reach = reach_of(row, most)
            for drafted, walk in enumerate(walks):
                walk.add([min(some, drafted) for some in reach], *span)
    return tuple(float(walk.metrics()["tokens_per_pass"]) for walk in walks)  # type: ignore[arg-type]


def level_seconds(target: Target, context: int, most: int) -> float:
    """Seconds of a level of a draft of `most` tokens, behind a text of `context` tokens, of a row alone.

    target: the draft model.
    """
    chain = DraftTree.chain(0)
    greedy = GreedyChain(most, (), 0.0, target.vocabulary)

    def draft() -> None:
        if target.extend_greedily([chain], [0], [greedy]) is None:
            for _ in range(most):
                target.score([chain])

    return timed(target, context, most, draft) / most


def pass_seconds(target: Target, context: int, widths: Sequence[int]) -> list[float]:
    """Seconds of a pass over a chain of each width, behind a text of `context` tokens, of a row alone."""
    chains = [DraftTree.chain(0, [i % target.vocabulary for i in range(width - 1)]) for width in widths]
    found = [timed(target, context, max(widths), lambda chain=chain: target.score([chain])) for chain in chains]  # type: ignore[misc]
    return [min(found[i:]) for i in range(len(found))]  # a pass is no slower than a wider one


def timed(target: Target, context: int, more: int, work: Callable[[], Any]) -> float:
    """The least seconds of some work behind a text."""
    least = math.inf
    with target.temporary_cache(1, context + more + 1):
        target.prefill([target.prompt(torch.zeros(context, dtype=torch.long, device=target.device))])
        work()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            work()
            target.wait()
            least = min(least, time.perf_counter() - start)
    return least


def described(
    name: str, model: Any, level: float, passes: Sequence[float], tokens_per_pass: tuple[float, ...] = ()
) -> Shape:
    """A shape with its predictions. level: t_draft; passes: t_target by k, from 0 on."""
    config = model.config.get_text_config(decoder=True)
    spent = [k * level + seconds for k, seconds in enumerate(passes)]
    needed = min(seconds / passes[0] for seconds in spent[1:])
    rates = [tokens / seconds for tokens, seconds in zip(tokens_per_pass, spent, strict=False)]
    best = max(range(len(rates)), key=rates.__getitem__) if rates else None
    weights = sum(weight.numel() for weight in model.parameters())
    return Shape(
        name, config.num_hidden_layers, config.hidden_size, weights, level, tokens_per_pass, best,
        None if best is None else rates[best], needed,
    )  # fmt: skip
