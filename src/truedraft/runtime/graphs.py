"""A pass on a GPU, replayed from a captured CUDA graph: the model's own forward without its hundreds of launches.

A graph does the same work on the same memory at every replay, so whatever changes between passes (tokens, positions,
masks, indices into the cache) is read from static buffers, and sizes are rounded up to buckets, one graph for each.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache
from truedraft.runtime._base import Runner
from truedraft.runtime.embedding import embedded
from truedraft.runtime.fingerprint import hooked
from truedraft.runtime.forward import ForwardPass
from truedraft.runtime.padded import Padded
from truedraft.runtime.weights import NotCompilable
from truedraft.tree import DraftTree, Piece, Prompt, Scores, Taps
from truedraft.views._base import Reduction, View

EXTENT = 256  # least positions of a row that a pass reads, where the cache has as many
KEPT = 32  # most graphs; the least recently replayed is dropped first

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]


class CudaGraph:
    """A captured function over static buffers; a call replays it and returns the same tensors with new values.

    run: launches the same work on the current device for all values of its buffers.
    beside: a graph to share memory with, whose results are no longer needed when this one is replayed.

    Raises:
        RuntimeError: the function waits for the device, or does something else that cannot be captured.
    """

    def __init__(self, run: Run, beside: CudaGraph | None):
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()  # lets libraries allocate their workspaces
            with _waiting_forbidden():  # a capture that fails halfway would leave torch's generator unusable
                run()
        main.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.graph.pool()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = run()

    def __call__(self) -> Outputs:
        self.graph.replay()
        return self.outputs


class CudaGraphs:
    """Captures functions on one device; their graphs share memory."""

    def __init__(self, device: torch.device):
        self.device = device
        self._last: Callable[[], CudaGraph | None] = lambda: None  # a weak reference

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self.device):
            graph = CudaGraph(run, self._last())
        self._last = weakref.ref(graph)
        return graph


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Within the block, a synchronisation of host and device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every case
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass
class Captured:
    """A pass of one size.

    inputs, embeds: the static buffers that it reads; embeddings where some of its nodes are no tokens.
    run: replays it; returns the logits, then hidden states.
    """

    inputs: Padded
    embeds: Tensor | None
    run: Run


class GraphPass(Runner):
    """The forward of a `transformers` model on a GPU, captured once per size and replayed; prompts are not captured.

    Args:
        stock: computes the passes that are captured.
        capture: function over static buffers -> function that replays it.

    Raises:
        NotCompilable: modules have hooks or replaced forwards, which a replay would leave out.
    """

    name = "captured CUDA graphs"
    extent = EXTENT

    def __init__(self, stock: ForwardPass, capture: Callable[[Run], Run]):
        self.stock, self._capture = stock, capture
        self._captured: OrderedDict[tuple[int, int, int, tuple[int, ...], bool], Captured] = OrderedDict()
        self._captured_cache: RowCache | None = None  # the cache that graphs were captured over
        if names := hooked(stock.model):
            raise NotCompilable(
                f"hooks or replaced forwards would not be run in a captured graph ({', '.join(names[:3])})"
            )

    def kept(self, rows: int, capacity: int) -> RowCache | None:
        """The cache that graphs were captured over, emptied, if idle and large enough; otherwise both are dropped."""
        cache = self._captured_cache
        if cache is None or self.stock.cache is cache:
            return None
        if cache.cursor.slots >= rows and cache.cursor.capacity >= capacity:
            cache.clear()
            return cache
        self._captured.clear()
        self._captured_cache = None
        return None

    def attach(self, cache: RowCache | None) -> None:
        """Set the cache of the following passes; None keeps the graphs, in case the cache is attached again."""
        self.stock.attach(cache)
        if cache is not None and cache is not self._captured_cache:
            self._captured.clear()
            self._captured_cache = cache

    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows by plain forwards."""
        self.stock.on_read = self.on_read
        return self.stock.prefill(prompts, taps)

    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        """Read pieces of prompts by plain forwards."""
        return self.stock.read_pieces(pieces, taps)

    @property
    def granularity(self) -> int:
        return self.stock.granularity

    def over(self, cache: RowCache) -> AbstractContextManager[None]:
        """See `Runner.over`: of plain forwards."""
        return self.stock.over(cache)

    def check_taps(self, taps: Taps) -> None:
        self.stock.check_taps(taps)

    @property
    def under_views(self) -> str:
        return self.stock.name

    def reduced(self, view: View) -> Reduction:
        """See `ForwardPass.reduced`: passes under a view are plain forwards."""
        return self.stock.reduced(view)

    def queries(self, trees: Sequence[DraftTree]) -> list[Tensor]:
        return self.stock.queries(trees)

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        """The logits at every node of one tree per slot in use, of the whole model or under a view.

        Raises:
            Refused: see `reduced`.
            NotCompilable: the pass could not be captured; nothing was committed.
        """
        if view is not None:
            self.cold = False
            return self.stock.score(trees, taps, view)
        self.stock.check_taps(taps)
        cursor, width = self.stock.cache.cursor, max(map(len, trees))
        rows = bucket(len(trees), cursor.slots)
        ends = [n + len(tree) for n, tree in zip(cursor.lengths, trees, strict=True)]
        reads = bucket(max(EXTENT, *ends), cursor.capacity)
        others = range(len(trees), rows)  # they score a dummy token, which is written behind what has been read there
        padded = [*trees, *[DraftTree.chain(0)] * len(others)]
        lengths = cursor.lengths + [cursor.reading.get(slot, 0) for slot in others]
        nodes = Padded.of(padded, lengths, bucket(width), self.stock.device)
        embeds = embedded(self.stock.model, padded, bucket(width), self.stock.device)
        logits, *states = self._replayed(nodes, embeds, reads, taps)
        # the next pass overwrites these tensors
        hidden = {
            layer: [h[: len(t)] for h, t in zip(state.clone(), trees, strict=False)]
            for layer, state in zip(taps.hidden, states, strict=True)
        }
        return Scores(logits[: len(trees), :width].clone(), hidden, [0] * len(trees))

    def _replayed(self, nodes: Padded, embeds: Tensor | None, extent: int, taps: Taps) -> Outputs:
        key = (*nodes.ids.shape, extent, taps.hidden, embeds is not None)
        self.cold = key not in self._captured
        if self.cold:
            self._captured[key] = self._capture_pass(nodes, embeds, extent, taps)
            if len(self._captured) > KEPT:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        captured = self._captured[key]
        captured.inputs.load(nodes)
        if captured.embeds is not None and embeds is not None:
            captured.embeds.copy_(embeds)
        return captured.run()

    def _capture_pass(self, nodes: Padded, embeds: Tensor | None, extent: int, taps: Taps) -> Captured:
        inputs = nodes.to(self.stock.device)

        def run() -> Outputs:
            self.stock.cache.cursor.placed(inputs.places, extent)
            logits, states = self.stock.forward_nodes(inputs, extent, taps, embeds)
            return (logits, *(states[layer] for layer in taps.hidden))

        try:
            return Captured(inputs, embeds, self._capture(run))
        except Exception as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise NotCompilable(f"the pass could not be captured in a CUDA graph: {why}") from error


def bucket(n: int, limit: int | None = None) -> int:
    """The smallest power of two that is at least n, or the limit if that is smaller."""
    size = 1 << (n - 1).bit_length()
    return size if limit is None else min(size, limit)
