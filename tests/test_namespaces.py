"""What a tenant of an engine can see of another's text through drafters: nothing, whatever these remember.

One drafter serves two tenants. What the second one sees (texts, passes, drafts offered and accepted) must be the same
whichever of two secrets the first one's requests had; in one namespace it differs for drafters that remember texts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import truedraft
from arrivals import model
from nets import PRESETS, REGISTERED, drafter
from truedraft.continuous import ContinuousEngine
from truedraft.engine_request import EngineRequest

Seen = list[tuple[Any, ...]]
STEPS, SECRET = 16, 12  # tokens of an output, and of a secret prompt
REMEMBERING = {  # methods that draft from what earlier rows emitted, or from what was computed of them
    "suffix", "lookahead-pia", "token-recycling", "aded", "codeswift", "max-gram", "cs-drafting",
    "suffix+token-recycling", "input-guided>aded",
}  # fmt: skip


@cache
def secret(which: str) -> list[int]:
    return torch.randint(3, 61, (SECRET,), generator=torch.Generator().manual_seed(ord(which))).tolist()


def family(name: str) -> str:
    """The kind of model that the drafter serves."""
    try:
        drafter(name, model())
    except pytest.skip.Exception:
        return "encoder-decoder"
    return "decoder"


def asked(
    engine: ContinuousEngine, namespace: str, prompt: list[int], document: list[int], **how: Any
) -> EngineRequest:
    takes = engine._drafter.takes_references
    return engine.add_request(
        torch.tensor(prompt), namespace=namespace, max_new_tokens=STEPS, pad_token_id=0,
        references=[document] if takes else None, **{"do_sample": False, **how},
    )  # fmt: skip


def finish(engine: ContinuousEngine, *requests: EngineRequest) -> None:
    while not all(request.finished for request in requests):
        engine.step()


def seen_by(name: str, other: str, which: str) -> Seen:
    """What the requests of tenant "b" show, after and beside those of a tenant `other` with a secret."""
    host = model(family(name))
    fast = truedraft.accelerate(host, draft=drafter(name, host), control="fixed")
    text, known = secret(which), secret("x")
    with fast.engine(max_rows=3, max_tokens=64) as engine:
        finish(engine, asked(engine, other, text, text[::-1]))
        probes = [asked(engine, "b", known, known)]
        finish(engine, *probes)
        beside = asked(engine, other, text[3:] + text[:3], text)
        probes.append(asked(engine, "b", known[: SECRET // 2], known[:4], do_sample=True, top_k=0, seed=4))
        finish(engine, probes[1])
        probes.append(asked(engine, "b", known[2:9], known))
        finish(engine, beside, *probes)
    for probe in probes:
        if probe.error is not None:
            raise probe.error
    return [(probe.tokens, *probe.report().passes) for probe in probes]


@pytest.mark.parametrize("name", REGISTERED)
def test_a_tenant_sees_nothing_of_anothers_text(name: str) -> None:
    assert seen_by(name, "a", "x") == seen_by(name, "a", "y")
    if PRESETS.get(name, (name, {}))[0] in REMEMBERING:
        assert seen_by(name, "b", "x") != seen_by(name, "b", "y"), "this net cannot see what the drafter remembers"
