"""Logits -> law (processed scores), by the processors that `transformers` built, each node on its own prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from truedraft.logprobs import Logprobs
from truedraft.tree import Row

# Read the scores alone: one call processes rows of different lengths.
POINTWISE = {
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
}
# Read the row's own prefix and keep no state between calls.
ROWWISE = POINTWISE | {
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensLogitsProcessor,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
}


class RowwiseProcessor(LogitsProcessor):
    """A logits processor whose scores of a row are a function of that row's ids and scores alone.

    Derive from it to declare so: it may keep state between calls as long as no score depends on it (a cache, a parser
    that follows the prefix), and must not write to its arguments. Rows with such processors do not advance in lockstep,
    every rule supports them, and drafts are processed by them too. It is called for any rows of the batch, at any
    prefixes, in any order, as often as needed: also for drafts that are never emitted, which it may itself forbid.
    """

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        """(k, V) scores of the next token of k rows, on the device of `scores`.

        input_ids: (k, length) left padding of a batch, prompt, emitted tokens, drafted tokens.
        scores: (k, V) fp32.
        """
        raise NotImplementedError

    def forced(self, ids: list[int]) -> list[int]:
        """Tokens that have to follow a row's ids, for drafts; none where the processor cannot tell.

        ids: (length,) as those of a row in a call.
        """
        return []


def _by_row(kind: type) -> bool:
    """Whether processors of this class read the row's own prefix and keep no state between calls."""
    return kind in ROWWISE or issubclass(kind, RowwiseProcessor)


def _for_rows(processor: LogitsProcessor, places: list[int]) -> LogitsProcessor:
    """A processor of the whole batch, restricted to some of its rows."""
    if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), Tensor):
        return lp.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[places])  # type: ignore[attr-defined]
    if isinstance(processor, lp.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return lp.PrefixConstrainedLogitsProcessor(lambda i, ids: allowed(places[i], ids), 1)
    return processor


def _applied(processors: Sequence[LogitsProcessor], places: list[int], ids: Tensor, raw: Tensor) -> Tensor:
    """(k, V) scores by processors of `_by_row`, which a `LogitsProcessorList` would inspect at every call.

    places: indices in the batch of the k rows.
    ids, raw: (k, length) and (k, V), the latter a copy.
    """
    for processor in processors:
        raw = _for_rows(processor, places)(ids, raw)
    return raw


def _alike(rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """The places of rows and drafts behind them, by the length of both together."""
    groups: dict[int, list[int]] = {}
    for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        groups.setdefault(row.step + len(draft), []).append(i)
    return groups.values()


class History:
    """`input_ids` of `model.generate` at any step: left padding, prompt, emitted tokens, padding.

    Rows hold their tokens; the tensor is updated when a processor or a criterion needs it.

    Args:
        prompt: (batch, length) the caller's ids, padding included; length 0 where the prompt is embeddings.
        steps: limit of new tokens.
        pad: written after rows that have ended.
        rows: all rows of the batch, in its order.
    """

    def __init__(self, prompt: Tensor, steps: int, pad: int, rows: Sequence[Row]):
        self.length, self.pad, self.rows = prompt.shape[1], pad, rows
        self.ids = torch.nn.functional.pad(prompt.long(), (0, steps), value=pad)
        self.written = [0] * len(rows)  # steps of each row that are in the tensor

    def _catch_up(self, rows: Sequence[Row]) -> None:
        for row in rows:
            first = self.written[row.index]
            if first < row.step:
                new = torch.tensor(row.tokens[row.prompt + first :], device=self.ids.device)
                self.ids[row.index, self.length + first : self.length + row.step] = new
            elif first > row.step:  # tokens were removed
                self.ids[row.index, self.length + row.step : self.length + first] = self.pad
            self.written[row.index] = row.step

    def prefix(self, rows: Sequence[Row]) -> Tensor:
        """(k, length) ids of rows at the same step."""
        self._catch_up(rows)
        end = self.length + rows[0].step
        if len(rows) == 1:
            return self.ids[rows[0].index : rows[0].index + 1, :end]
        return self.ids[[row.index for row in rows], :end]

    def batch(self, step: int) -> Tensor:
        """(batch, length) ids of the whole batch at a step."""
        self._catch_up(self.rows)
        return self.ids[:, : self.length + step].contiguous()

    def column(self, step: int) -> Tensor:
        """(batch,) ids that the rows emitted at a step."""
        self._catch_up(self.rows)
        return self.ids[:, self.length + step]


class Laws:
    """Processed next-token scores of the nodes that the walk visits, kept where the caller requests them.

    lockstep: rows advance together, ended ones with padding, and every call is that of plain generate: the whole batch,
        once per step. Required where a processor may couple rows or count its calls, and where the scores of a batch
        are returned, which `transformers` computes for ended rows too.
    rowwise: the processors that apply to drafts too.
    logprobs: receives the raw logits of every emitted token of a batch of one row.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        history: History,
        keep_scores: bool = False,
        keep_logits: bool = False,
        logprobs: Logprobs | None = None,
    ):
        self.processors = processors
        self.rowwise = [p for p in processors if _by_row(type(p))]
        self.history = history
        self.logprobs = logprobs
        self.keeps = bool(keep_scores or keep_logits or logprobs)
        kinds = {type(p) for p in processors}
        batch = history.ids.shape[0]
        unknown = {kind for kind in kinds if not _by_row(kind)}
        self.lockstep = bool(unknown) or (batch > 1 and self.keeps)
        self.pointwise = not kinds - POINTWISE
        self.apart = self.pointwise and not self.keeps  # laws depend on their logits alone
        self.raw = self.apart and not kinds
        self.drafts_pointwise = not kinds - POINTWISE - unknown  # those of `of_drafts` read the scores alone
        self.unknown_processors = sorted(k.__name__ for k in unknown)
        # one (batch, V) tensor per step: where they are kept, every call is for the whole batch
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None

    def __call__(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """(k, V) scores after every processor, for the next token of each row.

        logits: (k, V) raw logits of the rows' current nodes; not written to.
        """
        raw = logits.to(torch.float32)
        scores = self._process(rows, raw) if self.processors else raw
        for kept, values in ((self.scores, scores), (self.logits, raw)):
            if kept is not None:
                kept.append(values.clone())
        if self.logprobs is not None:
            self.logprobs.add(raw[0])
        return scores

    @property
    def gain(self) -> float:
        """Largest factor of an error of the logits in the scores, by temperature and repetition penalty."""
        gain = 1.0
        for p in self.processors:
            penalty = float(getattr(p, "penalty", 1.0))
            gain *= max(penalty, 1 / penalty) / float(getattr(p, "temperature", 1.0))
        return gain

    def again(self, row: Row, logits: Tensor) -> Tensor:
        """(1, V) scores of a row's next token from other logits (1, V); they replace those kept.

        For processors that neither count their calls nor look across rows.
        """
        raw = logits.to(torch.float32)
        scores = self._apart([row], raw) if self.processors else raw
        for kept, values in ((self.scores, scores), (self.logits, raw)):
            if kept is not None:
                kept[-1][row.index] = values[0]
        if self.logprobs is not None:
            self.logprobs.add(raw[0])
        return scores

    def of_drafts(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(k, V) scores of a drafter after each row's prefix and draft, one draft per row.

        The processors are the target's, without those that may count their calls or look across rows. Where one of
        them raises, the scores are the raw ones: the target may never reach such a draft, and raises where it does.

        logits: (k, V) raw, not written to; where `drafts_pointwise`, those of some tokens suffice.
        """
        raw = logits.to(torch.float32)
        if self.drafts_pointwise:
            return self._everywhere(self.rowwise, raw) if self.rowwise else raw
        scores = raw.clone()
        for at in _alike(rows, drafts):
            try:
                scores[at] = self._after(rows, drafts, at, raw)
            except Exception:  # at one of these drafts, or more
                for i in at:
                    with suppress(Exception):
                        scores[i] = self._after(rows, drafts, [i], raw)[0]
        return scores

    def of_nodes(self, row: Row, drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(k, V) scores of the target after a row's prefix and each of k drafts. logits: (k, V) raw, not written to."""
        raw = logits.to(torch.float32)
        if self.drafts_pointwise:
            return self._everywhere(self.rowwise, raw) if self.rowwise else raw
        scores, rows = torch.empty_like(raw), [row] * len(drafts)
        for at in _alike(rows, drafts):
            scores[at] = self._after(rows, drafts, at, raw)
        return scores

    def _after(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], at: Sequence[int], raw: Tensor) -> Tensor:
        """(places, V) scores after the prefixes and drafts at some places, of one length together, by the processors
        that read these alone."""
        ids = [
            torch.cat(
                [
                    self.history.prefix([rows[i]])[0],
                    torch.tensor(drafts[i], dtype=torch.long, device=self.history.ids.device),
                ]
            )
            for i in at
        ]
        return _applied(self.rowwise, [rows[i].index for i in at], torch.stack(ids), raw[at])

    def everywhere(self, logits: Tensor) -> Tensor:
        """(rows, nodes, V) scores at every node, where laws are `apart`. logits: of that shape, raw; not written to."""
        return self._process((), logits.flatten(0, 1).to(torch.float32)).unflatten(0, logits.shape[:2])

    def _everywhere(self, processors: Sequence[LogitsProcessor], raw: Tensor) -> Tensor:
        """The scores by processors that read them alone."""
        scores, ids = raw.clone(), self.history.ids[:1, :0].expand(len(raw), 0)
        for processor in processors:
            scores = processor(ids, scores)
        return scores

    def _process(self, rows: Sequence[Row], raw: Tensor) -> Tensor:
        if self.lockstep:
            return self.processors(self.history.batch(rows[0].step), raw.clone())  # type: ignore[arg-type]
        return self._apart(rows, raw)

    def _apart(self, rows: Sequence[Row], raw: Tensor) -> Tensor:
        """The scores where no processor looks across rows."""
        if self.pointwise:
            return self._everywhere(self.processors, raw)
        scores = torch.empty_like(raw)
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(row.step, []).append(i)
        for places in groups.values():
            group = [rows[i] for i in places]
            indices = [row.index for row in group]
            scores[places] = _applied(self.processors, indices, self.history.prefix(group), raw[places])
        return scores
