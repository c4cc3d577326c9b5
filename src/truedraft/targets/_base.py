"""The `Target` protocol: the model whose output is reproduced, as engine, drafters, rules, control and audit use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.prefixes import Prefixes
from truedraft.runtime._base import GreedyChain, GrownTree, TreeGrowth, TreeLimits
from truedraft.targets.kinds import Family
from truedraft.tree import DraftTree, Piece, Prompt, Row, Scores, Taps
from truedraft.views._base import View


class Target(Protocol):
    """A model that scores trees over a KV cache of rows; made by `targets.hosting.hosted`.

    Rows occupy the slots 0 .. n - 1 of the cache. A slot holds the KV of the committed tokens of its row, all but the
    pending token, which is the root of the next tree. A pass writes the KV of every tree behind its slot's committed
    one; `commit` keeps a path of it.

    V is the size of the vocabulary, H the hidden size. The target computes the positions of nodes itself; callers pass
    trees only.

    Attributes:
        taps: what passes return besides logits.
        branching: whether it scores trees. If not, only chains without probes: its layers have states, which follow one
            text at a time.
        croppable: whether committed tokens can be discarded again (`crop`).
        view: what every pass but those over prompts runs under, and its text is not the model's; None for the whole
            model.
        on_read: called while prompts are read by `admit` and `prefill`, with the tokens that are read and those of all
            these prompts; None for nothing.
    """

    taps: Taps
    branching: bool
    croppable: bool
    view: View | None
    on_read: Callable[[int, int], None] | None

    # ---------------------------------------------------------------- the model

    @property
    def model(self) -> PreTrainedModel:
        """The model of `transformers`, for drafters and rules that use its modules, and for messages."""

    @property
    def family(self) -> Family:
        """The model's kind; cards name under it why a method cannot draft for such models."""

    @property
    def reads_sources(self) -> bool:
        """Whether an encoder reads a source per row; the prompt is then the decoder's."""

    @property
    def shared_vocabulary(self) -> bool:
        """Whether sources and outputs have the same token ids."""

    @property
    def vocabulary(self) -> int:
        """V, padding at its end included."""

    @property
    def embedding_width(self) -> int | None:
        """Width of the embeddings that probes may have in the place of tokens; None where the model reads none."""

    @property
    def layers(self) -> int:
        """Layers of the decoder, as views number them."""

    @property
    def context(self) -> int | None:
        """Positions that the model was trained for; None where its configuration names none."""

    @property
    def hard_limit(self) -> int | None:
        """Positions beyond which the model's own forward fails; None where there is no such limit."""

    @property
    def longest_source(self) -> int | None:
        """Most tokens of a source that the encoder has positions for; None without a limit or an encoder."""

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs and logits."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def changed(self) -> bool:
        """Whether the model has changed since this was constructed, in more than the values of its weights: the checks
        made then, its comparison with the model's own decoding included, are no longer valid."""

    # ---------------------------------------------------------------- how passes are made

    @property
    def runtime(self) -> str:
        """How passes are computed, as reports show it, and why not by a faster way that was requested."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the logits of a node have the same bits whatever else is in its pass."""

    @property
    def decides_as_generate(self) -> bool:
        """Whether the logits of a node have the bits that `model.generate` has there for the row alone."""

    @property
    def padded(self) -> bool:
        """Whether every row of a pass costs as many nodes as its widest tree has."""

    @property
    def carried(self) -> int:
        """Nodes that the next pass reads besides its trees, padding included: tokens that are committed already, where
        the states of a model can only be had from before them."""

    @property
    def noise(self) -> float:
        """Largest difference measured between its logits and those of the model's own decoding; 0 before that."""

    @property
    def cold(self) -> bool:
        """Whether the last pass was slower than later ones of its size, because it was captured first."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights; the time to read them is about that of a small pass."""

    @property
    def cost_key(self) -> tuple[str, ...]:
        """What the duration of a pass depends on besides the machine: class, configuration, dtype, kind of pass."""

    # ---------------------------------------------------------------- inputs of a call

    @property
    def output_class(self) -> type[Any]:
        """What `model.generate` returns with `return_dict_in_generate`."""

    def check_inputs(self, inputs: Any, given: Mapping[str, Any]) -> None:
        """Check the inputs of `generate(inputs, **given)`.

        Raises:
            Refused: an input is not supported, or its dtype or shape is not the one that the model expects.
        """

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Equivalent arguments of `generate`: with the encoder's output where a faster pass computes it, without inputs
        that have no effect."""

    def prompts_of(self, input_ids: Tensor, given: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
        """The prompts of a call's rows, without padding.

        Args:
            input_ids: (rows, length), as `generate` passes them to a decode loop.
            given: the other model inputs that it passes.
            sources: (batch, length) token ids of the sources, with padding, where they are text; rows / batch
                consecutive rows share a source.

        Raises:
            Refused: a prompt or a source is empty, or padded where the model would read the padding, or an input is
                not supported.
        """

    def prompts(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], width: int) -> list[Prompt]:
        """Prompts for rows of another target, as a draft model reads them: all their tokens so far.

        Args:
            texts: these tokens, as the draft model has them.
            width: tokens that sources are padded to; ignored by models that read none.
        """

    def prompt(self, ids: Tensor) -> Prompt:
        """A prompt of (length,) token ids for timing passes; with a random source where the model reads one."""

    def check_lengths(self, prompts: Sequence[Prompt], steps: int) -> None:
        """Raises Refused where rows of these prompts and so many new tokens have lengths at which the model changes how
        it reads them, which the passes of this target cannot follow."""

    def reference(self, rows: int, capacity: int) -> Callable[[Row], Tensor]:
        """The plain decoding that a guarantee names: (V,) logits of a row's next token as `model.generate` has them.

        Raises:
            NoRoom: a second cache of that many rows and positions does not fit in memory.
        """

    # ---------------------------------------------------------------- the cache

    def reserve(self, rows: int, capacity: int, shared: bool = False) -> None:
        """Allocate a cache of `rows` slots of `capacity` positions each; it replaces the previous one.

        Args:
            shared: the caller grants rows the memory that there is (`caches/pool.py`); where slots are `paged`, not all
                of them have to fit at once.

        Raises:
            NoRoom: it does not fit in free memory.
            Refused: autocast is enabled, which only the model's own forward supports; nothing was computed.
        """

    def check_capacity(self, rows: int, capacity: int) -> None:
        """Raises NoRoom where a cache of these sizes does not fit in free memory."""

    @property
    def paged(self) -> bool:
        """Whether a slot takes memory as its row grows, and gives it back when the row leaves; else all of it is taken
        from the start."""

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position of a row."""

    def spare_memory(self, utilization: float, least: int) -> int:
        """Bytes that there are for keys and values while no more than a share of the device's memory is in use. Copies
        of weights are given up where there are less than `least` with them."""

    def committed_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values that a decoder layer has in the cache, (slots, KV heads, capacity, head size) each, not
        copied; of a slot only what is committed may be read. Keys are rotated by their positions, see
        `runtime.rotations`."""

    @property
    def reserved(self) -> tuple[int, int]:
        """Slots of the cache, and positions of each; (0, 0) where there is none."""

    def free(self) -> None:
        """Release the memory of the cache."""

    def temporary_cache(self, rows: int, capacity: int) -> AbstractContextManager[None]:
        """Within the block, passes use another cache; afterwards the previous one is restored with its rows unchanged.

        Raises:
            NoRoom, Refused: as `reserve`.
        """

    # ---------------------------------------------------------------- rows and passes

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Raises NoRoom where new rows need more than the reserved cache, and that does not fit in free memory."""

    def admit(self, prompts: Sequence[Prompt]) -> Scores | None:
        """Admit rows to the next free slots; their prompts are committed except for the last token.

        Returns:
            As `prefill`; None where there was nothing to read: the rows then start with the next `score`.
        """

    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        """Like `admit`, but always by a pass: logits (rows, 1, V) of the prompts' last tokens."""

    # ---------------------------------------------------------------- prompts in pieces, between passes

    @property
    def granularity(self) -> int | None:
        """Pieces of prompts end at multiples of this many positions, or with the prompt: 1 where no split changes a bit
        of the pass; None where prompts are only read whole, by `admit`."""

    def open(self) -> int:
        """Take a free slot for a row whose prompt will be read in pieces; the row is not in use until `activate`."""

    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        """Read pieces of prompts, at most `runtime.PROMPT` positions, by the pass that also scores trees; the model's
        own forward for long prompts (`prefill`) would round differently.

        Returns:
            By piece: logits (1, `piece.scores`, V) of its last positions, and hidden states of all its positions.
        """

    def activate(self, slot: int) -> int:
        """Put a row whose prompt has been read into use: its new slot. If another row is being read there, that one
        moves to `slot`. The prompt is committed except for its last token."""

    def discard(self, slot: int) -> None:
        """Free the slot of a row whose prompt is being read."""

    def prefixes(self, limit: int, shared: bool) -> Prefixes | None:
        """An empty store of at most `limit` bytes for prefixes of the rows of the reserved cache; None where the model
        cannot go on from a prefix of which only keys and values are kept."""

    # ---------------------------------------------------------------- passes over trees

    def score(self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None) -> Scores:
        """One pass: logits (rows, width, V) at every node of one tree per slot in use. On a GPU it may still be running
        when this returns; see `wait`.

        Without a view the whole model reads the committed KV, and scratch is dropped. Under a view the pass reads the
        scratch as well, behind the committed KV or the entries of it that the view chooses, and writes behind both.

        Args:
            slots: under a view, the slots of the trees, in increasing order; by default all slots in use.

        Raises:
            Refused: the model cannot run under the view (see `check_view`), the view runs a layer for which another
                view has written no scratch, or reads other entries, or the cache has no room for more scratch; nothing
                was computed.
            NoRoom: the entries that the view chooses do not fit in free memory beside the cache.
        """

    def extend(self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int]) -> Tensor:
        """One pass of the whole model over the nodes of one tree per slot in use behind its first `written` ones, whose
        KV passes since the last commit wrote.

        Args:
            last: by tree, how many of its last nodes to return the logits of.

        Returns:
            (k, V) logits at these nodes, tree after tree.
        """

    def extend_tapped(
        self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int], taps: Taps
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Like `extend`, and the hidden states at the same nodes: layer -> (k, H).

        Raises:
            Refused: see `check_taps`.
        """

    def extend_greedily(
        self, trees: Sequence[DraftTree], written: Sequence[int], chains: Sequence[GreedyChain | None]
    ) -> list[list[int]] | None:
        """Like `extend`, and further passes, each over the likeliest token after the last node of the one before: the
        tokens of the chain of each tree, which has no branches, where it has one. The KV of all of them but the last is
        written behind the tree's. The chains consider the same tokens, with the same least probability.

        None where calls make one pass each: nothing was computed.
        """

    def extend_trees(
        self,
        trees: Sequence[DraftTree],
        written: Sequence[int],
        growth: TreeGrowth,
        limits: Sequence[TreeLimits | None],
    ) -> tuple[list[GrownTree | None], list[float]] | None:
        """Like `extend_greedily`, of trees of likeliest tokens: each further pass reads a level of all of them.

        Returns:
            By slot what was added, None without limits, and the seconds of each level. The KV of the nodes that were
            read is written behind the tree's, in the order of `read`. None where calls make one pass each: nothing was
            computed.
        """

    def check_taps(self, taps: Taps) -> None:
        """Raises Refused, in one sentence, where this model has no such layers."""

    def check_view(self, view: View) -> None:
        """Raises Refused, in one sentence, where this model cannot run under a view, or has other sizes than the one
        that it was calibrated on."""

    def fitting(self, view: View) -> list[str]:
        """Sentences for reports on the parts of a view that were calibrated on other weights than this model's, or
        trained for such.

        Raises:
            Refused: as `check_view`.
        """

    def generate_under(self, view: View) -> None:
        """Run all following passes but those over prompts under a view.

        Raises:
            Refused: see `check_view`.
        """

    def check_drafts(self) -> None:
        """Raises Refused, in one sentence, where drafts cannot be verified, because of the view."""

    def share(self, view: View) -> float:
        """The bytes of weights that a pass under a view reads, over those that a pass of the whole model reads.

        Raises:
            Refused: see `check_view`.
        """

    def advance(self, view: View, paths: Sequence[Sequence[int]], slots: Sequence[int] | None = None) -> None:
        """Keep a path of each tree that was just scored under a view as scratch KV for the view's next pass.

        Args:
            paths: node indices from the root on; none for a row whose scratch does not grow.
            slots: as in `score`.
        """

    def replayed(self, view: View, slot: int, tokens: Sequence[int]) -> Tensor:
        """(n, V) logits at the last n committed tokens of a row, by a pass under a view that reads what is committed
        before them. Scratch is dropped; what is committed has the same bits afterwards, whether this raises or not.

        Args:
            tokens: these tokens.

        Raises:
            Refused: as `score`, or the view chooses entries of the cache.
        """

    def rewind(self) -> None:
        """Drop the scratch of views, as every pass of the whole model, admission, release and crop does."""

    def wait(self) -> None:
        """Block until the device has finished all passes."""

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        """Make the KV of a path of each slot's latest tree permanent, for the slots from `first` on.

        Args:
            paths: nodes from the root on, by slot; whatever else the pass wrote for these slots is discarded.
        """

    def crop(self, slot: int, length: int) -> None:
        """Discard the committed KV of a slot beyond its first `length` tokens.

        Raises:
            Refused: the model has states, which cannot be taken back.
        """

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use moves into it."""
