"""The end of rows, against the criteria of `transformers` called on whole batches as in its own loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.generation import stopping_criteria as sc
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from truedraft.sampling import History, Laws
from truedraft.stopping import Stops, ends_of, longest
from truedraft.tree import Row

PROMPT = torch.tensor([[0, 0, 5], [0, 6, 7], [7, 5, 6]])
LENGTHS = [1, 2, 3]
SCRIPTS = [[4, 9, 8, 5, 8, 6], [5, 6, 4, 7, 9, 8], [8, 7, 5, 6, 5, 4]]
PAD, STEPS = 0, 6


LETTERS = "abcdefghij"  # of tokens 0 to 9
_tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
_tokenizer.decoder = decoders.Fuse()
SPELT = PreTrainedTokenizerFast(tokenizer_object=_tokenizer)


class Counting(StoppingCriteria):
    """Ends row `row` at the `call`-th call; records its arguments."""

    def __init__(self, call: int, row: int):
        self.call, self.row = call, row
        self.seen: list[tuple[list[list[int]], object]] = []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.seen.append((input_ids.tolist(), scores))
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[self.row] = len(self.seen) >= self.call
        return done


def plain(criteria: StoppingCriteriaList, batch: int) -> list[int]:
    """Steps after which each row has ended, in the loop of `transformers` over scripted tokens."""
    ids, ends = PROMPT[:batch], [0] * batch
    pads = any(hasattr(c, "eos_token_id") for c in criteria)
    for step in range(STEPS):
        tokens = [PAD if end and pads else SCRIPTS[i][step] for i, end in enumerate(ends)]
        ids = torch.cat([ids, torch.tensor(tokens)[:, None]], 1)
        done = criteria(ids, None)  # type: ignore[arg-type]
        ends = [end or (step + 1 if over else 0) for end, over in zip(ends, done.tolist(), strict=True)]
    return ends


def of(kinds: Sequence[str], steps: int = STEPS) -> StoppingCriteriaList:
    """New criteria by name; the length last, in another order than that of `transformers`."""
    made = {
        "eos": lambda: sc.EosTokenCriteria(9),
        "two ends": lambda: sc.EosTokenCriteria([6, 4]),
        "stop string": lambda: sc.StopStringCriteria(SPELT, ["ji", "hjx"]),
        "over": lambda: sc.MaxTimeCriteria(1.0, time.time() - 2),
        "time left": lambda: sc.MaxTimeCriteria(1000.0),
        "third of row 1": lambda: Counting(3, 1),
        "sure": lambda: sc.ConfidenceCriteria(0.5),
    }
    return StoppingCriteriaList([*(made[kind]() for kind in kinds), sc.MaxLengthCriteria(3 + steps)])


def started(
    criteria: StoppingCriteriaList, batch: int, processors: LogitsProcessorList | None = None, **kept: bool
) -> tuple[Stops, list[Row]]:
    rows = [Row(i, PROMPT[i, 3 - n :].tolist(), n, STEPS) for i, n in enumerate(LENGTHS[:batch])]
    history = History(PROMPT[:batch], STEPS, PAD, rows)
    return Stops(criteria, history, Laws(processors or LogitsProcessorList(), history, **kept)), rows


BY_ROW = [
    [],
    ["eos"],
    ["two ends"],
    ["eos", "two ends"],
    ["over"],
    ["time left"],
    ["eos", "stop string"],
    ["eos", "over"],
]


@pytest.mark.parametrize("kinds", BY_ROW, ids=", ".join)
def test_independent_rows_end_where_plain_decoding_ends(kinds: list[str]) -> None:
    for batch, steps in itertools.product((1, 3), (2, 6)):
        stops, rows = started(of(kinds, steps), batch)
        assert not stops.lockstep and stops.unknown_processors == [] and stops.steps == steps
        expected = plain(of(kinds, steps), batch)
        for row in reversed(rows):  # each at its own step
            for token in SCRIPTS[row.index]:
                row.tokens.append(token)
                stops([row])
                if row.ended:
                    break
        assert [row.end for row in rows] == [n + end for n, end in zip(LENGTHS, expected, strict=False)]


@pytest.mark.parametrize("kinds", [["third of row 1"], ["third of row 1", "eos"], ["stop string"]], ids=", ".join)
def test_rows_in_lockstep_end_where_plain_decoding_ends(kinds: list[str]) -> None:
    stops, rows = started(of(kinds), 3)
    pads = "eos" in kinds
    assert stops.lockstep and stops.pads == pads
    ends: list[list[int | None]] = []
    for step in range(STEPS):
        for row in rows:
            row.tokens.append(PAD if row.ended and pads else SCRIPTS[row.index][step])
        stops(rows)
        ends.append([row.end for row in rows])
    assert ends[-1] == [n + end for n, end in zip(LENGTHS, plain(of(kinds), 3), strict=True)]
    for before, after in itertools.pairwise(ends):
        assert all(b is None or a == b for b, a in zip(before, after, strict=True)), "ended rows stay ended"


def test_unknown_criterion_is_called_once_per_step_with_batch_and_scores() -> None:
    counting = Counting(99, 0)
    criteria = StoppingCriteriaList([counting, sc.MaxLengthCriteria(9)])
    stops, rows = started(criteria, 3, keep_scores=True)
    assert stops.unknown_processors == ["Counting"]
    for step in range(3):
        stops.laws(rows, torch.full((3, 10), float(step)))
        for row in rows:
            row.tokens.append(SCRIPTS[row.index][step])
        stops(rows)
    for step, (ids, scores) in enumerate(counting.seen):
        assert ids == [PROMPT[i].tolist() + SCRIPTS[i][: step + 1] for i in range(3)]
        assert isinstance(scores, tuple) and [float(s[0, 0]) for s in scores] == [0.0, 1.0, 2.0][: step + 1]
    assert len(counting.seen) == 3
    counting = Counting(99, 0)
    stops, rows = started(StoppingCriteriaList([counting, sc.MaxLengthCriteria(9)]), 1)
    rows[0].tokens.append(4)
    stops(rows)
    assert counting.seen == [([[0, 0, 5, 4]], None)], "no scores where none are kept"


def test_rowwise_criterion_is_called_on_its_prefix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def recording(self: object, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    stops, rows = started(of(["eos", "stop string"]), 3)
    monkeypatch.setattr(sc.StopStringCriteria, "__call__", recording)
    rows[2].tokens += SCRIPTS[2][:2]
    stops([rows[2]])
    assert shapes == [(1, 5)] and not rows[2].ended
    rows[0].tokens += [9]
    stops([rows[0]])
    assert shapes == [(1, 5), (1, 4)], "asked at an end of text too"
    assert rows[0].end == 2


class Bare(LogitsProcessor):
    pass


def test_lockstep_by_criteria_and_processors() -> None:
    unknown = LogitsProcessorList([Bare()])
    known = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    cases = [
        (["eos"], 3, known, False, True),
        ([], 3, known, False, False),
        (["over"], 3, known, False, False),
        (["stop string"], 2, known, True, False),  # ended rows are continued with their own text
        (["stop string"], 1, known, False, False),
        (["eos", "stop string"], 3, known, False, True),
        (["sure"], 1, known, True, False),
        (["eos"], 1, unknown, True, True),
    ]
    for kinds, batch, processors, lockstep, pads in cases:
        stops, _ = started(of(kinds), batch, processors)
        assert (stops.lockstep, stops.pads) == (lockstep, pads), (kinds, batch)
    stops, _ = started(of(["third of row 1", "sure", "eos"]), 1)
    assert stops.unknown_processors == ["ConfidenceCriteria", "Counting"]


def test_ends_and_lengths() -> None:
    criteria = StoppingCriteriaList(
        [sc.MaxLengthCriteria(9), sc.EosTokenCriteria([6, 4]), sc.EosTokenCriteria(9), sc.MaxLengthCriteria(7)]
    )
    assert ends_of(criteria) == {4, 6, 9} and longest(criteria) == 7
    assert ends_of(of([])) == frozenset()
