"""Responses of live use: what a server keeps of them, and drafters that are trained on from a checkpoint with them."""

from __future__ import annotations

import json
import os
import stat
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.numpy
import torch

import models
import truedraft
from served import running
from test_train import _many_held_out, plan, target, tokenizer, trained  # noqa: F401
from truedraft import Refused
from truedraft.cli import main
from truedraft.cli.train import lines_of, weights_of
from truedraft.drafters._learned import WEIGHTS
from truedraft.loading import load
from truedraft.serve.record import Recorder
from truedraft.train.responses import Responding, given_responses

PROMPTS = ["Once upon a time", "The dog", "One day, Lily"]


def posted(url: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_keeps_prompts_and_responses_where_it_is_asked_to(tmp_path: Path) -> None:
    """Token ids as `model.generate` reads and emits them; nothing without the setting."""
    model, tokens = load("nano")
    fast, kept = truedraft.accelerate(model, tokens, draft="prompt-lookup", control="fixed"), tmp_path / "live.jsonl"
    with running(fast, record=kept) as server:
        for prompt in PROMPTS:
            posted(server.url, model="nano", prompt=prompt, max_tokens=12, temperature=0)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(lines) == len(PROMPTS)
    for prompt, line in zip(PROMPTS, lines, strict=True):
        ids = tokens(prompt, return_tensors="pt", return_token_type_ids=False).input_ids
        text = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
        assert [line["prompt_ids"], line["response_ids"]] == [ids[0].tolist(), text[ids.shape[1] :]]
        assert sum(line["accepted"]) < len(line["response_ids"])
    assert lines_of(kept, ids=True)[1:] == (
        [line["prompt_ids"] for line in lines],
        [line["response_ids"] for line in lines],
    )
    with pytest.raises(Refused, match="line 1 is not"):
        lines_of(kept)
    with running(fast) as server:
        posted(server.url, model="nano", prompt="The dog", max_tokens=3)
    assert len(kept.read_text().splitlines()) == len(PROMPTS)


def job(**given: Any) -> Any:
    return SimpleNamespace(**{"ids": [3], "tokens": [4, 5, 6, 7], "finish_reason": "stop", **given})


def test_accepted_lengths_are_those_of_each_draft(tmp_path: Path) -> None:
    """Two accepted and the bonus token, then one; rows that fail are left out; a full disk ends it, not the server."""
    ended: list[Any] = []
    inner: Any = SimpleNamespace(ended=ended.append)
    recorder = Recorder(tmp_path / "a", inner)
    recorder.ended(job(drafted=[True, True, False, True]))
    recorder.ended(job(drafted=[False] * 4, finish_reason=None))
    (line,) = (tmp_path / "a").read_text().splitlines()
    assert json.loads(line) == {"prompt_ids": [3], "response_ids": [4, 5, 6, 7], "accepted": [2, 1]}
    full = Recorder(Path("/dev/full") if os.path.exists("/dev/full") else tmp_path / "b", inner)
    for _ in range(2):
        full.ended(job(drafted=[False] * 4))
    assert len(ended) == 4
    with pytest.raises(Refused, match=r"record .*No such file"):
        Recorder(tmp_path / "none" / "a", inner)


def test_token_ids_are_trained_on_as_they_are() -> None:
    fast = truedraft.accelerate(target(), tokenizer(), draft=None)
    given = ([[5, 6], "w9 w8"], [[7, 5, 4], "w3"])
    lines = given_responses(fast, tokenizer(), *given, lambda text: None, Responding(9))
    assert lines == [([5, 6], [7, 5, 4]), ([9, 8], [3, 7])]  # a text ends with the end token
    with pytest.raises(Refused, match="--data has token 61, and the model 61 tokens"):
        given_responses(fast, tokenizer(), [[5]], [[models.V]], lambda text: None, Responding(9))


def weights(folder: Path) -> dict[str, Any]:
    return safetensors.numpy.load_file(folder / WEIGHTS)  # type: ignore[no-any-return]


def test_a_checkpoint_is_replaced_by_a_better_one_alone(tmp_path: Path) -> None:
    little, much, worse, better = (tmp_path / name for name in ("little", "much", "worse", "better"))
    (_, begun), (_, good) = trained(little, plan=plan(steps=3)), trained(much, plan=plan(steps=80))
    assert good["tokens_per_pass"] > begun["tokens_per_pass"]
    _, spoilt = trained(worse, plan=plan(steps=3, lr=1e3, every=0), start=much)
    assert spoilt == good
    assert all((weights(worse)[name] == weight).all() for name, weight in weights(much).items())
    _, gone_on = trained(better, plan=plan(steps=30, every=0), start=little)
    assert gone_on["tokens_per_pass"] > begun["tokens_per_pass"]
    assert any((weights(better)[name] != weight).any() for name, weight in weights(little).items())


def test_weights_are_read_from_the_lines(tmp_path: Path) -> None:
    """Rewards as they are, and of what was recorded tokens per pass."""
    data = tmp_path / "data.jsonl"
    line = {"prompt_ids": [3], "response_ids": [4, 5, 6, 7], "accepted": [2, 1], "reward": 0.5}
    data.write_text(f"{json.dumps(line)}\n\n{json.dumps({**line, 'accepted': [], 'reward': 2})}\n")
    assert weights_of(data, "reward") == [0.5, 2.0] and weights_of(data, "accepted") == [4.0, 1.0]
    for spoilt in ({"reward": -1}, {"reward": "1"}, {"reward": None}, {"reward": True}, {"reward": float("nan")}):
        data.write_text(json.dumps({**line, **spoilt}))
        with pytest.raises(Refused, match=r"--weights reward: line 1 of .* does not have"):
            weights_of(data, "reward")
    for without in ("accepted", "response_ids"):
        data.write_text(json.dumps({name: value for name, value in line.items() if name != without}))
        with pytest.raises(Refused, match=r"--weights accepted: line 1 of .* does not have what `truedraft serve"):
            weights_of(data, "accepted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eagle", "--from", "X", "--resume"], "--from X: --resume goes on from the checkpoint in --out"),
        (["learn2pd", "--from", "X"], "--from X: learn2pd is trained from its beginning"),
        (["eagle", "--weights", "reward"], "--weights reward: the data has them of its own responses"),
        (["eagle", "--weights", "loss"], "--weights loss: choose none, reward or accepted"),
        (["learn2pd", "--weights", "reward", "--labels", "given"], "--weights reward: learn2pd learns from what"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "data").write_text("w5 w6\n")
    assert main(["train", *options, "--target", "nano", "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_draft_model_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Of the same knobs; others are refused."""
    from test_distilling import trained as distilled

    first = tmp_path / "first"
    _, begun = distilled(first, plan=plan(steps=40, lr=3e-3))
    _, spoilt = distilled(tmp_path / "worse", plan=plan(steps=3, lr=30.0, every=0), start=first)
    assert spoilt["tokens_per_pass"] == begun["tokens_per_pass"]
    torch.testing.assert_close(*(load(str(one))[0].state_dict() for one in (first, tmp_path / "worse")))
    with pytest.raises(Refused, match="a draft model with another"):
        distilled(tmp_path / "other", heads=1, start=first)
