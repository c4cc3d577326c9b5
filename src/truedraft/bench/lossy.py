"""Views that a target generates under: the quality of the approximation, to be read beside its speed.

Perplexity and agreement are measured on texts, not on what is generated: each text's first half is the prompt, which is
read as in a call of `generate`, and the tokens of its second half are scored in passes under the view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from truedraft.accelerated import Accelerated, accelerate
from truedraft.bench.workloads import Workload
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Prompt

WHOLE = "no drafts"  # the whole model


@dataclass(frozen=True)
class Quality:
    """The quality of a way of generating on the texts of a workload.

    perplexity: the exponential of the mean negative log-likelihood of a token.
    agreement: the share of tokens at which its likeliest token is the whole model's.
    tokens: that were scored.
    behind: the mean number of tokens before them.
    """

    workload: str
    side: str
    perplexity: float
    agreement: float
    tokens: int
    behind: float


def approximations(
    model: Any, tokenizer: Any, views: Sequence[str], drafts: Sequence[str], control: str
) -> dict[str, Accelerated]:
    """The whole model without drafts, and it under each view with each drafter, by their names in tables.

    Raises:
        Refused: a view does not fit the model, or cannot be drafted for.
    """
    ways = {WHOLE: accelerate(model, tokenizer, draft=None)}
    for view in views:
        for draft in drafts:
            name = view if draft == "none" else f"{view}, {draft}"
            ways[name] = accelerate(model, tokenizer, draft=draft, control=control, view=view)
    return ways


def qualities(
    ways: Mapping[str, Accelerated],
    tokenizer: Any,
    workload: Workload,
    room: int | None,
    progress: Callable[[str], None],
) -> list[Quality]:
    """The quality of each way, the first of which is the whole model. It does not depend on drafts.

    room: tokens of a text at most; of longer ones the first are used.

    Raises:
        Refused: no text has four tokens, or the workload fewer than two new ones.
    """
    texts = [tokenizer(item.text)["input_ids"][:room] for item in workload.items]
    halves = [(text[: len(text) // 2], text[len(text) // 2 :][: workload.tokens]) for text in texts]
    halves = [(before, later) for before, later in halves if before and len(later) > 1]
    if not halves:
        raise Refused(
            f"{workload.name}: quality is measured on texts of four tokens or more, and two or more new tokens: give "
            "longer --prompts, or more --max-new-tokens"
        )
    after = torch.cat([torch.tensor(later[1:]) for _, later in halves])
    behind = [len(before) + n for before, later in halves for n in range(1, len(later))]
    found: dict[Any, tuple[float, float]] = {}
    for name, fast in ways.items():
        if fast.target.view not in found:
            progress(f"{workload.name}: quality of {name}")
            logits = torch.cat([_scored(fast.target, *text) for text in halves]).float().cpu()
            best = logits.argmax(-1)
            if not found:
                expected = best
            agreement = float((best == expected).float().mean())
            found[fast.target.view] = math.exp(cross_entropy(logits, after)), agreement
    return [
        Quality(workload.name, name, *found[fast.target.view], len(after), sum(behind) / len(behind))
        for name, fast in ways.items()
    ]


@torch.no_grad()
def _scored(target: Target, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """(n - 1, V) logits at the n tokens after a prompt but the last, each given those before it."""
    try:
        target.check_drafts()
        width = len(after)
    except Refused:  # what a token reads depends on its place in the pass
        width = 1
    found = []
    with target.temporary_cache(1, len(before) + len(after)):
        target.prefill([Prompt(torch.tensor(before, device=target.device))])
        target.commit([[0]])
        for at in range(0, len(after) - 1, width):
            some = after[at : min(at + width, len(after) - 1)]
            found.append(target.score([DraftTree.chain(some[0], some[1:])]).logits[0])
            target.commit([range(len(some))])
    return torch.cat(found)
