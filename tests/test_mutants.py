"""Mutants: faults planted on purpose, each of which a named net must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import faults
import test_failures
from arrivals import play
from faults import Fault, replaced, unchecked
from models import ragged, tiny
from nets import RULES, drafter, eos_inside, node_net, text_net
from test_views import check_against_cut
from truedraft import accelerate
from truedraft import tree as trees
from truedraft.accept.greedy import Greedy
from truedraft.caches.seq2seq import SourceLayer
from truedraft.chance import PositionNoise
from truedraft.engine import Cohort, Engine
from truedraft.runtime import native
from truedraft.runtime.compiled import Nodes
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.skipping import SkippableLayers
from truedraft.stopping import Stops
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Row, Shape

Net = Callable[[], Any]


def nodes() -> None:
    node_net(tiny(), "oracle")


def nodes_compiled(architecture: str = "llama") -> None:
    if native.library() is None:
        pytest.skip("the compiled pass was not built on this machine")
    node_net(tiny(architecture, torch.float32), "oracle", tolerance=1e-4)


def nodes_of_experts() -> None:
    nodes_compiled("mixtral")


def text(rule: str = "greedy", **kwargs: Any) -> Net:
    return lambda: text_net(tiny(), "oracle", ragged(tiny(), 3), max_new_tokens=40, **{**RULES[rule], **kwargs})


def text_with_eos() -> None:
    inputs = ragged(tiny(), 3)
    text("greedy", eos_token_id=eos_inside(tiny(), inputs), pad_token_id=0)()


def reshaped(change: Callable[[Shape], Shape]) -> Fault:
    def growing(patch: pytest.MonkeyPatch) -> None:
        true = trees.shape_of
        patch.setattr(trees, "shape_of", lambda parent: change(true(parent)))

    return growing


def misread(kind: OpKind, **fields: int) -> Fault:
    """Operations of a kind with other numbers in them."""

    def growing(patch: pytest.MonkeyPatch) -> None:
        true = Program.op

        def op(self: Program, of: OpKind, *args: Any, **given: Any) -> Any:
            made = true(self, of, *args, **given)
            for name, value in fields.items() if of == kind else ():
                setattr(made, name, value)
            return made

        patch.setattr(Program, "op", op)

    return unchecked(growing)


true_leave = Engine._leave


def second_best(self: Greedy, scores: Tensor, *_: Any) -> list[int]:
    return scores.topk(2).indices[..., 1].tolist()


def overshoot(self: Stops, rows: Sequence[Row]) -> None:
    for row in rows:
        row.end = len(row.tokens) if row.tokens[-1] in self.eos or row.step == self.steps + 1 else None


def masked(shape: Shape, mask: torch.Tensor) -> Shape:
    """A shape whose mask says something else."""
    other = replace(shape)
    other.__dict__["mask"] = mask
    return other


def arrivals() -> None:
    """Four rows that come one after another, the first to leave before the last; one of them is cancelled."""
    add, step, abort = 3, (5, 0, 1), 9
    come = [(add, 0, 4), step, (add, 1, 11), step, (add, 2, 12), *[step] * 5, (abort, 1, 1), step, (add, 3, 13)]
    play(["token-recycling", "suffix"], come)


def view() -> None:
    text_net(tiny(), "view", ragged(tiny(), 3), max_new_tokens=40, **RULES["greedy"])


def view_of_the_whole() -> None:
    """A view that skips nothing drafts what the model itself says."""
    report = text_net(tiny(), "view-whole", ragged(tiny(), 3), max_new_tokens=40, **RULES["greedy"])
    assert report.acceptance_rate == 1.0


def cut_model() -> None:
    check_against_cut(DecoderTarget(tiny(layers=4), "stock"), (1, 3), 1e-6)


def view_arrivals() -> None:
    """Rows that draft by the whole model as a view, of which the first leaves; every draft is right."""
    fast = accelerate(tiny(), draft=drafter("view-whole", tiny()), control="fixed")
    with fast.engine(max_rows=3, max_tokens=48) as engine:
        requests = [
            engine.add_request(torch.tensor([5, 6 + i, 7, 9]), max_new_tokens=n, do_sample=False)
            for i, n in enumerate((4, 16, 24))
        ]
        while engine.has_unfinished_requests():
            engine.step()
    assert all(request.result() and request.report().acceptance_rate == 1.0 for request in requests)


def arrivals_behind_sources() -> None:
    """The first to leave has the shortest source, and the last slot, which takes its place, a longer one."""
    add, step = 3, (5, 0, 1)
    come = [(add, 3, 3), step, (add, 1, 14), step, (add, 2, 14), *[step] * 9, (add, 0, 13)]
    play(["token-recycling"], come, "encoder-decoder")


def failures() -> None:
    test_failures.test_an_error_ends_the_request_that_it_belongs_to("processor", "decoder")


def sources_in_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    true = SourceLayer.put
    patch.setattr(SourceLayer, "put", lambda self, slot, *rest: true(self, 0, *rest))


def narrower(self: SourceLayer, width: int) -> None:
    """Longer sources take the place of those that are kept."""
    self.clear(width)


def tokens_of_failed_requests_kept(patch: pytest.MonkeyPatch) -> None:
    true = Engine._walked

    def walked(self: Engine, request: Any, rows: Sequence[Row], *rest: Any) -> Any:
        for row in rows:
            row.tokens = Undeleted(row.tokens)
        return true(self, request, rows, *rest)

    patch.setattr(Engine, "_walked", walked)


class Undeleted(list[int]):
    """From which nothing is taken back, and to which another token comes in the attempt."""

    def __delitem__(self, where: Any) -> None:
        self.append(0)


def prompts_in_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    true = Nodes.add_chain
    patch.setattr(Nodes, "add_chain", lambda self, slot, *rest: true(self, 0, *rest))


def noise_of_the_latest(patch: pytest.MonkeyPatch) -> None:
    true, latest = PositionNoise.__init__, []

    def made(self: PositionNoise, seeds: Any) -> None:
        true(self, seeds)
        latest[:] = [seeds]

    bits = PositionNoise._bits

    def of_latest(self: PositionNoise, row: Row, step: int, fresh: int) -> Any:
        self.seeds = latest[0]
        return bits(self, row, step, fresh)

    patch.setattr(PositionNoise, "__init__", made)
    patch.setattr(PositionNoise, "_bits", of_latest)


def commit_from_the_first(self: DecoderTarget, paths: Sequence[Sequence[int]], first: int = 0) -> None:
    assert self.cache is not None
    for slot, path in enumerate(paths):
        self.cache.commit(slot, path)


def slots_move_up(self: Engine, slot: int) -> None:
    """Where the last row takes the place of the one that left."""
    self._cohort = None
    self._end(self.rows[slot])
    self.target.release(slot)
    del self.rows[slot]


def slots_not_followed(self: Engine, slot: int) -> None:
    """The row that takes the place of the one that left keeps its old number."""
    moved, old = self.rows[-1], self.rows[-1].slot
    true_leave(self, slot)
    moved.slot = old


MUTANTS: dict[str, tuple[Fault, Net]] = {
    "lost tree mask": (reshaped(lambda s: masked(s, torch.eye(len(s.depth), dtype=torch.bool))), nodes),
    "tree read as a chain": (reshaped(lambda s: masked(s, torch.ones_like(s.mask).tril())), nodes),
    "positions by node index": (reshaped(lambda s: replace(s, depth=tuple(range(len(s.depth))))), nodes),
    "lost ancestors in a compiled pass": (
        unchecked(reshaped(lambda s: replace(s, extras=tuple(e[-1:] for e in s.extras)))),
        nodes_compiled,
    ),
    "tree read as a chain in a compiled pass": (
        unchecked(reshaped(lambda s: replace(s, run=tuple(range(1, len(s.run) + 1)), extras=((),) * len(s.run)))),
        nodes_compiled,
    ),
    "positions by node index in a compiled pass": (
        unchecked(reshaped(lambda s: replace(s, depth=tuple(range(len(s.depth)))))),
        nodes_compiled,
    ),
    "rows dealt to the experts of another node": (misread(OpKind.DEAL, top=1), nodes_of_experts),
    "the first expert in the place of all": (misread(OpKind.LINEAR, apart=0), nodes_of_experts),
    "routing weights as they are": (misread(OpKind.ROUTE, mode=0), nodes_of_experts),
    "commit of the first k nodes": (faults.FIRST_NODES_KEPT, nodes),
    "rejected KV kept": (faults.REJECTED_KEPT, nodes),
    "overshot length": (replaced(Stops, "__call__", overshoot), text()),
    "end of text ignored inside a draft": (faults.DEAF_TO_EOS, text_with_eos),
    "stale penalty history": (faults.STALE_HISTORY, text(repetition_penalty=1.8)),
    "noise tied to the draws made": (faults.noise_per_draw, text("seeded")),
    "second-best token": (replaced(Greedy, "decide_all_nodes", second_best), text()),
    "unverified drafts accepted": (faults.ACCEPTED_UNSEEN, text()),
    "a new row's KV over a running row's": (unchecked(prompts_in_the_first_slot), arrivals),
    "another row's noise": (noise_of_the_latest, arrivals),
    "a cancelled row's drafter state kept": (replaced(Engine, "_end", lambda self, row: None), arrivals),
    "scratch of a view left in the cache": (faults.SCRATCH_LEFT, view_of_the_whole),
    "scratch of a view taken for committed": (faults.SCRATCH_COMMITTED, view),
    "a view that writes over committed KV": (faults.COMMITTED_OVERWRITTEN, view),
    "a row's slot not followed when others leave": (replaced(Engine, "_leave", slots_not_followed), view_arrivals),
    "layers of a view that run": (replaced(SkippableLayers, "without", lambda *_: nullcontext()), cut_model),
    "rows move up where slots are swapped": (replaced(Engine, "_leave", slots_move_up), arrivals),
    "new rows' KV committed to the first slots": (
        replaced(DecoderTarget, "commit", commit_from_the_first),
        arrivals,
    ),
    "a new row's source over a running row's": (unchecked(sources_in_the_first_slot), arrivals_behind_sources),
    "a row's source left behind where it moves": (
        replaced(SourceLayer, "move", lambda self, source, target: None),
        arrivals_behind_sources,
    ),
    "kept sources lost to a longer one": (replaced(SourceLayer, "widen", narrower), arrivals_behind_sources),
    "a failed request's pass kept": (tokens_of_failed_requests_kept, failures),
    "a pass shown to a request that failed in it": (replaced(Cohort, "without_failed", lambda self: self), failures),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_net_is_green_without_the_fault(name: str) -> None:
    MUTANTS[name][1]()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_net_catches_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    growing, net = MUTANTS[name]
    growing(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        net()
