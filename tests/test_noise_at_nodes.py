"""All nodes decided at once by the seeded rule: the same text, and the same state of the random stream."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

import truedraft
from models import ragged, tiny
from nets import PROCESSORS, eos_inside, text_net
from truedraft import DraftTree, registry
from truedraft.accept.seeded import Seeded
from truedraft.chance import PositionNoise, StreamNoise
from truedraft.sampling import History, Laws
from truedraft.tree import Row, Scores


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.chance.far", lambda device: True)


def model() -> PreTrainedModel:
    return tiny("llama", torch.float32)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("ends", [False, True], ids=["to the limit", "rows end early"])
def test_text_and_random_stream_equal_generate(processors: str, ends: bool) -> None:
    inputs = ragged(model(), 3)
    given = dict(PROCESSORS[processors], do_sample=True, pad_token_id=0, max_new_tokens=30)
    if ends:
        given["eos_token_id"] = eos_inside(model(), inputs, do_sample=True)
    text_net(model(), "oracle", inputs, **given)


def test_all_nodes_are_decided_at_once_if_laws_depend_on_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(**ragged(model(), 2), max_new_tokens=20, do_sample=True, top_k=9, pad_token_id=0)
    fast = truedraft.accelerate(model(), control="fixed")
    torch.manual_seed(2)
    expected = model().generate(**given)
    with monkeypatch.context() as patch:
        patch.setattr(Seeded, "choose", lambda *_: pytest.fail("called step by step"))
        torch.manual_seed(2)
        assert torch.equal(fast.generate(**given), expected)
    by_row = fast.generate(**given, seed=4)  # noise from the host is drawn step by step
    monkeypatch.setattr("truedraft.chance.far", lambda device: False)
    assert torch.equal(fast.generate(**given, seed=4), by_row)


def test_blocks_are_drawn_once_and_the_stream_is_reset_to_the_rows() -> None:
    rows = [Row(b, [0], 1, 30) for b in range(2)]
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 1, 1))
    torch.manual_seed(9)
    blocks = [torch.empty(2, 7).exponential_(1) for _ in range(6)]
    states = []
    torch.manual_seed(9)
    for _ in range(7):
        states.append(torch.get_rng_state())
        torch.empty(2, 7).exponential_(1)
    torch.manual_seed(9)
    noise = StreamNoise(2)
    for emitted in (1, 3, 2):
        step = rows[0].step
        got = noise.noise_at_nodes(torch.zeros(2, 4, 7), rows, [tree, DraftTree.chain(1)])
        assert got is not None
        for node, depth in enumerate(tree.shape.depth):
            assert torch.equal(got[0, node], blocks[min(step + depth, 5)][0]) or step + depth > 5
        assert torch.equal(got[1, 0], blocks[step][1])
        for row in rows:
            row.tokens += [0] * emitted
        noise.reached(rows[0].step)
        noise.passed(rows[0].step)
        assert torch.equal(torch.get_rng_state(), states[rows[0].step])
        assert min(noise.blocks, default=99) >= rows[0].step
    noise.reached(2)  # rows at earlier steps do not move it back
    assert torch.equal(torch.get_rng_state(), states[6])
    assert PositionNoise([(1, 0), (1, 1)]).noise_at_nodes(torch.zeros(2, 4, 7), rows, [tree, tree]) is None


def test_nan_in_a_law_is_reported_only_at_visited_nodes() -> None:
    row = Row(0, [1], 1, 9)
    logits = torch.zeros(1, 2, 5)
    logits[0, 1] = torch.nan
    laws = Laws(LogitsProcessorList(), History(torch.tensor([[1]]), 9, 0, [row]))
    decided = registry.load("accept", "seeded").decide_all_nodes(
        Scores(logits, {}, [0]), [row], [DraftTree.chain(1, [2])], laws, StreamNoise(1)
    )
    assert decided[0][0] >= 0 and decided[0][1] == -1
