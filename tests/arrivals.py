"""The arrivals net: requests are admitted and aborted while others run; each must have its text alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import seq2seq_models
from models import RECURRENT, TYPES, ragged, tiny
from nets import EVERY, drafter
from truedraft import reading
from truedraft.continuous import ContinuousEngine
from truedraft.engine_request import EngineRequest
from truedraft.runtime.forward import SPANS
from vocabularies import tokenized

ROWS, LONGEST, END = 3, 48, 5
MOST = 14  # new tokens of a request
DECODERS = [name for name in EVERY if name not in ("oracle", "probes", "taps")] + ["auto"]
OTHERS = ["bart", "whisper", "glm_moe_dsa"]  # with positions from a table, by index; with keys of indexers
COUNTED = ["bloom", "falcon_alibi", "mpt", "gpt_neo"]  # their own forward counts keys by index, not by position
TINIEST = np.finfo(np.float32).tiny


def model(kind: str = "decoder") -> PreTrainedModel:
    """A decoder, an encoder-decoder, or a model of a given architecture."""
    if kind == "encoder-decoder":
        return seq2seq_models.model()
    return tiny("llama" if kind == "decoder" else kind, torch.float32)


@cache
def prompts(kind: str = "decoder") -> list[tuple[int, ...]]:
    """Six prompts of different lengths; for an encoder-decoder sources, of which the third is the longest."""
    if kind == "encoder-decoder":
        generator = torch.Generator().manual_seed(4)
        lengths = (4, 9, 31, 2, 17, 12)
        return [tuple(torch.randint(3, 300, (n,), generator=generator).tolist()) for n in lengths]
    inputs = ragged(model(), 6, seed=2)
    lines = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [tuple(ids[seen.bool()].tolist()) for ids, seen in lines]


@cache
def plain_logits(prompt: tuple[int, ...], emitted: tuple[int, ...], kind: str = "decoder") -> torch.Tensor:
    """(V,) logits of the next token by a plain forward over the whole prefix."""
    with torch.no_grad():
        if kind != "encoder-decoder":
            return model(kind)(torch.tensor([[*prompt, *emitted]]), use_cache=False).logits[0, -1]
        decoder_ids = [model(kind).config.decoder_start_token_id, *emitted]
        ids, text = torch.tensor([prompt]), torch.tensor([decoder_ids])
        return model(kind)(ids, decoder_input_ids=text, use_cache=False).logits[0, -1]


@cache
def greedy_alone(prompt: tuple[int, ...], kind: str) -> list[int]:
    """The output of `model.generate` with the largest limit of all requests; a smaller one cuts it."""
    out = model(kind).generate(
        torch.tensor([prompt]), max_new_tokens=MOST, do_sample=False, eos_token_id=END, pad_token_id=0
    )
    return out[0, 1 if kind == "encoder-decoder" else len(prompt) :].tolist()  # type: ignore[no-any-return]


def decoded_alone(prompt: tuple[int, ...], steps: int, seed: int | None, kind: str = "decoder") -> list[int]:
    """Plain decoding of one prompt: by `model.generate`, or with a seed by forwards and noise by position."""
    if seed is None:
        assert steps <= MOST
        return greedy_alone(prompt, kind)[:steps]
    emitted: list[int] = []
    while len(emitted) < steps and END not in emitted:
        law = plain_logits(prompt, tuple(emitted), kind).softmax(-1)
        bits = np.random.Philox(key=(seed, 0), counter=[0, len(emitted), 0, 0])
        noise = np.random.Generator(bits).standard_exponential(len(law), dtype=np.float32)
        emitted.append(int((law / torch.from_numpy(np.maximum(noise, TINIEST))).argmax()))
    return emitted


def added(
    engine: ContinuousEngine, which: int, steps: int, seed: int | None, draft: Any, **other: Any
) -> EngineRequest:
    sampling = {"do_sample": False} if seed is None else {"do_sample": True, "top_k": 0, "seed": seed}
    ids = torch.tensor(prompts(kind_of(engine))[which])
    return engine.add_request(
        ids, draft=draft, max_new_tokens=steps, eos_token_id=END, pad_token_id=0, **sampling, **other
    )


@contextmanager
def pieces_of(positions: int | None) -> Iterator[None]:
    """Prompts are read in pieces of so many positions (those of the model's own forward end at multiples of 4), and
    wait for any prefix of an older one."""
    with pytest.MonkeyPatch.context() as patch:
        if positions is not None:
            patch.setattr(reading, "LEAST", positions)
            patch.setattr(reading, "PROMPT", positions)
            patch.setattr(reading, "GAIN", 1)
            patch.setitem(SPANS, "cpu", 4)
        yield


def kind_of(engine: ContinuousEngine) -> str:
    of = engine.model.config.model_type
    kinds = (
        kind for kind in (*RECURRENT, *COUNTED, *OTHERS) if TYPES.get(kind, kind) == of and model(kind) is engine.model
    )
    return next(kinds, engine._target.family)


def check(request: EngineRequest, which: int, steps: int, seed: int | None, kind: str = "decoder") -> None:
    """The request's text equals that of plain decoding; of an aborted or failed one, it is a prefix of it."""
    expected = decoded_alone(prompts(kind)[which], steps, seed, kind)
    if request.finish_reason in ("abort", "error"):
        assert request.tokens == expected[: len(request.tokens)]
    else:
        assert request.tokens == request.result() == expected
        assert request.finish_reason == ("stop" if END in expected else "length")


def check_logits(engine: ContinuousEngine) -> None:
    """Check at every pass that the logits at each root are those of a plain forward over the row's tokens."""
    inner: Any = engine._engine
    decide, kind = inner._decide, kind_of(engine)

    def checked(request: Any, rows: Any, trees: Any, scores: Any) -> Any:
        for row, logits in zip(rows, scores.logits[:, 0], strict=True):
            prompt = row.source or tuple(row.tokens[: row.prompt])
            plain = plain_logits(prompt, tuple(row.tokens[row.prompt :]), kind)
            assert (logits - plain).abs().max() < 1e-4 * plain.std(), f"wrong logits after {row.tokens}"
        return decide(request, rows, trees, scores)

    inner._decide = checked


def state_left(part: Any) -> list[Any]:
    """The state of rows that a drafter or control still has."""
    held = [getattr(part, name, None) for name in ("_states", "_rows", "_emitted", "_cache", "_running")]
    held += getattr(part, "_read", [])
    held += [
        calibration._rows
        for calibration in [getattr(part, "_calibration", None), *getattr(part, "_calibrations", {}).values()]
        if calibration
    ]
    for reader in [getattr(part, "_reader", None), *getattr(part, "_readers", ())]:
        held += [getattr(reader, name, None) for name in ("slot_rows", "written", "_confirmed", "_unread", "_branches")]
        held += [getattr(getattr(reader, "_hosted", None), "cache", None), getattr(reader, "_cache", None)]
    held += [getattr(getattr(part, "_below", None), "_begun", None)]
    for inner in [*getattr(part, "parts", ()), *filter(None, [getattr(part, "_bottom", None)])]:
        held += state_left(inner)
    return [kept for kept in held if kept]


def check_nothing_left(engine: ContinuousEngine, drafts: Iterable[Any]) -> None:
    """No row is left in the cache, in a slot or in a drafter."""
    inner: Any = engine._engine
    cache: Any = engine._target.cache
    assert cache.lengths == inner.rows == [] and not cache.cursor.reading and getattr(cache, "counts", []) == []
    assert not getattr(cache, "_rows", {})
    assert engine.room() == engine.max_rows
    for draft in drafts:
        assert not state_left(draft), "a row was left in a drafter"


def run_events(
    names: list[str],
    events: list[tuple[int, int, int]],
    kind: str = "decoder",
    runtime: str = "auto",
    piece: int | None = None,
    prefix_bytes: int = 0,
) -> int:
    """Add (0 to 3), step (4 to 8) and abort (9) by `events`, (kind, which, size); returns the number of events.

    piece: positions of the pieces in which prompts are read.
    """
    drafts: dict[str, Any] = {name: name if name == "auto" else drafter(name, model(kind)) for name in set(names)}
    fast = tokenized(model(kind), draft=None, runtime=runtime)
    requests: list[tuple[EngineRequest, int, int, int | None]] = []
    with pieces_of(piece), fast.engine(max_rows=ROWS, max_tokens=LONGEST, prefix_bytes=prefix_bytes) as engine:
        check_logits(engine)
        for kind_of_event, which, size in events:
            if kind_of_event < 4:
                seed = None if kind_of_event < 2 else size
                requests.append(
                    (added(engine, which, size, seed, drafts[names[len(requests) % len(names)]]), which, size, seed)
                )
            elif kind_of_event < 9:
                engine.step()
            elif requests:
                engine.abort_request(requests[which % len(requests)][0])
        while engine.has_unfinished_requests():
            engine.step()
        check_nothing_left(engine, drafts.values())
    for request in requests:
        assert request[0].finished
        if request[0].error is not None:
            raise request[0].error
        check(*request, kind)
    return len(events)
