"""What a tenant of an engine can see of another's text through drafters: nothing, whatever these remember.

One drafter serves two tenants. What the second one's requests show (texts, passes, drafts) must be the same whichever
of two secrets the first one's requests had; in one namespace it differs for drafters that remember texts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from arrivals import model
from comparisons import compared_once
from nets import NAMES, PRESETS, drafter
from truedraft import Drafter, DraftTree, Refused
from truedraft.continuous import ContinuousEngine
from truedraft.control._drafter import DrafterState
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._worker import Worker
from truedraft.engine_request import EngineRequest
from truedraft.parts import drafter_of
from truedraft.stores import _file, memory
from truedraft.tree import Row
from vocabularies import tokenized

Seen = list[tuple[Any, ...]]
STEPS, SECRET = 11, 12  # tokens of an output, and of a secret prompt
LONGER = 16  # of an output, for presets with longer drafts
LENGTH = 1024  # of an engine with room for the widest drafts
REMEMBERING = {  # methods that draft from what earlier rows emitted, or from what the target computed of them
    "suffix", "lookahead-pia", "token-recycling", "aded", "codeswift", "max-gram", "cs-drafting",
    "ouroboros", "suffix+token-recycling", "input-guided>aded", "auto",
}  # fmt: skip


@cache
def secret(which: str) -> list[int]:
    generator = torch.Generator().manual_seed(ord(which))
    return torch.randint(3, 61, (SECRET,), generator=generator).tolist()  # type: ignore[no-any-return]


def served(name: str) -> tuple[PreTrainedModel, Drafter]:
    """A drafter, and a model of the kind that it serves."""
    if name == "auto":
        return model(), drafter_of(name)
    try:
        host = model()
        return host, drafter(name, host)  # type: ignore[return-value]
    except pytest.skip.Exception:
        host = model("encoder-decoder")
        return host, drafter(name, host)  # type: ignore[return-value]


def asked(
    engine: ContinuousEngine, namespace: str, prompt: Sequence[int], document: Sequence[int] = (), **how: Any
) -> EngineRequest:
    """A request whose document, for drafters that copy from documents, is of no other request."""
    given = [document] if document and engine._drafter.takes_references else None
    return engine.add_request(
        torch.tensor(prompt), namespace=namespace, pad_token_id=0, references=given,
        **{"do_sample": False, "max_new_tokens": STEPS, **how},
    )  # fmt: skip


def finish(engine: ContinuousEngine, *requests: EngineRequest) -> None:
    while not all(request.finished for request in requests):
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error


def recorded(draft: Drafter, namespace: str) -> Seen:
    """Tokens and parents of the drafts for the rows of a namespace, as they are proposed."""
    drafts: Seen = []
    propose = draft.propose

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees = propose(rows, budget)
        drafts.extend((t.tokens, t.parent) for row, t in zip(rows, trees, strict=True) if row.namespace == namespace)
        return trees

    draft.propose = noted  # type: ignore[method-assign]
    return drafts


def seen_by(name: str, other: str, which: str) -> tuple[Seen, Seen]:
    """What requests of tenant "b" show after, and beside, those of a tenant `other` with a secret, and their drafts."""
    host, draft = served(name)
    with compared_once():
        fast = tokenized(host, draft=draft, control="fixed")
    mine, text, known = recorded(draft, "b"), secret(which), secret("x")
    steps = {"max_new_tokens": LONGER if name in PRESETS else STEPS}
    with compared_once(), fast.engine(max_rows=3, max_tokens=LENGTH) as engine:
        finish(engine, asked(engine, other, text, text[::-1], **steps))
        others = len(mine)  # none, unless both are one tenant
        probes = [asked(engine, "b", known, known, **steps)]
        finish(engine, probes[0])
        drafts = mine[others:]
        beside = asked(engine, other, text[3:] + text[:3], text, **steps)
        probes.append(asked(engine, "b", known[: SECRET // 2], known[:4], do_sample=True, top_k=0, seed=4, **steps))
        finish(engine, probes[1])
        probes.append(asked(engine, "b", known[2:9], known, **steps))
        finish(engine, beside, *probes[2:])
    drafts = mine if other != "b" else drafts
    return [(probe.tokens, *probe.report().passes) for probe in probes], drafts


@pytest.mark.parametrize("name", [*NAMES, "auto", *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS)])
def test_a_tenant_sees_nothing_of_anothers_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "start", lambda worker, steps: list(steps))  # else drafts depend on time
    assert seen_by(name, "a", "x") == seen_by(name, "a", "y")
    if PRESETS.get(name, (name, {}))[0] in REMEMBERING:
        (seen, drafts), (others_seen, others_drafts) = (seen_by(name, "b", which) for which in "xy")
        assert seen != others_seen and drafts != others_drafts, "this net cannot see what the drafter remembers"


def test_confidences_are_calibrated_by_the_rows_of_their_namespace() -> None:
    calibration = Calibration()

    def settled(namespace: str) -> float:
        row = Row(0, [1], 1, 9, namespace=namespace)
        (_, found) = calibration.settled(row, (1.0, 0.8))
        calibration.end(row)
        return found

    fresh = settled("b")
    for _ in range(50):
        row = Row(0, [1], 1, 9, namespace="a")
        calibration.proposed(row, DraftTree.chain(1, [5], [0.8]))
        row.tokens.append(6)
        calibration.update([row])
        calibration.end(row)
        assert settled("b") == fresh
    assert settled("a") < 0.3 < fresh


def test_the_control_keeps_no_tokens_of_drafts() -> None:
    draft = drafter("token-recycling", model())
    assert draft is not None
    held = DrafterState(draft, 0.9, 0.8, 0.1)
    held.autoregressive = False
    held.made([DraftTree((7, 8, 9, 10, 11), (-1, 0, 0, 1, 2), confidence=(1.0, 0.5, 0.4, 0.3, 0.2))])
    form = held._form
    assert form.parent == (-1, 0, 0, 1, 2) and form.confidence == (1.0, 0.5, 0.4, 0.3, 0.2)
    assert not any(form.tokens) and form.dist is None


def test_namespaces_are_forgotten_where_all_would_have_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BYTES", 30)
    states: memory.Tenants[bytearray] = memory.Tenants(9, bytearray, len)
    for name, size in (("a", 10), ("b", 10), ("a", 20), ("c", 5)):
        states.of(name)[:] = bytes(size)
    assert [len(states.of(name)) for name in "ac"] == [20, 5] and len(states) == 2, "b was used least recently"
    states.of("a").extend(bytes(90))
    assert len(states.of("a")) == 110 and len(states) == 1, "what is in use is kept"


@pytest.mark.parametrize("name", ["token-recycling", "max-gram", "aded", "codeswift", "ouroboros", "staged-sd"])
def test_drafters_bound_the_bytes_of_all_namespaces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BYTES", 1)
    draft = drafter(name, model())
    with truedraft.accelerate(model(), draft=draft, control="fixed").engine(max_rows=2, max_tokens=64) as engine:
        for namespace in "abc":
            finish(engine, asked(engine, namespace, secret("x")))
            tenants = [kept for kept in vars(draft).values() if isinstance(kept, memory.Tenants)]
            assert [len(kept) for kept in tenants] == [1]


def contents(path: Path) -> tuple[Any, list[int]]:
    config, arrays, _ = _file.read(path, memory.KIND, memory.VERSION, "")
    return config, arrays["token"].tolist()


def test_memory_is_saved_between_steps_and_restored_whole(tmp_path: Path) -> None:
    first, later = (truedraft.accelerate(model(), draft="suffix+lookahead-pia", control="fixed") for _ in range(2))
    with first.engine(max_rows=3, max_tokens=64) as engine, later.engine(max_rows=3, max_tokens=64) as restarted:
        for namespace in ("a", "b", "a", "", "ä\ud800"):
            finish(engine, asked(engine, namespace, secret("x")))
        running, also = asked(engine, "a", secret("y")), asked(restarted, "b", secret("y"))
        for one in (engine, restarted):
            one.step()
            one.step()
        first.save_memory(tmp_path / "first.tdm")
        later.load_memory(tmp_path / "first.tdm")
        later.save_memory(tmp_path / "later.tdm")
        assert contents(tmp_path / "first.tdm") == contents(tmp_path / "later.tdm")
        config, tokens = contents(tmp_path / "later.tdm")
        assert config["namespaces"] == ["a", "b", "", "ä\ud800"] and len(tokens) == 5 * (STEPS + 1)
        finish(engine, running)
        finish(restarted, also)
        for namespace in ("b", ""):
            probes = [asked(one, namespace, secret("x")) for one in (engine, restarted)]
            finish(engine, probes[0])
            finish(restarted, probes[1])
            assert probes[0].report().passes[1:] == probes[1].report().passes[1:]
    fresh = truedraft.accelerate(model(), draft="suffix+lookahead-pia", control="fixed")
    fresh.generate(torch.tensor([secret("x")]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    assert len(probes[1].report().passes) < len(fresh.report().passes)


def test_memory_is_saved_by_another_thread_while_the_engine_steps(tmp_path: Path) -> None:
    fast, failed = truedraft.accelerate(model(), control="fixed"), list[Exception]()
    saved = [tmp_path / f"{i}.tdm" for i in range(8)]

    def save() -> None:
        try:
            for path in saved:
                fast.save_memory(path)
        except Exception as error:
            failed.append(error)

    with fast.engine(max_rows=3, max_tokens=64) as engine:
        saver = threading.Thread(target=save)
        saver.start()
        while saver.is_alive():
            finish(engine, *[asked(engine, namespace, secret("x")) for namespace in "ab"])
        saver.join()
    assert not failed
    counts = [len(contents(path)[1]) for path in saved]
    assert counts == sorted(counts) and all(count % (STEPS + 1) == 0 for count in counts), "whole outputs alone"


def test_a_memory_file_cut_anywhere_is_refused_in_a_sentence(tmp_path: Path) -> None:
    fast, path = truedraft.accelerate(model(), draft="suffix", control="fixed"), tmp_path / "memory.tdm"
    fast.generate(torch.tensor([secret("x")]), max_new_tokens=STEPS, do_sample=False, pad_token_id=0, namespace="a")
    fast.save_memory(path)
    whole = path.read_bytes()
    (kept,) = fast.drafter.memories()
    fast.forget()
    (kept,) = fast.drafter.memories()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(Refused, match=r"^memory '.*memory\.tdm' is damaged.*: build another$") as refusal:
            fast.load_memory(path)
        assert "\n" not in str(refusal.value) and not len(kept)
    path.write_bytes(whole)
    fast.load_memory(path)
    assert len(kept) == STEPS + 1
