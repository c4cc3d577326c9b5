"""What a target is: the model whose output is reproduced, as engine, drafters, rules, control and audit use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.targets.kinds import Family
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps
from truedraft.views._base import View


class Target(Protocol):
    """A model that scores trees over a KV cache of rows; made by `targets.hosting.hosted`.

    Rows occupy the slots 0 .. n - 1 of the cache. A slot holds the KV of the committed tokens of its row, all but the
    pending token, which is the root of the next tree. A pass writes the KV of every tree behind its slot's committed
    one; `commit` keeps a path of it.

    V is the size of the vocabulary, H the hidden size. Positions of nodes are the target's own affair: callers hand it
    trees, and no position.

    Attributes:
        taps: what passes return besides logits.
    """

    taps: Taps

    # ---------------------------------------------------------------- the model

    @property
    def model(self) -> PreTrainedModel:
        """The model of `transformers`, for drafters and rules that use its modules, and for messages."""

    @property
    def family(self) -> Family:
        """Its kind, the key under which cards say why a method cannot draft for it."""

    @property
    def reads_sources(self) -> bool:
        """Whether an encoder reads a source per row, so that the prompt is what the decoder's text begins with."""

    @property
    def one_vocabulary(self) -> bool:
        """Whether sources and outputs are made of the same tokens."""

    @property
    def vocabulary(self) -> int:
        """V, padding at its end included."""

    @property
    def context(self) -> int | None:
        """Positions that the model was made for; None where its configuration names none."""

    @property
    def hard_limit(self) -> int | None:
        """Positions past which the model itself fails; None where it does not."""

    @property
    def longest_source(self) -> int | None:
        """Tokens of a source that the encoder has positions for; None where there is no such bound, or no encoder."""

    @property
    def device(self) -> torch.device:
        """Of the model's inputs and logits."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def changed(self) -> bool:
        """Whether the model is another one than when this was made, in more than the values of its weights: what is
        known of it, the comparison with its own forward included, does not hold any more."""

    # ---------------------------------------------------------------- how passes are made

    @property
    def runtime(self) -> str:
        """How passes are made, and why not faster where that was asked for, as reports show it."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the logits of a node have the same bits whatever else is in its pass."""

    @property
    def noise(self) -> float:
        """By how much its logits and those of the model's own decoding differ, at most; 0 until it was measured."""

    @property
    def cold(self) -> bool:
        """Whether the last pass took longer than others of its size will, because it was captured first."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, which a small pass takes as long as reading."""

    @property
    def cost_key(self) -> tuple[str, ...]:
        """What the seconds of a pass depend on besides the machine: class, configuration, dtype, kind of pass."""

    # ---------------------------------------------------------------- what a call brings along

    @property
    def output_class(self) -> type[Any]:
        """What `model.generate` returns with `return_dict_in_generate`."""

    def check_inputs(self, inputs: Any, given: Mapping[str, Any]) -> None:
        """Check what `generate(inputs, **given)` is to read.

        Raises:
            Refused: an input that the model does not take, or of another form than it reads as meant.
        """

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` to the same effect: with the encoder's output where a faster pass gives it, without
        inputs that change nothing."""

    def prompts_of(self, input_ids: Tensor, given: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
        """The prompts of a call's rows, without padding.

        Args:
            input_ids: (rows, length), as `generate` hands them to a decode loop.
            given: the model inputs that it hands over besides.
            sources: (batch, length) token ids of the sources, with padding, where they are text; one may stand for
                several rows in a row.

        Raises:
            Refused: a prompt or a source is empty or padded where the model would read the padding, or the model was
                given an input that is not supported.
        """

    def prompts(self, rows: Sequence[Row], width: int) -> list[Prompt]:
        """Prompts for rows of another target, as a draft model reads them: all their tokens so far.

        Args:
            width: tokens that sources are padded to; it has no meaning where none are read.
        """

    def prompt(self, ids: Tensor) -> Prompt:
        """A prompt of (length,) token ids to measure passes with, behind a random source where one is read."""

    def reference(self, rows: int, capacity: int) -> Callable[[Row], Tensor]:
        """The plain decoding that a guarantee names: (V,) logits of a row's next token as `model.generate` has them.

        Raises:
            NoRoom: a second cache of so many rows and positions does not fit in memory.
        """

    # ---------------------------------------------------------------- the cache

    def reserve(self, rows: int, capacity: int) -> None:
        """Make a cache of `rows` slots of `capacity` positions each, in the place of the one before.

        Raises:
            NoRoom: it would not fit in the memory that is free.
            Refused: autocast is on, which only the model's own forward follows; nothing was computed yet.
        """

    @property
    def reserved(self) -> tuple[int, int]:
        """Slots of the cache, and positions of each; (0, 0) where there is none."""

    def free(self) -> None:
        """Give the memory of the cache back."""

    def temporary_cache(self, rows: int, capacity: int) -> AbstractContextManager[None]:
        """Within the block, passes run over another cache; the one before comes back with its rows as they were.

        Raises:
            NoRoom, Refused: as `reserve`.
        """

    # ---------------------------------------------------------------- rows and passes

    def admit(self, prompts: Sequence[Prompt]) -> Scores | None:
        """New rows in the next free slots, their prompts committed but for the last token.

        Returns:
            As `prefill`; None where nothing had to be read, so that the rows take part in the next `score` at once.
        """

    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        """The same by a pass, whether it has to be or not: logits (rows, 1, V) of the prompts' last tokens."""

    def score(self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None) -> Scores:
        """One pass: logits (rows, width, V) at every node of one tree per slot in use. A GPU may still be at it when
        this returns; see `wait`.

        Without a view the whole model reads the committed KV, and scratch is dropped. Under a view the pass reads the
        scratch as well, behind the committed KV, and writes behind both.

        Args:
            slots: under a view, those that the trees are of, in increasing order; all that are in use by default.

        Raises:
            Refused: the model cannot run under the view (see `check_view`), the view runs a layer of which another
                view has left no scratch, or no more scratch fits in the cache; nothing was computed.
        """

    def check_view(self, view: View) -> None:
        """Raises Refused, in one sentence, where passes of this model cannot be made under a view."""

    def advance(self, view: View, paths: Sequence[Sequence[int]], slots: Sequence[int] | None = None) -> None:
        """Keep a path of each tree that was just scored under a view as scratch, which the view's next pass reads.

        Args:
            paths: node indices from the root on; none for a row whose scratch does not grow.
            slots: as in `score`.
        """

    def rewind(self) -> None:
        """Drop the scratch of views; also done by every pass of the whole model, and where rows come, leave or are
        cropped."""

    def wait(self) -> None:
        """Until the device has finished all passes."""

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        """Make the KV of a path of each slot's latest tree permanent, for the slots from `first` on.

        Args:
            paths: nodes from the root on, by slot; what else the pass wrote of these slots is forgotten.
        """

    def crop(self, slot: int, length: int) -> None:
        """Forget the KV of a slot from `length` committed tokens on."""

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use moves into it."""
