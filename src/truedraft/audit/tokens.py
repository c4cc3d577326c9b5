"""Token audit: compares the emitted tokens with those of `model.generate`, and classifies every difference.

The oracle is `model.generate` itself. Every drafter is run on the same prompts, greedily and under the same seed, alone
and in batches with rows of different lengths; plain decoding through the engine is one of them. At a row's first
difference the position is scored again in higher precision, and the divergence is classified:

    tie       the two best are closer than the numerical noise of this model, dtype and machine, which is measured:
              the largest difference between the logits of `model.generate` and the precise ones, wherever both agree
    numerics  they are not, but both sides' rows of logits are the model's, and their errors together explain it
    bug       the engine's row of logits is not the model's, or the errors do not explain the choice

A row of logits of the engine that is not the model's is a bug even where the token is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from truedraft.accelerated import Accelerated
from truedraft.audit.precise import Precise
from truedraft.audit.tracer import Tracer
from truedraft.targets.kinds import reads_sources

DivergenceKind = Literal["tie", "numerics", "bug"]
FAR = 16  # largest error of the engine's logits, in units of the noise of the model's own


@dataclass(frozen=True)
class Mode:
    """How tokens are chosen: greedily, or sampled at a temperature under a seed; repetition penalized or not."""

    sample: bool
    seed: int = 0
    temperature: float = 1.0
    penalty: float = 1.0

    def __str__(self) -> str:
        how = f"seed {self.seed}, temperature {self.temperature:g}" if self.sample else "greedy"
        return how if self.penalty == 1 else f"{how}, repetition penalty {self.penalty:g}"


MODES = (Mode(False), Mode(True), Mode(False, penalty=1.2))


@dataclass(frozen=True)
class Divergence:
    """The first difference of a row.

    position: of the token among the new ones, from 0.
    expected, got: the tokens of the model and of the engine there; -1 where a side had ended.
    gap: difference of their deciding scores in higher precision; None where a side had ended.
    noise: largest error of such scores of the model itself.
    row_error: error of the engine's logits there.
    """

    drafter: str
    mode: str
    batch: int
    prompt: int
    position: int
    expected: int
    got: int
    gap: float | None
    noise: float
    row_error: float
    kind: DivergenceKind


Progress = Callable[[str, float], None]  # called with what runs next, and the share of the work that is done, 0 to 1


@dataclass
class Compared:
    """What was compared of one way of decoding, over all modes and batch sizes.

    texts: that were compared whole, or up to their first difference. tokens: of these.
    """

    drafter: str
    texts: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Run:
    """A batch of prompts under one mode, which the model decodes alone, and then every side.

    batch: the size that was requested; the last batch may have fewer texts.
    start: the number of its first prompt, from 0.
    done: the share of the audit that is done before it. step: the share that one of its ways of decoding is.
    """

    mode: Mode
    batch: int
    start: int
    texts: list[str]
    done: float
    step: float

    def show(self, progress: Progress, number: int, way: str) -> None:
        """Report that its way of this number begins."""
        first, last = self.start + 1, self.start + len(self.texts)
        which = f"prompt {first}" if first == last else f"prompts {first} to {last}"
        progress(f"{self.mode}, {which}: {way}", self.done + number * self.step)


def runs_of(prompts: Sequence[str], batches: Sequence[int], modes: Sequence[Mode], sides: int) -> list[Run]:
    """The runs of an audit of this many sides, in their order."""
    places = [(mode, size, at) for mode in modes for size in batches for at in range(0, len(prompts), size)]
    step = 1 / (max(len(places), 1) * (1 + sides))
    return [
        Run(mode, size, at, list(prompts[at : at + size]), i / len(places), step)
        for i, (mode, size, at) in enumerate(places)
    ]


@dataclass
class Audit:
    """The result of an audit.

    drafters: the ways of decoding that were to be compared; compared: what was, of each that was reached.
    modes, batches: of what was compared.
    texts: that were to be compared, over all drafters, modes and batch sizes.
    rows: rows of logits compared.
    noise: largest error of the model's own logits, in `dtype`, against `precise`.
    worst_row: largest error of the engine's logits, in units of that noise, where texts agreed.
    interrupted: whether Ctrl-C ended it before everything requested was compared.
    """

    model: str
    dtype: str
    precise: str
    runtime: str = ""
    drafters: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    prompts: int = 0
    texts: int = 0
    compared: list[Compared] = field(default_factory=list)
    rows: int = 0
    noise: float = 0.0
    worst_row: float = 0.0
    found: list[Divergence] = field(default_factory=list)
    interrupted: bool = False

    @property
    def exact(self) -> bool:
        """Whether numerical error explains every divergence."""
        return not any(d.kind == "bug" for d in self.found)

    @property
    def tokens(self) -> int:
        """Tokens compared, over all drafters, modes and batch sizes."""
        return sum(one.tokens for one in self.compared)

    def of(self, drafter: str | None = None) -> dict[DivergenceKind, int]:
        """The number of divergences by kind, of one drafter or of all."""
        kinds = [d.kind for d in self.found if drafter in (None, d.drafter)]
        return {kind: kinds.count(kind) for kind in ("tie", "numerics", "bug")}

    def count(self, drafter: str, run: Run, tokens: Sequence[int]) -> None:
        """Add texts that were compared, given by their numbers of tokens."""
        if (one := next((one for one in self.compared if one.drafter == drafter), None)) is None:
            self.compared.append(one := Compared(drafter))
        one.texts, one.tokens = one.texts + len(tokens), one.tokens + sum(tokens)
        self.modes += {str(run.mode)}.difference(self.modes)
        self.batches += {run.batch}.difference(self.batches)

    def as_dict(self) -> dict[str, Any]:
        compared = [{**asdict(one), "divergences": self.of(one.drafter)} for one in self.compared]
        return {
            **asdict(self), "tokens": self.tokens, "compared": compared, "divergences": self.of(), "exact": self.exact,
        }  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """The model's own output for a batch, and its logits.

    prompts: (batch, length) as given, padding included; of an encoder-decoder the decoder's prompts.
    ids: (batch, steps) new tokens, padding behind ended rows; lengths: the number of each row's own.
    logits: (batch, steps, V) as `model.generate` computed them.
    precise: row -> (steps, V) in higher precision, on the same prefixes.
    noise: (batch,) largest error of each row's logits.
    """

    prompts: Tensor
    ids: Tensor
    lengths: list[int]
    logits: Tensor
    precise: list[Tensor]
    noise: list[float]


def audit(
    model: PreTrainedModel,
    tokenizer: Any,
    sides: Mapping[str, Accelerated],
    prompts: Sequence[str],
    name: str = "",
    tokens: int = 64,
    batches: Sequence[int] = (1, 4),
    modes: Sequence[Mode] = MODES,
    progress: Progress = lambda *_: None,
) -> Audit:
    """Compare accelerated models with the model itself.

    Args:
        sides: name -> accelerated model to audit; rules must be of guarantee `tokens`.
        prompts: as text; batches are made of them in order.
        tokens: most new tokens per prompt.
        batches: batch sizes.
        modes: how tokens are chosen.
        progress: called before each run.

    Raises:
        KeyboardInterrupt: Ctrl-C; its `finished` is the audit of what was compared before it.
    """
    found = Audit(name, str(model.dtype).removeprefix("torch."), "", prompts=len(prompts), drafters=list(sides))
    found.runtime = next(iter(sides.values())).target.runtime
    runs = runs_of(prompts, batches, modes, len(sides))
    found.texts = len(sides) * sum(len(run.texts) for run in runs)
    with recorded(*sides.values()), finished(found):
        precise = Precise(model)
        found.precise = precise.dtype
        for run in runs:
            run.show(progress, 0, "the model alone")
            settings, mode = _settings(model, run.mode, tokens), run.mode
            inputs = _encoded(tokenizer, run.texts, model.device)
            expected = _expected(model, precise, inputs, settings, mode)
            found.noise = max(found.noise, *expected.noise)
            for number, (drafter, side) in enumerate(sides.items(), 1):
                run.show(progress, number, drafter)
                place = dict(drafter=drafter, mode=str(mode), batch=len(run.texts))
                rows = list(_compared(side, inputs, settings, mode, expected, found))
                found.count(drafter, run, [compared for compared, _ in rows])
                apart = [(run.start + row, one) for row, (_, one) in enumerate(rows) if one]
                found.found += [Divergence(**place, prompt=prompt, **one) for prompt, one in apart]  # type: ignore[arg-type]
    return found


def explain(side: Accelerated, precise: Precise, inputs: dict[str, Any], tokens: int) -> list[DivergenceKind]:
    """The kinds of the first differences from greedy `model.generate`, one for each row that differs."""
    mode, found = Mode(False), Audit("", "", precise.dtype)
    settings = _settings(side.model, mode, tokens)
    expected = _expected(side.model, precise, inputs, settings, mode)
    with recorded(side):
        return [one["kind"] for _, one in _compared(side, inputs, settings, mode, expected, found) if one]


@contextmanager
def recorded(*sides: Accelerated) -> Iterator[None]:
    """Within the block, the drafters are wrapped in tracers."""
    for side in sides:
        side.drafter = Tracer(side.drafter)  # type: ignore[assignment]
    try:
        yield
    finally:
        for side in sides:
            side.drafter = side.drafter.inner  # type: ignore[attr-defined]


@contextmanager
def finished(found: Audit) -> Iterator[None]:
    """Ctrl-C ends the audit; the exception carries what was compared before it as `finished`."""
    try:
        yield
    except KeyboardInterrupt as stop:
        found.interrupted = True
        stop.finished = found  # type: ignore[attr-defined]
        raise


def _encoded(tokenizer: Any, texts: list[str], device: torch.device) -> dict[str, Any]:
    encoded = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, return_token_type_ids=False)
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _settings(model: PreTrainedModel, mode: Mode, tokens: int) -> GenerationConfig:
    """Settings of plain decoding with the model's special tokens."""
    own = model.generation_config
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=mode.sample, eos_token_id=own.eos_token_id, bos_token_id=own.bos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0, use_cache=True,
        decoder_start_token_id=own.decoder_start_token_id, num_beams=1,
    )  # fmt: skip
    if mode.sample:
        config.temperature, config.top_k, config.top_p = mode.temperature, 0, 1.0
    if mode.penalty != 1:
        config.repetition_penalty = mode.penalty
    return config


def _expected(
    model: PreTrainedModel, precise: Precise, inputs: dict[str, Any], settings: GenerationConfig, mode: Mode
) -> Expected:
    torch.manual_seed(mode.seed)
    generate: Any = model.generate
    kept: dict[str, Any] = dict(return_dict_in_generate=True, output_logits=True)
    out = generate(**inputs, generation_config=settings, stop_strings=None, **kept)
    prompts, ids = out.sequences.cpu().split([out.sequences.shape[1] - len(out.logits), len(out.logits)], 1)
    logits = torch.stack(out.logits, 1).float().cpu()
    lengths = [_ended(row.tolist(), settings.eos_token_id) for row in ids]
    scored, noise = [], []
    for row, n in enumerate(lengths):
        read = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].cpu()
        prompt, source = (prompts[row], read) if reads_sources(model.config) else (read, None)
        true = precise(torch.cat([prompt, ids[row, : n - 1]]), len(prompt) - 1, source)
        scored.append(true)
        noise.append(_noise(logits[row, :n], true, model.dtype))
    return Expected(prompts, ids, lengths, logits, scored, noise)


def _ended(row: list[int], eos: int | list[int] | None) -> int:
    """Number of tokens up to the first end token, included."""
    ends = [eos] if isinstance(eos, int) else eos or []
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def _noise(logits: Tensor, true: Tensor, dtype: torch.dtype) -> float:
    """The largest error of a row's logits, and at least that of rounding."""
    finite = true.isfinite() & logits.isfinite()
    rounding = torch.finfo(dtype).eps * float(true[finite].abs().max())
    return max(float((logits.double() - true)[finite].abs().max()), 4 * rounding)


def _compared(
    side: Accelerated,
    inputs: dict[str, Any],
    settings: GenerationConfig,
    mode: Mode,
    expected: Expected,
    found: Audit,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The tokens of each row that are compared, and where it differs the fields of its `Divergence`."""
    torch.manual_seed(mode.seed)
    ids = side.generate(**inputs, generation_config=settings, stop_strings=None)[:, expected.prompts.shape[1] :].cpu()
    tracer: Any = side.drafter
    for row, (n, noise) in enumerate(zip(expected.lengths, expected.noise, strict=True)):
        reference, got = expected.ids[row, :n].tolist(), ids[row].tolist()
        got = got[: _ended(got, settings.eos_token_id)]
        at = next(
            (i for i, (a, b) in enumerate(zip(reference, got, strict=False)) if a != b), min(len(reference), len(got))
        )
        leaked = ids.shape != expected.ids.shape or bool((ids[row, len(got) :] != settings.pad_token_id).any())
        same, compared = at == len(reference) == len(got) and not leaked, min(at + 1, n)
        rows = torch.stack(tracer.logits[row][: min(at + 1, n, len(got))]).double()
        errors = (rows - expected.precise[row][: len(rows)]).nan_to_num(0.0).abs().amax(-1)
        found.rows += len(rows)
        wrong = (errors > FAR * noise).nonzero()
        if not len(wrong):
            found.worst_row = max(found.worst_row, float(errors.max()) / noise)
        if same and not len(wrong):
            yield compared, {}
            continue
        if len(wrong) and int(wrong[0]) < at:  # the row of logits is not the model's, though the token is
            at = int(wrong[0])
        yield compared, _explained(row, at, reference, got, float(errors[min(at, len(errors) - 1)]), mode, expected)


def _explained(
    row: int, at: int, reference: list[int], got: list[int], error: float, mode: Mode, expected: Expected
) -> dict[str, Any]:
    noise = expected.noise[row]
    a, b = (side[at] if at < len(side) else -1 for side in (reference, got))
    facts = dict(position=at, expected=a, got=b, noise=noise, row_error=error)
    if a < 0 or b < 0:
        return {**facts, "gap": None, "kind": "bug"}  # one side ended earlier than the other
    scores, scale = expected.precise[row][at][None], 1.0
    if mode.penalty != 1:
        prefix = torch.cat([expected.prompts[row], expected.ids[row, :at]])[None]
        scores = RepetitionPenaltyLogitsProcessor(mode.penalty)(prefix, scores.clone())
        scale = max(mode.penalty, 1 / mode.penalty)
    if mode.sample:
        draws = noise_of(mode.seed, at, expected.ids.shape[0], expected.logits.shape[-1])[row]
        scores, scale = scores / mode.temperature - draws.double().log(), scale / mode.temperature
    gap = abs(float(scores[0, a] - scores[0, b]))
    own = float((expected.logits[row, at].double() - expected.precise[row][at]).nan_to_num(0.0).abs().max())
    kind: DivergenceKind = "numerics"
    if error > FAR * noise or gap > 2 * scale * (error + own) + 1e-6 * mode.sample:
        kind = "bug"
    elif gap <= 2 * scale * noise:
        kind = "tie"
    return {**facts, "gap": gap, "kind": kind}


def noise_of(seed: int, step: int, rows: int, vocabulary: int) -> Tensor:
    """The noise that `torch.multinomial` divides by at a step of `model.generate`, (rows, V)."""
    torch.manual_seed(seed)
    for _ in range(step + 1):
        block = torch.empty(rows, vocabulary).exponential_(1)
    return block
