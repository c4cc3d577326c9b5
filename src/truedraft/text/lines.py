"""Rewriting lines of text with an encoder-decoder, in batches of similar lengths, in order, one line out for each in.

White space at the ends of a line, its line end included, and tabs and other breaks within it are kept as they are; the
text between them is rewritten, whole or sentence by sentence. Nothing is lost: text that cannot be rewritten is left as
it is, and counted with its reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from truedraft.accelerated import Accelerated
from truedraft.errors import NoRoom, Refused
from truedraft.stats import Report
from truedraft.text import sentences

BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
FIELD = re.compile(f"([{BREAKS}]+)")
SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + "\ufeff"  # a byte order mark too
SPACES = str.maketrans(dict.fromkeys(BREAKS, " "))
ESCAPED = re.compile("[\ud800-\udfff]")  # bytes that are no text, as `surrogateescape` writes them
FIRST, MOST = 2, 32  # batches read ahead and sorted: at first, so that output begins soon, and at most
READ_AHEAD = 10_000, 1 << 20  # lines and characters, at most
NAMED = 10  # lines that a note names
REQUIRED = dict(  # settings that a model's generation_config may have and lines do not support
    do_sample=False, num_beams=1, num_beam_groups=1, num_return_sequences=1, use_cache=True,
    return_dict_in_generate=False, output_attentions=False, output_hidden_states=False,
)  # fmt: skip
MORE, TIMES = 32, 2  # new tokens of a piece, at most: MORE + TIMES * its own tokens


@dataclass(frozen=True)
class RewrittenLine:
    """A line before and after: the same except for the pieces that were rewritten.

    number: from 1.
    parts: its parts in order, (before, after) each.
    """

    number: int
    parts: tuple[tuple[str, str], ...]

    @property
    def source(self) -> str:
        return "".join(before for before, _ in self.parts)

    @property
    def text(self) -> str:
        return "".join(after for _, after in self.parts)


@dataclass
class Noted:
    """Text that was not rewritten as requested: how often, and a few of the line numbers."""

    count: int = 0
    lines: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The first line where the output is not that of `model.generate`."""

    line: int
    expected: str
    got: str


@dataclass
class Tally:
    """Counts and times so far.

    lines, changed: lines read, and lines whose text changed.
    pieces: inputs of the model.
    passes, row_passes, tokens: see `Report`, of all calls together.
    seconds: in `generate`, measuring the machine left out; plain_seconds: in `model.generate`, where that was compared.
    notes: reason -> text that was left as it is or cut.
    differs: the first difference from `model.generate`; None where there was none, or nothing was compared.
    report: of the last call, for the names of drafter, rule and control.
    """

    lines: int = 0
    changed: int = 0
    pieces: int = 0
    passes: int = 0
    row_passes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    notes: dict[str, Noted] = field(default_factory=dict)
    differs: Difference | None = None
    report: Report | None = None

    def note(self, line: int, why: str) -> None:
        noted = self.notes.setdefault(why, Noted())
        noted.count += 1
        if len(noted.lines) < NAMED and line not in noted.lines:
            noted.lines.append(line)

    def take(self, report: Report, seconds: float) -> None:
        """Add the figures of a call of `generate`."""
        self.report = report
        self.passes += len(report.passes)
        self.row_passes += report.row_passes
        self.tokens += report.tokens
        self.seconds += seconds - report.seconds.get("measure", 0.0)


@dataclass
class _Piece:
    """Text for the model, and its rewritten form; `ids` are its tokens, `room` is the limit of new tokens."""

    line: int
    source: str
    text: str
    ids: list[int] = field(default_factory=list)
    room: int = 0


@dataclass
class Rewriter:
    """Lines rewritten by an encoder-decoder, greedily.

    fast: the accelerated model, with its tokenizer.
    batch: pieces of a call.
    split: pass sentences to the model, not lines.
    careful: keep a piece as it is where the output is empty or does not end, or the model cannot read all of it;
        otherwise such a piece becomes the output.
    prefix: put before every piece, for models that need the name of their task.
    max_new_tokens: of a piece; by default twice its tokens and 32, within the model's positions.
    settings: more arguments of `generate`.
    check: compare every call with `model.generate`.
    progress: called after every call with the lines done, those of the batches under way by their share.
    tally: counts and times so far.

    Raises:
        Refused: the model is no encoder-decoder, there is no tokenizer, or a number is out of range.
    """

    fast: Accelerated
    batch: int = 16
    split: bool = False
    careful: bool = False
    prefix: str = ""
    max_new_tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False
    progress: Callable[[int], None] = lambda _: None
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        model, tokenizer = self.fast.model, self.fast.tokenizer
        if not self.fast.target.reads_sources:
            raise Refused(f"{type(model).__name__} is no encoder-decoder: lines are rewritten by models with sources")
        if tokenizer is None:
            raise Refused("there is no tokenizer: give accelerate() the model's")
        if self.batch < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise Refused(f"batch={self.batch} and max_new_tokens={self.max_new_tokens} must be at least 1")
        positions = self.fast.target.hard_limit
        if positions is not None and self.max_new_tokens is not None and self.max_new_tokens >= positions:
            raise Refused(
                f"max_new_tokens={self.max_new_tokens}: the model has {positions} positions: at most {positions - 1} "
                "tokens can follow its first"
            )
        self._tokenizer: Any = tokenizer
        limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
        self.longest = min((n for n in limits if n and n < 1 << 30), default=None)  # tokens of a piece
        ends: Any = model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        forced = model.generation_config.forced_eos_token_id
        self._spare = 0 if forced is None else 1  # after a forced end token it is unknown whether the text had ended
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else model.config.pad_token_id
        self._pad = int(pad or 0)
        self._vocabulary = self.fast.target.vocabulary
        self._split = not any(token in self.prefix for token in tokenizer.all_special_tokens)
        self._unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in (*self._ends, pad) else None

    def run(self, lines: Iterable[str]) -> Iterator[RewrittenLine]:
        """Each line rewritten, in order; lines may include their line ends, which are kept.

        Lines with undecodable bytes (`errors="surrogateescape"`) are left as they are.

        Raises:
            KeyboardInterrupt: Ctrl-C; every line yielded before is complete.
        """
        waiting: list[tuple[int, list[str | _Piece]]] = []
        pieces, size, most = 0, 0, FIRST * self.batch
        for number, text in enumerate(lines, 1):
            parts = self._parts(number, text)
            waiting.append((number, parts))
            pieces += sum(isinstance(part, _Piece) for part in parts)
            size += len(text)
            if pieces >= most or len(waiting) >= READ_AHEAD[0] or size >= READ_AHEAD[1]:
                yield from self._rewritten(waiting)
                waiting, pieces, size, most = [], 0, 0, min(2 * most, MOST * self.batch)
        yield from self._rewritten(waiting)

    def _parts(self, number: int, text: str) -> list[str | _Piece]:
        """The parts of a line: pieces for the model, and the text kept between them."""
        if ESCAPED.search(text):
            self.tally.note(number, "left as it is: not UTF-8")
            return [text]
        parts: list[str | _Piece] = []
        for i, part in enumerate(FIELD.split(text)):
            if i % 2 or not (core := part.strip(SPACE)):
                parts.append(part)
                continue
            first = len(part) - len(part.lstrip(SPACE))
            parts.append(part[:first])
            for k, piece in enumerate(sentences.split(core) if self.split else [core]):
                rewritable = k % 2 == 0 and any(map(str.isalpha, piece))
                parts.append(_Piece(number, piece, piece) if rewritable else piece)
            parts.append(part[first + len(core) :])
        return [part for part in parts if part]

    def _rewritten(self, waiting: Sequence[tuple[int, list[str | _Piece]]]) -> Iterator[RewrittenLine]:
        pieces = [part for _, parts in waiting for part in parts if isinstance(part, _Piece)]
        todo = sorted(self._readable(pieces), key=lambda piece: len(piece.ids))
        batches, done = [todo[at : at + self.batch] for at in range(0, len(todo), self.batch)], 0
        while batches:
            batch = batches.pop(0)
            try:
                self._rewrite(batch)
            except (NoRoom, torch.OutOfMemoryError):
                if len(batch) > 1:
                    batches[:0] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
                    continue
                if not self.careful:
                    raise
                self.tally.note(batch[0].line, "left as it is: too long for the memory that is free")
            done += len(batch)
            self.progress(self.tally.lines + len(waiting) * done // len(todo))
        for number, parts in waiting:
            line = RewrittenLine(number, tuple((p.source, p.text) if isinstance(p, _Piece) else (p, p) for p in parts))
            self.tally.lines += 1
            self.tally.changed += line.text != line.source
            yield line
        self.progress(self.tally.lines)

    def _readable(self, pieces: Sequence[_Piece]) -> Iterator[_Piece]:
        """The pieces that the model can read, with their tokens; the others are noted in the tally."""
        if not pieces:
            return
        positions = self.fast.target.hard_limit
        texts = self._ids([self.prefix + piece.source for piece in pieces])
        for piece, ids in zip(pieces, texts, strict=True):
            if self.longest is not None and len(ids) > self.longest:
                self.tally.note(
                    piece.line, f"left as it is: longer than the {self.longest} tokens that the model reads"
                )
            elif self.careful and self._unknown in ids:
                self.tally.note(piece.line, "left as it is: the tokenizer has no tokens for some of its characters")
            elif max(ids, default=0) >= self._vocabulary:
                self.tally.note(piece.line, "left as it is: the model's vocabulary lacks some of its tokens")
            else:
                room = self.max_new_tokens or TIMES * len(ids) + MORE
                piece.ids, piece.room = ids, room if positions is None else min(room, positions - 1)
                yield piece

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts; the text of a special token is plain text there, unless the prefix contains one."""
        return self._tokenizer(texts, split_special_tokens=self._split)["input_ids"]

    def _rewrite(self, pieces: Sequence[_Piece]) -> None:
        """Rewrite a batch of pieces by one call of `generate`."""
        rows = [torch.tensor(piece.ids) for piece in pieces]
        device = self.fast.model.device
        inputs: dict[str, Any] = {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=self._pad).to(device),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device),
        }
        settings = {**REQUIRED, "max_new_tokens": max(piece.room for piece in pieces), **self.settings}
        start = time.perf_counter()
        out = self.fast.generate(**inputs, **settings).cpu()
        self.tally.take(self.fast.report(), time.perf_counter() - start)
        self.tally.pieces += len(pieces)
        for piece, ids in zip(pieces, out[:, 1:].tolist(), strict=True):
            piece.text = self._text(piece, ids)
        if self.check:
            self._compare(pieces, inputs, settings, out)

    def _text(self, piece: _Piece, ids: list[int]) -> str:
        """The new text of a piece whose output is `ids`."""
        ids = ids[: piece.room - self._spare]
        end = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if end is None:
            what = "left as it is" if self.careful else "cut"
            self.tally.note(piece.line, f"{what}: the output had not ended at the limit of new tokens")
            if self.careful:
                return piece.source
        skipped = ids[:1] == [self.settings.get("forced_bos_token_id")]  # the language, no special token of M2M100
        text = self._decoded(ids[skipped:end])
        if not text:
            what = "left as it is" if self.careful else "empty"
            self.tally.note(piece.line, f"{what}: the model generated nothing")
        if not self.careful:
            return text
        read = self._decoded(self._ids([piece.source])[0])  # some tokenizers do not keep every character
        same = text.split() in (read.split(), piece.source.split())
        return piece.source if same or not text else text

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).translate(SPACES).strip()

    def _compare(self, pieces: Sequence[_Piece], inputs: dict[str, Any], settings: dict[str, Any], out: Tensor) -> None:
        generate: Any = self.fast.model.generate
        start = time.perf_counter()
        plain = generate(**inputs, **settings, tokenizer=self._tokenizer).cpu()
        self.tally.plain_seconds += time.perf_counter() - start
        for piece, expected, got in zip(pieces, plain.tolist(), out.tolist(), strict=True):
            if expected != got and (self.tally.differs is None or piece.line < self.tally.differs.line):
                self.tally.differs = Difference(piece.line, self._decoded(expected), self._decoded(got))
