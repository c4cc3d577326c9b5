"""`--attention` of `truedraft generate` and `bench`: models that attend to the whole canvas, and their views."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from truedraft.canvas.layout import layout_of
from truedraft.cli import main
from truedraft.cli._models import load

PROMPT, NEW = "one day, a little girl", 16
WHOLE = ["--attention", "whole"]


def written_out(attention: str) -> list[int]:
    """The most confident position of a block first, by the model's forward with a mask that is written out here."""
    model, tokenizer = load("nano-diffusion", runs=("canvas",))
    layout: Any = layout_of(model.config, tokenizer)
    ids = tokenizer(PROMPT)["input_ids"]
    blocked, prompt = attention == "blocks", len(ids)
    text, start = list(ids), 0 if blocked else prompt
    while len(text) < prompt + NEW:
        stop = start + layout.block if blocked else min(start + layout.block, prompt + NEW)
        if stop <= prompt:
            start = stop
            continue
        length = stop if blocked else prompt + NEW
        canvas = [*text, *[layout.mask] * (length - len(text))]
        places = list(range(len(text), stop))
        while places:
            block = torch.arange(length) // layout.block
            seen = block[:, None] >= block if blocked else torch.ones(length, length, dtype=torch.bool)
            mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
            with torch.no_grad():
                logits = model(torch.tensor([canvas]), attention_mask=mask, use_cache=False).logits[0]
            logits[:, layout.mask] = -torch.inf
            sure = logits[[place - layout.shifted for place in places]].softmax(-1).max(-1)
            best = int(sure.values.argmax())
            canvas[places.pop(best)] = int(sure.indices[best])
        text, start = canvas[:stop], stop
    return text[prompt : prompt + NEW]


def generated(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    args = ["generate", "nano-diffusion", PROMPT, "--max-new-tokens", str(NEW), "--json", *more]
    assert main(args) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", ["whole", "blocks"])
def test_the_text_is_that_of_the_attention_that_was_given(attention: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = written_out(attention)
    found = generated(capsys, "--attention", attention)["token_ids"]
    assert found == expected[: len(found)] and len(found) > 4
    if attention == "blocks":
        assert generated(capsys)["token_ids"] == found, "as the model declares"


@pytest.mark.parametrize("view", ["dual-cache", "prefix-cache", "dkv-cache", "freecache", "sparsed"])
def test_views_generate_with_attention_to_the_whole_canvas(view: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = generated(capsys, *WHOLE, "--view", f"lossy/{view}")
    assert found["guarantee"] == "none" and f"lossy/{view} is lossy" in " ".join(found["notes"])
    renewed = generated(capsys, *WHOLE, "--view", f"lossy/{view}:refresh=1") if view == "dual-cache" else None
    if renewed is not None:  # all of it is computed in every pass
        exact = generated(capsys, *WHOLE)["token_ids"]
        assert renewed["token_ids"] == exact


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "nano", "x", *WHOLE], "--attention whole is for diffusion models, and MODEL 'nano' is none"),
        (["bench", "nano-gec", *WHOLE], "--attention whole is for diffusion models, and MODEL 'nano-gec' is none"),
        (["generate", "nano-diffusion", "x", "--attention", "half"], "--attention half: choose one of whole, blocks"),
        (["serve", "nano-diffusion", "--attention", "half"], "--attention half: choose one of whole, blocks"),
        (["serve", "nano", *WHOLE], "--attention whole is for diffusion models, and MODEL 'nano' is none"),
        (["bench", "nano-diffusion", "--attention", "Whole"], "--attention Whole: choose one of whole, blocks"),
        (["generate", "nano-diffusion", "x", "--view", "lossy/dual-cache"], "--attention whole"),
        (["bench", "nano-diffusion", "--lossy", "lossy/d2cache"], "--attention whole"),
        (["bench", "nano-diffusion", *WHOLE, "--lossy", "lossy/int8-self"], "int8-self"),
        (
            ["bench", "--replay", "x.jsonl", "--tokenizer", "nano", *WHOLE],
            "--attention has no meaning together with --replay",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert words in capsys.readouterr().err


def test_bench_compares_views_with_the_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, page = tmp_path / "prompts.jsonl", tmp_path / "page.html"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"prompt": "tom ran"}) + "\n")
    few = ["--prompts", str(prompts), "--rounds", "1", "--max-new-tokens", str(NEW), "--html", str(page)]
    views = ["--lossy", "lossy/dual-cache", "--lossy", "lossy/dkv-cache"]
    assert main(["bench", "nano-diffusion", *WHOLE, *views, *few, "--json"]) == 0
    found = {f["side"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    assert list(found) == ["its own forward", "no drafts", "lossy/dual-cache", "lossy/dkv-cache"]
    assert found["no drafts"]["as_model"] and found["no drafts"]["as_undrafted"]
    exact = written_out("whole")
    for view in views[1::2]:
        f = found[view]
        assert f["differs"] is None and f["as_undrafted"] is None and f["speed_up"] is not None
        assert f["as_model"] == (f["apart"] == {}) == (f["agreement"] == 1) and set(f["apart"]) <= {"lossy"}
        own = generated(capsys, *WHOLE, "--view", view)["token_ids"]
        assert own == exact[: len(own)] or not f["as_model"]
    assert 'class="bad"' not in page.read_text() and "lossy/dual-cache" in page.read_text()


def test_the_server_hands_the_attention_to_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that is served is made as for `generate`; a running engine of it has its attention and its view."""
    pytest.importorskip("fastapi")
    made: list[Any] = []
    monkeypatch.setattr("truedraft.serve.serving.serve", lambda fast, *_: (made.append(fast), 0)[1])
    assert main(["serve", "nano-diffusion", *WHOLE, "--view", "lossy/dual-cache:refresh=1"]) == 0
    (fast,) = made
    ids = fast.tokenizer(PROMPT, return_tensors="pt").input_ids
    engine = fast.engine(2, 128)
    request = engine.add_request(ids, max_new_tokens=NEW)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    expected = written_out("whole")
    assert request.tokens == expected[: len(request.tokens)] and len(request.tokens) > 4
