"""Rows of different lengths in batches, whose drafts are accepted to different lengths: each has its own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import faults
from models import sibling, tiny
from nets import drafter
from truedraft import accelerate
from truedraft.caches.rows import RowCache

BATCHES = (1, 2, 4, 8, 16)
ROWS, NEW = 16, 8
SOURCES = ("draft-model", "prompt-lookup", "opt-tree")


def prompts(vocabulary: int) -> list[list[int]]:
    """Rows of 3 to 18 tokens, all of different lengths."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, vocabulary, (3 + i,), generator=generator).tolist() for i in range(ROWS)]


def alone(model: Any, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The new tokens of plain `model.generate` of each row by itself, without padding."""
    found = []
    for row in rows:
        ids = torch.tensor([row])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        found.append(made[0, len(row) :].tolist())
    return found


def batched(fast: Any, rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], bool]:
    """The same in one batch, padded at the left; and whether rows gained different numbers of tokens in a pass."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    made = fast.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    gained = [{len(one.tokens) for one in each.emitted} for each in fast.report().passes]
    return made[:, width:].tolist(), max(map(len, gained)) > 1


def rates(model: Any, draft: Any, batches: Sequence[int] = BATCHES) -> dict[int, float]:
    """By size of the batch, the share of rows with the text that they have alone."""
    rows = prompts(model.config.vocab_size)[: max(batches)]
    expected, share, ragged = alone(model, rows), {}, False
    fast = accelerate(model, draft=draft, control="fixed")
    for batch in batches:
        found, apart = batched(fast, rows[-batch:])
        ragged |= apart
        share[batch] = sum(map(list.__eq__, found, expected[-batch:])) / batch
    assert ragged, "rows accept different numbers of tokens in a pass"
    return share


def endless(dtype: torch.dtype) -> Any:
    """A model whose texts have no end."""
    model: Any = tiny(dtype=dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def differing(name: str, model: Any) -> Any:
    """A drafter; its draft model agrees so seldom with the model that rows accept different numbers of tokens."""
    return drafter(name, model, small=sibling(model, 0.25))


@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_batches_have_the_text_that_they_have_alone(name: str) -> None:
    model = endless(torch.float64 if name == "prompt-lookup" else torch.float32)  # by both kinds of passes
    assert rates(model, differing(name, model)) == dict.fromkeys(BATCHES, 1.0)


def _lengths_of_the_batch(self: RowCache, slot: int, path: Sequence[int]) -> None:
    """Every row keeps as many entries as its neighbour before it kept: ragged acceptance is forgotten."""
    self.rewind()
    self._gather(slot, self.lengths[slot], path)
    kept = len(path) if slot == 0 else self._kept_before
    self._kept_before = len(path)
    self.lengths[slot] += kept


@pytest.mark.parametrize(
    "fault",
    [faults.REJECTED_KEPT, faults.FIRST_NODES_KEPT, faults.replaced(RowCache, "commit", _lengths_of_the_batch)],
    ids=["rejected kept", "first nodes kept", "ragged lengths"],
)
def test_faults_of_ragged_commits_are_detected(fault: faults.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    model = endless(torch.float32)
    faults.unchecked(fault)(monkeypatch)
    assert rates(model, differing("opt-tree", model), (8,))[8] < 1.0
