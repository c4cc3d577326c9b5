"""Mutants: planted faults, each of which a named net must detect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import faults
import test_failures
from arrivals import run_events
from faults import Fault, replaced, unchecked
from models import ragged, tiny
from nets import RULES, drafter, eos_inside, node_net, text_net
from test_deja_vu import check_against_masked
from test_eesd import check_drafts as check_exits
from test_reviewing import SKIPPING, check_drafts
from test_view_bits import check_against_rounded
from test_view_entries import VIEW, check_against_picked
from test_views import check_against_cut, check_against_muted, deep
from truedraft import accelerate
from truedraft import tree as trees
from truedraft.accept.greedy import Greedy
from truedraft.caches.prefixes import Prefixes
from truedraft.caches.rows import CacheCursor, RowCache, RowLayer
from truedraft.caches.seq2seq import SourceLayer
from truedraft.caches.subset import SubsetCache
from truedraft.chance import PositionNoise
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._views import ViewReader
from truedraft.drafters.heads._exits import ExitReader, FirstLayers
from truedraft.engine import Cohort, Engine
from truedraft.runtime import native
from truedraft.runtime.halves import Halves
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.program import Program
from truedraft.runtime.rounded import RoundedOps
from truedraft.runtime.skipping import SkippableLayers
from truedraft.runtime.sparse_ops import SparseOps
from truedraft.stopping import Stops
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Row, Scores
from truedraft.tree_shape import TreeShape
from truedraft.views._base import Reduction
from truedraft.views._neurons import Neurons

Net = Callable[[], Any]


def nodes() -> None:
    node_net(tiny(), "oracle")


def need_compiled() -> None:
    if native.library() is None:
        pytest.skip("the compiled pass was not built on this machine")


def nodes_compiled(architecture: str = "llama") -> None:
    need_compiled()
    node_net(tiny(architecture, torch.float32), "oracle", tolerance=1e-4)


def nodes_of_experts() -> None:
    nodes_compiled("mixtral")


def text(rule: str = "greedy", **kwargs: Any) -> Net:
    return lambda: text_net(tiny(), "oracle", ragged(tiny(), 3), max_new_tokens=40, **{**RULES[rule], **kwargs})


def text_with_eos() -> None:
    inputs = ragged(tiny(), 3)
    text("greedy", eos_token_id=eos_inside(tiny(), inputs), pad_token_id=0)()


def reshaped(change: Callable[[TreeShape], TreeShape]) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        true = trees.shape_of
        patch.setattr(trees, "shape_of", lambda parent: change(true(parent)))

    return plant


def wrong_operands(kind: OpKind, **fields: int) -> Fault:
    """Operations of a kind with wrong operands."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = Program.op

        def op(self: Program, of: OpKind, *args: Any, **given: Any) -> Any:
            made = true(self, of, *args, **given)
            for name, value in fields.items() if of == kind else ():
                setattr(made, name, value)
            return made

        patch.setattr(Program, "op", op)

    return unchecked(plant)


true_leave, true_places = Engine._leave, ViewReader._places


def second_best(self: Greedy, scores: Scores, *_: Any) -> list[list[int]]:
    return scores.logits.topk(2).indices[..., 1].tolist()


def overshoot(self: Stops, rows: Sequence[Row]) -> None:
    for row in rows:
        row.end = len(row.tokens) if row.tokens[-1] in self.eos or row.step == self.steps + 1 else None


def masked(shape: TreeShape, mask: torch.Tensor) -> TreeShape:
    """The shape with another mask."""
    other = replace(shape)
    other.__dict__["mask"] = mask
    return other


def arrivals() -> None:
    """Four rows admitted one after another; the first leaves before the last is admitted, one is cancelled."""
    add, step, abort = 3, (5, 0, 1), 9
    events = [(add, 0, 4), step, (add, 1, 11), step, (add, 2, 12), *[step] * 5, (abort, 1, 1), step, (add, 3, 13)]
    run_events(["token-recycling", "suffix"], events)


def pieces() -> None:
    """Prompts that are read in pieces complete in another order than they began, and some prefixes are reused."""
    rng = random.Random(2)
    events = [(rng.choice((0, 2, 5, 5, 9)), rng.randrange(6), rng.randint(1, 9)) for _ in range(60)]
    run_events(["token-recycling", "plain"], events, piece=5, prefix_bytes=100_000)


def exits() -> None:
    need_compiled()
    check_exits()


def view() -> None:
    text_net(tiny(), "view", ragged(tiny(), 3), max_new_tokens=40, **RULES["greedy"])


def view_of_all_layers() -> None:
    """A view that skips no layer drafts the model's own output."""
    report = text_net(tiny(), "view-whole", ragged(tiny(), 3), max_new_tokens=40, **RULES["greedy"])
    assert report.acceptance_rate == 1.0


def cut_model() -> None:
    check_against_cut(DecoderTarget(tiny(layers=4), "stock"), (1, 3), 1e-6)


def reviewed() -> None:
    check_drafts("10", SKIPPING, "none", "seeded")


def without_halves() -> None:
    need_compiled()
    check_against_muted(DecoderTarget(deep("llama", torch.float32)), 1e-3)


def rounded_weights() -> None:
    need_compiled()
    check_against_rounded(deep("llama", torch.float32), "int8")


def chosen_neurons() -> None:
    need_compiled()
    check_against_masked(DecoderTarget(deep("llama", torch.float32)), 1e-3)


def chosen_neurons_by_its_own_forward() -> None:
    check_against_masked(DecoderTarget(deep("llama", torch.float32), "stock"), 1e-3)


def chosen_entries() -> None:
    check_against_picked(DecoderTarget(tiny("llama", torch.float32)), VIEW, 1e-3)


def followed_by_place(self: SubsetCache, whole: RowCache, slot: int, follow: Any = SubsetCache.follow) -> None:
    follow(self, whole, slot)
    self.cursor.offsets[slot] = 0


def view_arrivals() -> None:
    """Rows that draft by a view of all layers, of which the first leaves; every draft is accepted."""
    fast = accelerate(tiny(), draft=drafter("view-whole", tiny()), control="fixed")
    with fast.engine(max_rows=3, max_tokens=48) as engine:
        requests = [
            engine.add_request(torch.tensor([5, 6 + i, 7, 9]), max_new_tokens=n, do_sample=False)
            for i, n in enumerate((4, 16, 24))
        ]
        while engine.has_unfinished_requests():
            engine.step()
    assert all(request.result() and request.report().acceptance_rate == 1.0 for request in requests)


def arrivals_of_encoder_decoders() -> None:
    """The first row to leave has the shortest source; the row of the last slot, which is moved, a longer one."""
    add, step = 3, (5, 0, 1)
    events = [(add, 3, 3), step, (add, 1, 14), step, (add, 2, 14), *[step] * 9, (add, 0, 13)]
    run_events(["token-recycling"], events, "encoder-decoder")


def failures() -> None:
    test_failures.test_error_ends_only_the_request_of_its_part("processor", "decoder")


def sources_in_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    true = SourceLayer.put
    patch.setattr(SourceLayer, "put", lambda self, slot, *rest: true(self, 0, *rest))


def narrower(self: SourceLayer, width: int) -> None:
    """Widening for a longer source drops the stored ones."""
    self.clear(width)


def tokens_of_failed_requests_kept(patch: pytest.MonkeyPatch) -> None:
    true = Engine._verified_of

    def verified(self: Engine, request: Any, rows: Sequence[Row], *rest: Any) -> Any:
        for row in rows:
            row.tokens = Undeleted(row.tokens)
        return true(self, request, rows, *rest)

    patch.setattr(Engine, "_verified_of", verified)


class Undeleted(list[int]):
    """A list from which nothing can be deleted; an attempt appends a token."""

    def __delitem__(self, where: Any) -> None:
        self.append(0)


def prompts_in_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    true = Nodes.add_chain
    patch.setattr(Nodes, "add_chain", lambda self, slot, *rest: true(self, 0, *rest))


_load, _copied, _activate = Prefixes.load, RowCache.copied, RowCache.activate


def one_more(self: Prefixes, namespace: str, ids: Sequence[int], slot: int) -> int:
    length = _load(self, namespace, ids, slot)
    if length and length + 1 < len(ids):
        length += 1
        self._cache.cursor.reading[slot] = length
    return length


def of_the_first_slot(self: RowCache, slot: int, first: int, last: int) -> list[torch.Tensor]:
    return _copied(self, 0, first, last)


def one_unread(self: CacheCursor, slot: int) -> int:
    return self.lengths[slot] if slot < len(self.lengths) else self.reading[slot] + 1


def all_but_the_last(self: RowCache, slot: int) -> int:
    saved = [kept[slot, :, self.cursor.reading[slot]].clone() for kept in self._kept]
    length, new = self.cursor.reading[slot], _activate(self, slot)
    if new != slot:
        for kept, entry in zip(self._kept, saved, strict=True):
            kept[new, :, length] = entry + 1.0
    return new


def pieces_from_the_start(patch: pytest.MonkeyPatch) -> None:
    true = Nodes.add_chain
    patch.setattr(Nodes, "add_chain", lambda self, slot, start, *rest: true(self, slot, 0, *rest))


def noise_of_the_latest_request(patch: pytest.MonkeyPatch) -> None:
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
    """Later rows move up by one, where the cache moves the last row into the free slot."""
    self._cohort = None
    self._end(self.rows[slot])
    self.target.release(slot)
    del self.rows[slot]


def stale_slot(self: Engine, slot: int) -> None:
    """The row that is moved into the free slot keeps its old slot number."""
    moved, old = self.rows[-1], self.rows[-1].slot
    true_leave(self, slot)
    moved.slot = old


true_states, true_rooted = ViewReader.states, ExitReader._rooted


def states_of_other_rows(self: ViewReader, growing: Sequence[Any], layer: int) -> Tensor:
    return true_states(self, growing, layer).flip(0)


def rooted_one_early(self: ExitReader, tree: Any, slot: int, length: int) -> Any:
    return replace(true_rooted(self, tree, slot, length), position=length - 1)


def exit_one_early(self: FirstLayers, layers: int) -> Reduction:
    rest = frozenset(range(self.exit - 1, layers))
    return Reduction(rest, rest, output_head=True)


def without_ancestors(s: TreeShape) -> TreeShape:
    """Of a path beside the first nodes only the node itself is left."""
    own = [s.extra[end - 1 : end] if end > start else () for start, end in pairwise(s.extra_from)]
    extra = tuple(chain.from_iterable(own))
    return replace(
        s, extra=extra, extra_depth=tuple(s.depth[i] for i in extra),
        extra_from=tuple(accumulate(map(len, own), initial=0)),
    )  # fmt: skip


def as_a_chain(s: TreeShape) -> TreeShape:
    n = len(s.run)
    return replace(s, run=tuple(range(1, n + 1)), extra=(), extra_depth=(), extra_from=(0,) * (n + 1))


def one_too_far(self: ViewReader, tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
    places = true_places(self, tree, nodes)
    return [min(place + 1, len(self._paths[id(tree)].tree) - 1) if i else place for i, place in enumerate(places)]


true_entering, true_chosen = SparseOps.entering, Neurons.chosen


def entering_later(self: SparseOps, at: int, buffer: int, whole: frozenset[int]) -> list[Op]:
    starts = [self._program.ops_of(layer).start for layer in self._first]
    ends = [self._program.ops_of(layer).stop - 1 for layer in self._first]
    return true_entering(self, starts[ends.index(at)], buffer, whole) if at in ends else []


def chosen_by_the_first(self: Neurons, layer: int, states: Tensor) -> Tensor:
    return true_chosen(self, layer, states[:, :1]).expand(*states.shape[:-1], -1)


MUTANTS: dict[str, tuple[Fault, Net]] = {
    "lost tree mask": (reshaped(lambda s: masked(s, torch.eye(len(s.depth), dtype=torch.bool))), nodes),
    "tree attended to as a chain": (reshaped(lambda s: masked(s, torch.ones_like(s.mask).tril())), nodes),
    "positions by node index": (reshaped(lambda s: replace(s, depth=tuple(range(len(s.depth))))), nodes),
    "lost ancestors in a compiled pass": (
        unchecked(reshaped(without_ancestors)),
        nodes_compiled,
    ),
    "tree attended to as a chain in a compiled pass": (
        unchecked(reshaped(as_a_chain)),
        nodes_compiled,
    ),
    "positions by node index in a compiled pass": (
        unchecked(reshaped(lambda s: replace(s, depth=tuple(range(len(s.depth)))))),
        nodes_compiled,
    ),
    "nodes routed to the experts of another node": (wrong_operands(OpKind.DEAL, top=1), nodes_of_experts),
    "the first expert instead of each": (wrong_operands(OpKind.LINEAR, apart=0), nodes_of_experts),
    "routing weights not normalised": (wrong_operands(OpKind.ROUTE, mode=0), nodes_of_experts),
    "commit of the first k nodes": (faults.FIRST_NODES_KEPT, nodes),
    "rejected KV kept": (faults.REJECTED_KEPT, nodes),
    "overshot length": (lambda patch: faults.emitting_one_by_one(patch, overshoot), text()),
    "end of text ignored inside a draft": (faults.EOS_IGNORED, text_with_eos),
    "stale penalty history": (faults.STALE_HISTORY, text(repetition_penalty=1.8)),
    "noise tied to the draws made": (faults.noise_per_draw, text("seeded")),
    "second-best token": (replaced(Greedy, "decide_all_nodes", second_best), text()),
    "unverified drafts accepted": (faults.ACCEPTED_UNVERIFIED, text()),
    "a new row's KV written over a running row's": (unchecked(prompts_in_the_first_slot), arrivals),
    "one position too many of a prefix reused": (replaced(Prefixes, "load", one_more), pieces),
    "prefix of another row stored": (replaced(RowCache, "copied", of_the_first_slot), pieces),
    "a position stored that has not been read": (replaced(CacheCursor, "committed", one_unread), pieces),
    "rows being read not swapped": (replaced(RowLayer, "swap", lambda self, *_: None), pieces),
    "last token of a prompt not moved with its row": (replaced(RowCache, "activate", all_but_the_last), pieces),
    "pieces read from a prompt's start": (unchecked(pieces_from_the_start), pieces),
    "another row's noise": (noise_of_the_latest_request, arrivals),
    "drafter state of a cancelled row kept": (replaced(Engine, "_end", lambda self, row: None), arrivals),
    "scratch of a view left in the cache": (faults.SCRATCH_LEFT, view_of_all_layers),
    "scratch of a view committed": (faults.SCRATCH_COMMITTED, view),
    "committed KV overwritten by a view": (faults.COMMITTED_OVERWRITTEN, view),
    "slot number of a moved row not updated": (replaced(Engine, "_leave", stale_slot), view_arrivals),
    "skipped halves of a view executed": (replaced(Halves, "without", lambda *_: set()), without_halves),
    "tokens read ahead kept under a view from the next on": (replaced(ViewReader, "_places", one_too_far), reviewed),
    "weights of a view not rounded": (
        replaced(RoundedOps, "ops", property(lambda self: list(self.whole.ops))),
        rounded_weights,
    ),
    "neurons of a view not left out": (replaced(SparseOps, "over", lambda self, at, op, buffer: op), chosen_neurons),
    "neurons chosen by a later state": (replaced(SparseOps, "entering", entering_later), chosen_neurons),
    "neurons chosen by the first node's token": (
        replaced(Neurons, "chosen", chosen_by_the_first),
        chosen_neurons_by_its_own_forward,
    ),
    "places of chosen entries as positions": (replaced(SubsetCache, "follow", followed_by_place), chosen_entries),
    "ring of recent entries not followed": (replaced(SubsetCache, "_copy", lambda *_: None), chosen_entries),
    "skipped layers of a view executed": (replaced(SkippableLayers, "without", lambda *_: nullcontext()), cut_model),
    "exit states of other rows": (replaced(ViewReader, "states", states_of_other_rows), exits),
    "positions of exit states one early": (replaced(ExitReader, "_rooted", rooted_one_early), exits),
    "exit states one layer early": (replaced(FirstLayers, "reduction", exit_one_early), exits),
    "rows shifted where slots are swapped": (replaced(Engine, "_leave", slots_move_up), arrivals),
    "new rows' KV committed to the first slots": (
        replaced(DecoderTarget, "commit", commit_from_the_first),
        arrivals,
    ),
    "a new row's source written over a running row's": (
        unchecked(sources_in_the_first_slot),
        arrivals_of_encoder_decoders,
    ),
    "source not moved with its row": (
        replaced(SourceLayer, "move", lambda self, source, target: None),
        arrivals_of_encoder_decoders,
    ),
    "sources dropped when widened for a longer one": (
        replaced(SourceLayer, "widen", narrower),
        arrivals_of_encoder_decoders,
    ),
    "tokens of a failed request's pass kept": (tokens_of_failed_requests_kept, failures),
    "pass observed by a request that failed in it": (replaced(Cohort, "without_failed", lambda self: self), failures),
}


NETS = {net: name for name, (_, net) in reversed(MUTANTS.items())}


@pytest.mark.parametrize("net", NETS, ids=NETS.values())
def test_net_passes_without_the_fault(net: Net) -> None:
    net()


@pytest.mark.parametrize("name", MUTANTS)
def test_net_detects_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, net = MUTANTS[name]
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        net()
