"""A draft model run beside the target: its KV cache, kept in step with the target's rows, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.card import shown
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._branch import Branch
from truedraft.drafters.models._vocabularies import RowTexts
from truedraft.errors import NoRoom, Refused
from truedraft.loading import load
from truedraft.runtime._base import GreedyChain, TreeGrowth, TreeLimits
from truedraft.runtime.finite import check_finite
from truedraft.runtime.released import release_weights
from truedraft.runtime.releasing import released_by_default
from truedraft.targets._base import Target
from truedraft.targets.hosting import hosted
from truedraft.targets.kinds import family_of
from truedraft.targets.unwrapping import unwrapped
from truedraft.tree import DraftTree, Row, Taps

NAMED = {"decoder": "a decoder", "encoder-decoder": "an encoder-decoder"}
NOTHING = DraftTree.chain(0)
NO_TAPS = Taps()
CHUNK = 64  # tokens of a row per pass, where at least as many are unread


def loaded(model: Any) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """A draft model, given as a model or by name; with its tokenizer where it was loaded by name.

    Raises:
        Refused: neither a model nor a name, or it cannot be loaded, or has weights that are no finite numbers.
    """
    if isinstance(model, str | PathLike):
        found, tokenizer = load(str(model), argument="the draft model")
        check_finite("the draft model", model, found)
        return found, tokenizer
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel | None):
        raise Refused(f"model={shown(model)}: give a model of transformers, or its name (./NAME for a folder)")
    return model, None


class Reader:
    """A draft model with a KV cache of its own, a slot per row, as a `LevelReader`; a row may be admitted to it later
    than to the target.

    An encoder-decoder encodes the sources of the rows with its own encoder, once each, and starts from the same
    decoder prompt as the target.

    The draft model may be on another device than the target. Its cache and its passes are there; of each pass the
    logits that drafts grow from are moved to the target's device, and nothing else.

    Args:
        model: the draft model.
        runtime: how it makes its passes, see DecoderTarget.

    device: the target's, that of the logits. texts: the rows in its tokens. slot_rows: row of each slot.
    written: tokens of each slot in the cache.
    """

    def __init__(self, model: Any, runtime: str = "auto"):
        self.model, self.runtime = model, runtime
        self.device = torch.device("cpu")
        self.texts = RowTexts()
        self.slot_rows: list[Row] = []
        self.written: list[list[int]] = []
        self._confirmed: list[int] = []  # leading tokens of `written` that the row emitted
        self._running: set[Row] = set()
        self._begun = False  # whether rows were started since cache was last reserved
        self._fitting = (0, 0)  # slots and positions for which there was memory
        self._hosted: Target | None = None
        self._branches: dict[int, Branch] = {}  # of the trees that are growing, by slot

    @property
    def vocab_size(self) -> int:
        """Entries of the model's vocabulary, padding included."""
        return self.model.config.get_text_config(decoder=True).vocab_size

    @property
    def target(self) -> Target:
        """The draft model as a target, which scores trees."""
        assert self._hosted is not None
        return self._hosted

    def fit(self, target: Target) -> None:
        """Host the draft model, for a target.

        Raises:
            Refused: one of the two has an encoder and the other has none, or the draft model cannot be hosted exactly.
        """
        name, (mine, others) = type(self.model).__name__, (family_of(self.model.config), target.family)
        if mine != others:
            kind, other = NAMED[mine], NAMED[others]
            raise Refused(
                f"the draft model {name} is {kind}, and the model that it would draft for is {other}: "
                f"give {other} as the draft model"
            )
        self.device, self._vocabulary = target.device, target.vocabulary
        self._host()

    def _host(self) -> None:
        if self._hosted is None or self._hosted.changed:
            if released_by_default(self.model, self.runtime):
                release_weights(self.model)
            made = hosted(self.model, self.runtime)
            if not made.croppable:
                raise Refused(
                    f"the draft model {type(self.model).__name__} has states, which cannot be taken back to where its "
                    "draft was accepted: give one with attention alone"
                )
            self._hosted, self._context, self._sources = made, made.context, made.longest_source
        self._width = min(self.vocab_size, self._vocabulary)

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Admit new rows, with `more` tokens for drafts beyond the end of a row.

        Cache is reserved, and the model compared with the one that was hosted, once a draft is requested: short calls
        often go without.

        Raises:
            NoRoom: a cache larger than those before would not fit in memory; rows that run already are not affected.
            Refused: the draft model has an encoder, and a row's source is not given as token ids.
        """
        if self.target.reads_sources:
            for row in rows:
                if not row.source:
                    raise Refused(
                        f"the draft model reads the sources itself, and row {row.index} has none in token ids: give "
                        "generate() input_ids, each row with a token or more, or another drafter"
                    )
        self._running |= set(rows)
        self._begun, self._more = True, more + CHUNK
        count, capacity = len(self._running), self._more + max(row.prompt + row.room for row in self._running)
        if self._fitting[0] < count or self._fitting[1] < capacity:
            self.target.check_capacity(count, capacity)
            self._fitting = count, capacity

    def _reserve(self) -> None:
        """Reserve cache for all running rows, and drafts for them, unless there is; raises NoRoom."""
        length_of = self.texts.length
        if self._begun:
            self._begun, length_of = False, self._longest
            self._host()
        count, (slots, room) = len(self._running), self.target.reserved
        if slots < count or room < max(map(length_of, self._running)) + self._more:
            longest = max(map(self._longest, self._running))
            self.target.reserve(slots if slots >= count else max(count, 2 * slots), longest + self._more)
            self._clear()  # what was read is read again

    def _longest(self, row: Row) -> int:
        """Tokens of a row that there is to be room for, if it goes on as it is so far."""
        length = self.texts.length(row)
        return max(ceil(length / max(len(row.tokens), 1) * (row.prompt + row.room)), length)

    def end(self, row: Row) -> None:
        """The row is finished; its slot is freed by the next `admit`, or when the last row ends."""
        self._running.discard(row)
        self.texts.end(row)
        if row in self.slot_rows:
            self._branches.pop(self.slot_rows.index(row), None)
        if not self._running:
            self._clear()
            self.target.free()

    def _clear(self) -> None:
        """Nothing of any row has been read."""
        self.slot_rows, self.written, self._confirmed = [], [], []
        self._branches.clear()

    def fits(self, row: Row, after: int) -> bool:
        """Whether the row and `after` tokens more fit in the model's context and its cache, and the source in its
        encoder."""
        context, sources = self._context, self._sources
        length, (_, room) = self.texts.length(row), self.target.reserved
        return (
            0 < length <= room - self._more
            and (context is None or length + after <= context)
            and (sources is None or len(row.source) <= sources)
        )

    def admit(self, rows: Sequence[Row]) -> None:
        """Free the slots of all other rows, and read those of these that are new and fit, without the pending token."""
        with suppress(NoRoom):  # then rows that are longer than expected are not drafted for
            self._reserve()
        for slot in reversed([slot for slot, row in enumerate(self.slot_rows) if row not in rows]):
            self._release(slot)
        if new := [row for row in rows if row not in self.slot_rows and self.fits(row, 0)]:
            self._prefill(new)

    def _prefill(self, rows: Sequence[Row]) -> None:
        """Read the tokens of new rows, without the pending one."""
        texts = [self.texts.text(row) for row in rows]
        width = max(len(row.source) for row in self._running if self.fits(row, 0))
        self.target.prefill(self.target.prompts(rows, texts, width))
        self.slot_rows += rows
        self.written += [text[:-1] for text in texts]
        self._confirmed += [min(self.texts.settled(row), len(text) - 1) for row, text in zip(rows, texts, strict=True)]

    def _release(self, slot: int) -> None:
        """Free a slot; the last slot in use is moved into it."""
        self.target.release(slot)
        slots: tuple[list[Any], ...] = (self.slot_rows, self.written, self._confirmed)
        for kept in slots:
            kept[slot] = kept[-1]
            kept.pop()

    def catch_up(self, rows: Sequence[Row], after: Sequence[Sequence[int]] = ()) -> None:
        """Admit these rows and no others, and read their tokens up to the last `CHUNK` or fewer.

        after: by row, drafted tokens to read behind its own.
        """
        self._settle()
        self.admit(rows)
        drafted = dict(zip(rows, after, strict=bool(after)))
        self.follow(
            [self.texts.text(row, drafted.get(row, ())) if self.fits(row, 0) else None for row in self.slot_rows]
        )

    def tokens_read(self, row: Row, after: int) -> int | None:
        if row not in self.slot_rows or not self.fits(row, after):
            return None
        return len(self.written[self.slot_rows.index(row)])

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        return self.expand_tapped(growing, NO_TAPS)[0]

    def expand_tapped(self, growing: Sequence[GrowingTree], taps: Taps) -> list[Tensor]:
        """The logits of `expand`, and the model's hidden states at the same nodes, (k, H) by layer of `taps`, on its
        own device."""
        slots, last = self._slots_of(growing), [0] * len(self.slot_rows)
        begins = False
        for slot, tree in zip(slots, growing, strict=True):
            last[slot], begins = len(tree.frontier), begins or self._branches[slot].begins
        logits, states = self.target.extend_tapped(*self._inputs(last), last, taps)
        if begins:
            self._keep_rooted()
        found = [self._drafted_from(logits), *states.values()]
        if len(slots) == 1 or slots == sorted(slots):
            return found
        return [torch.cat([one.split(last)[slot] for slot in slots]) for one in found]

    def decode_greedily(self, growing: Sequence[GrowingTree], least: float) -> bool:
        """Grow chains of the likeliest tokens from the roots of trees, all levels at once, where there is a faster way
        than a call per level; else false, and nothing was done.

        least: a chain ends with a token of lower probability.
        """
        slots, texts = self._slots_of(growing), self.texts
        chains: list[GreedyChain | None] = [None] * len(self.slot_rows)
        columns = texts.columns(self._width)
        for slot, tree in zip(slots, growing, strict=True):
            most = min(tree.room, tree.deepest - tree.depth[tree.root])
            chains[slot] = GreedyChain(most, texts.own_of(tree.row.ends), least, columns)
        inputs = self._inputs([int(chain is not None) for chain in chains])
        if (drafted := self.target.extend_greedily(*inputs, chains)) is None:
            self._branches.clear()
            return False
        self._keep_rooted()
        for slot, tree in zip(slots, growing, strict=True):
            node, branch = tree.root, self._branches[slot]
            for token in texts.target_of(drafted[slot]):
                (node,) = tree.add(node, [token])
                branch.add([node])
            branch.pop()
        return True

    def grow_greedily(
        self, growing: Sequence[GrowingTree], growth: TreeGrowth, shapes: Sequence[Sequence[int] | None]
    ) -> list[float]:
        """Grow trees of the likeliest tokens, all levels in one call, where there is a faster way than a call per
        level: the seconds of each level; else none, and nothing was done.

        shapes: see `TreeLimits`.
        """
        slots, texts = self._slots_of(growing), self.texts
        limits: list[TreeLimits | None] = [None] * len(self.slot_rows)
        columns = texts.columns(self._width)
        for slot, tree, shape in zip(slots, growing, shapes, strict=True):
            deepest = min(tree.deepest - tree.depth[tree.root], growth.levels)
            limits[slot] = TreeLimits(tree.room, deepest, tree.budget, texts.own_of(tree.row.ends), columns, shape)
        inputs = self._inputs([int(one is not None) for one in limits])
        if (made := self.target.extend_trees(*inputs, growth, limits)) is None:
            self._branches.clear()
            return []
        self._keep_rooted()
        for slot, tree in zip(slots, growing, strict=True):
            if (grown := made[0][slot]) is not None:
                tree.take_over(grown, texts.target_of(grown.tokens))
                self._branches[slot].add([tree.root + node for node in grown.read[1:]])
        return made[1]

    def _slots_of(self, growing: Sequence[GrowingTree]) -> list[int]:
        """The slots of growing trees, which are followed from now on."""
        slots = [self.slot_rows.index(tree.row) for tree in growing]
        for slot, tree in zip(slots, growing, strict=True):
            if slot not in self._branches:
                self._branches[slot] = Branch(tree)
        return slots

    def _inputs(self, counts: Sequence[int]) -> tuple[list[DraftTree], list[int]]:
        """By slot, what the next pass reads of its tree, see `Branch.next_input`."""
        inputs = [
            self._branches[slot].next_input(count) if slot in self._branches else (NOTHING, len(NOTHING))
            for slot, count in enumerate(counts)
        ]
        return [tree for tree, _ in inputs], [written for _, written in inputs]

    def _keep_rooted(self) -> None:
        """Keep what was read of rows before the roots of their trees."""
        self.keep(
            [branch.rooted() if (branch := self._branches.get(slot)) else [] for slot in range(len(self.slot_rows))]
        )

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        """Does nothing: the cache keeps what was read of a draft until the next one."""

    def _settle(self) -> None:
        """Keep what was read of the last drafts as far as it was emitted."""
        if self._branches:
            paths = [list[int]() for _ in self.slot_rows]
            for slot, branch in self._branches.items():
                text = self.texts.text(self.slot_rows[slot])
                paths[slot] = branch.path_along(text[len(self.written[slot]) : -1])
                self.written[slot] += [branch.tree.ids[branch.nodes[place]] for place in paths[slot]]
            self.target.commit(paths)
            self._branches.clear()

    def follow(self, texts: Sequence[Sequence[int] | None]) -> None:
        """Crop each slot to its common prefix with its text, and read the text up to its last `CHUNK` tokens or fewer.

        texts: by slot, the row's tokens followed by drafted ones; None for a row that is not to be read.
        """
        for slot, text in enumerate(texts):
            if text is not None:
                self._crop(slot, text)
        while True:
            parts = [
                () if text is None else text[len(written) : -1]
                for text, written in zip(texts, self.written, strict=True)
            ]
            if max(map(len, parts), default=0) < CHUNK:
                return
            self.read([part[:CHUNK] for part in parts])
            self.keep([part[:CHUNK] for part in parts])

    def _crop(self, slot: int, text: Sequence[int]) -> None:
        written = self.written[slot]
        most = min(len(written), len(text) - 1)
        common = min(self._confirmed[slot], most)
        while common < most and written[common] == text[common]:
            common += 1
        self._confirmed[slot] = min(common, self.texts.settled(self.slot_rows[slot]))
        del written[common:]
        self.target.crop(slot, common)

    def read(self, chains: Sequence[Sequence[int]]) -> None:
        """One pass over a chain for each slot; an empty one reads a dummy node."""
        self.target.score([DraftTree.chain(chain[0], chain[1:]) if chain else NOTHING for chain in chains])

    def score(self, trees: Sequence[DraftTree]) -> Tensor:
        """One pass over a tree for each slot; (slots, nodes, n) raw logits of the n tokens that are drafted."""
        return self._drafted_from(self.target.score(trees).logits)

    def _drafted_from(self, logits: Tensor) -> Tensor:
        """(..., n) logits of the tokens that are drafted, on the target's device, from those of a pass."""
        return self.texts.logits(logits, self._vocabulary).to(self.device)

    def keep(self, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]] = ()) -> None:
        """Commit nodes of each slot's last pass with these tokens: its first ones, a chain, or those of `paths`."""
        self.target.commit(paths or [range(len(kept)) for kept in tokens])
        for written, kept in zip(self.written, tokens, strict=True):
            written += kept
