"""Laws of rows at different steps, against the processors of `transformers` on whole batches and single prefixes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from truedraft.sampling import History, Laws
from truedraft.tree import Row

V, PAD, STEPS = 12, 0, 5
PROMPT = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9], [3, 4, 5, 6]])
LENGTHS = [2, 3, 4]
TEXTS = [[5, 6, 5, 6, 7], [9, 8, 7, 9, 8], [3, 4, 3, 4, 5]]
WARPERS: dict[str, Callable[[], LogitsProcessor]] = {
    "temperature": lambda: lp.TemperatureLogitsWarper(0.6),
    "top-k": lambda: lp.TopKLogitsWarper(5),
    "top-p": lambda: lp.TopPLogitsWarper(0.8),
}
BY_PREFIX: dict[str, Callable[[], LogitsProcessor]] = {
    "repetition": lambda: lp.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition after the prompt": lambda: lp.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([4, 4, 4])),
    "repetition, each after its own": lambda: lp.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor([4, 3, 2])),
    "n-grams": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "least length": lambda: lp.MinNewTokensLengthLogitsProcessor(4, 2, 3),
    "allowed by row": lambda: lp.PrefixConstrainedLogitsProcessor(lambda i, ids: [i, i + 1, int(ids[-1]), len(ids)], 1),
}


class Summing(LogitsProcessor):
    """Looks across rows and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + input_ids.sum() * 0.01 + self.calls


class Summing2(Summing):
    pass


class Changing(LogitsProcessor):
    """An unknown processor that writes to its input scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.mul_(2)


def processors(*names: str) -> LogitsProcessorList:
    return LogitsProcessorList([{**WARPERS, **BY_PREFIX}[name]() for name in names])


def started(steps: list[int]) -> tuple[History, list[Row]]:
    """Rows that have emitted these numbers of tokens."""
    rows = [
        Row(i, PROMPT[i, 4 - n :].tolist() + TEXTS[i][:step], n, STEPS)
        for i, (n, step) in enumerate(zip(LENGTHS, steps, strict=True))
    ]
    return History(PROMPT, STEPS, PAD, rows), rows


def prefix(row: int, step: int) -> Tensor:
    """(1, length) ids of a row as `model.generate` holds them after so many steps."""
    return torch.tensor([PROMPT[row].tolist() + TEXTS[row][:step]])


def alone(names: tuple[str, ...], row: int, ids: Tensor, raw: Tensor) -> Tensor:
    """(V,) scores of one row, computed in a batch of copies of it."""
    raw, ids = raw.expand(3, V).clone(), ids.expand(3, -1)
    return processors(*names)(ids, raw)[row]  # type: ignore[arg-type]


def logits(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(rows))).to(dtype)


def test_history_of_rows_at_different_steps() -> None:
    history, rows = started([0, 0, 0])
    assert (history.length, history.pad) == (4, PAD) and history.ids.dtype == torch.long
    assert history.ids.shape == (3, 4 + STEPS) and not history.ids[:, 4:].any()
    for row, step in ((0, 2), (2, 1), (0, 5), (1, 3)):
        rows[row].tokens[LENGTHS[row] :] = TEXTS[row][:step]
        assert torch.equal(history.prefix([rows[row]]), prefix(row, step))
    rows[2].tokens += TEXTS[2][1:3]
    rows[0].tokens[LENGTHS[0] + 3 :] = []
    for group in ([0, 1, 2], [2, 0], [1, 2]):
        same = history.prefix([rows[i] for i in group])
        assert torch.equal(same, torch.cat([prefix(i, 3) for i in group]))
    assert torch.equal(history.batch(3), torch.cat([prefix(i, 3) for i in range(3)]))
    assert history.batch(3).is_contiguous()
    for step in range(3):
        assert history.column(step).tolist() == [text[step] for text in TEXTS]


def test_removed_tokens_leave_padding() -> None:
    history, rows = started([4, 4, 4])
    history = History(PROMPT, STEPS, 11, rows)
    assert torch.equal(history.batch(4), torch.cat([prefix(i, 4) for i in range(3)]))
    del rows[1].tokens[-3:]
    assert history.batch(5).tolist() == [
        prefix(0, 4)[0].tolist() + [11], prefix(1, 1)[0].tolist() + [11] * 4, prefix(2, 4)[0].tolist() + [11]
    ]  # fmt: skip
    rows[1].tokens += [1, 2]
    assert history.column(1).tolist() == [6, 1, 4] and history.column(2).tolist() == [5, 2, 3]


def test_column_updates_the_history() -> None:
    history, _ = started([1, 2, 3])
    assert history.column(0).tolist() == [5, 9, 3], "as the first call"


def test_history_of_prompts_without_ids_is_empty() -> None:
    rows = [Row(0, [], 0, 3), Row(1, [], 0, 3)]
    history = History(torch.empty(2, 0), 3, PAD, rows)
    assert history.length == 0 and history.ids.shape == (2, 3) and history.ids.dtype == torch.long
    rows[1].tokens += [5, 6]
    assert history.prefix([rows[1]]).tolist() == [[5, 6]]


NAMES = [
    (), ("temperature",), ("temperature", "top-k", "top-p"), ("repetition",), ("repetition after the prompt",),
    ("repetition, each after its own",), ("n-grams", "temperature"), ("least length",), ("allowed by row",),
    ("allowed by row", "repetition, each after its own", "top-k"),
]  # fmt: skip
STEPS_OF_ROWS = [[0, 0, 0], [2, 2, 2], [1, 3, 1], [4, 2, 0]]


@pytest.mark.parametrize("names", NAMES, ids=", ".join)
def test_scores_of_each_row_are_those_of_its_prefix(names: tuple[str, ...]) -> None:
    for steps in STEPS_OF_ROWS:
        for group in ([0, 1, 2], [2, 0], [1]):
            history, rows = started(steps)
            laws = Laws(processors(*names), history)
            assert not laws.lockstep and laws.unknown_processors == [] and laws.scores is laws.logits is None
            raw = logits(len(group), torch.float64)
            before = raw.clone()
            scores = laws([rows[i] for i in group], raw)
            assert torch.equal(raw, before) and scores.dtype == torch.float32
            for line, i, given in zip(scores, group, raw, strict=True):
                assert torch.equal(line, alone(names, i, prefix(i, steps[i]), given.float())), (steps, group, i)


def test_unknown_processor_is_called_once_per_step_with_the_batch() -> None:
    history, rows = started([0, 0, 0])
    mine, plain = Summing(), Summing()
    laws = Laws(LogitsProcessorList([mine, *processors("repetition, each after its own")]), history)
    reference = LogitsProcessorList([plain, *processors("repetition, each after its own")])
    assert (
        laws.lockstep
        and laws.unknown_processors == ["Summing"]
        and not laws.pointwise
        and not laws.apart
        and not laws.raw
    )
    for step in range(3):
        raw = logits(3)
        before = raw.clone()
        ids = torch.cat([prefix(i, step) for i in range(3)])
        assert torch.equal(laws(rows, raw), reference(ids, raw.clone()))  # type: ignore[arg-type]
        assert torch.equal(raw, before) and mine.calls == step + 1
        for row in rows:
            row.tokens.append(TEXTS[row.index][step])
    one, raw = Row(0, [5, 6], 2, STEPS), logits(1)
    alone = Laws(LogitsProcessorList([Summing()]), History(torch.tensor([[5, 6]]), STEPS, PAD, [one]))
    assert torch.equal(alone([one], raw), Summing()(torch.tensor([[5, 6]]), raw))
    assert Laws(LogitsProcessorList([Summing2(), Summing()]), history).unknown_processors == ["Summing", "Summing2"]


@pytest.mark.parametrize("changing", [Changing, lambda: lp.TemperatureLogitsWarper(0.5)])
def test_logits_are_not_written_to(changing: Callable[[], LogitsProcessor]) -> None:
    history, rows = started([1, 1, 1])
    raw = logits(3)
    before = raw.clone()
    laws = Laws(LogitsProcessorList([changing()]), history, keep_scores=True, keep_logits=True)
    scores = laws(rows, raw)
    assert torch.equal(raw, before) and torch.equal(scores, 2 * before)
    assert laws.logits is not None and torch.equal(laws.logits[0], before)


def test_kept_scores_and_logits_are_copies() -> None:
    for scores, kept in ((True, True), (True, False), (False, True)):
        history, rows = started([0, 0, 0])
        laws = Laws(processors("temperature"), history, scores, kept)
        assert laws.lockstep and laws.pointwise and not laws.apart and not laws.raw and laws.unknown_processors == []
        for step in range(2):
            raw = logits(3) + step
            laws(rows, raw).zero_()
            raw.fill_(7)
            for row in rows:
                row.tokens.append(TEXTS[row.index][step])
        for requested, found, scale in ((scores, laws.scores, 0.6), (kept, laws.logits, 1.0)):
            assert (found is not None) == requested
            if found is not None:
                assert len(found) == 2
                for step, values in enumerate(found):
                    assert torch.equal(values, (logits(3) + step) / scale)


def test_properties_of_laws_by_processor() -> None:
    def of(names: tuple[str, ...], batch: int = 3, **kept: bool) -> tuple[bool, bool, bool, bool]:
        rows = [Row(i, [1], 1, 3) for i in range(batch)]
        laws = Laws(processors(*names), History(torch.ones(batch, 1), 3, PAD, rows), **kept)
        return laws.lockstep, laws.pointwise, laws.apart, laws.raw

    assert of(()) == (False, True, True, True)
    assert of(("temperature", "top-k")) == (False, True, True, False)
    assert of(("temperature", "repetition")) == (False, False, False, False)
    assert of((), keep_scores=True) == of((), keep_logits=True) == (True, True, False, False)
    assert of((), 1, keep_scores=True) == of((), 1, keep_logits=True) == (False, True, False, False)
    assert of(("repetition",), 1, keep_scores=True) == (False, False, False, False)
    assert of((), 2, keep_scores=True)[0]


def test_kept_scores_of_one_row_with_a_prefix() -> None:
    rows = [Row(0, [5, 6], 2, STEPS)]
    laws = Laws(processors("repetition"), History(torch.tensor([[5, 6]]), STEPS, PAD, rows), keep_scores=True)
    raw = logits(1)
    expected = processors("repetition")(torch.tensor([[5, 6]]), raw.clone())  # type: ignore[arg-type]
    assert torch.equal(laws(rows, raw), expected) and laws.scores is not None
    assert len(laws.scores) == 1 and torch.equal(laws.scores[0], expected)


@pytest.mark.parametrize("names", NAMES, ids=", ".join)
def test_scores_of_drafts_are_those_of_their_prefix(names: tuple[str, ...]) -> None:
    history, rows = started([1, 3, 0])
    group, drafts = [2, 0, 0, 1], [[3, 4, 3], [], [6, 5], [8]]
    for strange in ([], [Summing()]):
        laws = Laws(LogitsProcessorList([*strange, *processors(*names)]), history)
        raw = logits(4, torch.float64)
        before = raw.clone()
        scores = laws.of_drafts([rows[i] for i in group], drafts, raw)
        assert torch.equal(raw, before) and scores.dtype == torch.float32 and all(s.calls == 0 for s in strange)
        for line, i, draft, given in zip(scores, group, drafts, raw, strict=True):
            ids = torch.cat([prefix(i, rows[i].step), torch.tensor([draft], dtype=torch.long)], 1)
            assert torch.equal(line, alone(names, i, ids, given.float()))


def test_scores_of_drafts_do_not_write_to_logits() -> None:
    history, rows = started([1, 1, 1])
    for names in (("temperature",), ("repetition", "temperature")):
        raw = logits(3)
        before = raw.clone()
        Laws(processors(*names), history).of_drafts(rows, [[1], [2], [3]], raw)
        assert torch.equal(raw, before)


def test_scores_everywhere_equal_those_of_each_node() -> None:
    history, _ = started([0, 1, 2])
    raw = logits(6, torch.float64).view(2, 3, V)
    laws = Laws(processors("temperature", "top-k", "top-p"), history)
    expected = processors("temperature", "top-k", "top-p")(torch.zeros(6, 0), raw.view(6, V).float())  # type: ignore[arg-type]
    found = laws.everywhere(copy.deepcopy(raw))
    assert found.shape == (2, 3, V) and torch.equal(found.view(6, V), expected)
    single = raw.float()
    before = single.clone()
    laws.everywhere(single)
    assert torch.equal(single, before)


def test_history_is_on_the_device_of_the_prompt() -> None:
    """For any default device of torch."""
    history, rows = started([1, 2, 0])
    laws, raw = Laws(processors("n-grams"), history), logits(3)
    with torch.device("meta"):
        assert history.batch(2).device == raw.device
        assert laws(rows, raw).device == laws.of_drafts(rows, [[1], [2], [3]], raw).device == raw.device


def test_scores_of_drafts_need_a_draft_per_row() -> None:
    history, rows = started([1, 1, 1])
    with pytest.raises(ValueError, match="zip"):
        Laws(processors("n-grams"), history).of_drafts(rows, [[1], [2]], logits(3))
