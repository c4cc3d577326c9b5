"""The net of arrivals: requests that come and go while others run, each with the text that it has alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import truedraft
from models import ragged, tiny
from nets import EVERY, drafter
from truedraft.continuous import ContinuousEngine, EngineRequest

ROWS, LONGEST, END = 3, 48, 5
DECODERS = [name for name in EVERY if name not in ("oracle", "probes", "taps")] + ["auto"]
TINIEST = np.finfo(np.float32).tiny


def model() -> PreTrainedModel:
    return tiny("llama", torch.float32)


@cache
def prompts() -> list[tuple[int, ...]]:
    inputs = ragged(model(), 6, seed=2)
    lines = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [tuple(ids[seen.bool()].tolist()) for ids, seen in lines]


@cache
def alone(prompt: tuple[int, ...], steps: int, seed: int | None) -> list[int]:
    """Plain decoding of a prompt by itself: by `model.generate`, or a forward a token and the noise of its place."""
    ids = torch.tensor([prompt])
    if seed is None:
        out = model().generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=END, pad_token_id=0)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
    emitted: list[int] = []
    while len(emitted) < steps and END not in emitted:
        with torch.no_grad():
            law = model()(torch.tensor([[*prompt, *emitted]])).logits[0, -1].softmax(-1)
        bits = np.random.Philox(key=(seed, 0), counter=[0, len(emitted), 0, 0])
        noise = np.random.Generator(bits).standard_exponential(len(law), dtype=np.float32)
        emitted.append(int((law / torch.from_numpy(np.maximum(noise, TINIEST))).argmax()))
    return emitted


def added(engine: ContinuousEngine, which: int, steps: int, seed: int | None, draft: Any) -> EngineRequest:
    sampling = {"do_sample": False} if seed is None else {"do_sample": True, "top_k": 0, "seed": seed}
    return engine.add_request(
        torch.tensor(prompts()[which]), draft=draft, max_new_tokens=steps, eos_token_id=END, pad_token_id=0, **sampling
    )


def check(request: EngineRequest, which: int, steps: int, seed: int | None) -> None:
    """Its text is that which it has alone; of one that was aborted, as far as it went."""
    expected = alone(prompts()[which], steps, seed)
    if request.finish_reason == "abort":
        assert request.tokens == expected[: len(request.tokens)]
    else:
        assert request.tokens == expected
        assert request.finish_reason == ("stop" if END in expected else "length")


def watch(engine: ContinuousEngine) -> None:
    """At every pass the logits where each row stands are those of a plain forward over its tokens."""
    inner: Any = engine._engine
    decide = inner._decide

    def checked(request: Any, rows: Any, trees: Any, scores: Any) -> Any:
        for row, logits in zip(rows, scores.logits[:, 0], strict=True):
            with torch.no_grad():
                plain = model()(torch.tensor([row.tokens]), use_cache=False).logits[0, -1]
            assert (logits - plain).abs().max() < 1e-4 * plain.std(), f"the logits of {row.tokens} are others"
        return decide(request, rows, trees, scores)

    inner._decide = checked


def play(names: list[str], events: list[tuple[int, int, int]]) -> int:
    """Admit, step and abort as `events` say, (what, which, how long); the number of events."""
    drafts: dict[str, Any] = {name: name if name == "auto" else drafter(name, model()) for name in set(names)}
    fast = truedraft.accelerate(model(), draft=None)
    known: list[tuple[EngineRequest, int, int, int | None]] = []
    with fast.engine(max_rows=ROWS, max_tokens=LONGEST) as engine:
        watch(engine)
        for what, which, size in events:
            if what < 4:
                seed = None if what < 2 else size
                known.append(
                    (added(engine, which, size, seed, drafts[names[len(known) % len(names)]]), which, size, seed)
                )
            elif what < 9:
                engine.step()
            elif known:
                engine.abort_request(known[which % len(known)][0])
        while engine.has_unfinished_requests():
            engine.step()
        assert engine._target.cache is not None and engine._target.cache.lengths == []
        assert engine.room() == ROWS
    for request in known:
        assert request[0].finished
        check(*request)
    for draft in drafts.values():
        for part in getattr(draft, "parts", [draft]):
            assert not getattr(part, "_states", {}), "a row was left in a drafter"
    return len(events)
