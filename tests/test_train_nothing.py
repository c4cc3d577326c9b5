"""Training on nothing: an error before any minutes are spent, and no drafter that knows nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import seq2seq_models
import test_train
from test_train import WEIGHTS, target, texts, tokenizer, trained
from test_train_canvas import LAYOUTS, PROMPTS, Numbers
from test_train_canvas import target as canvas
from truedraft import Refused
from truedraft.cli import main
from truedraft.train import certainty, filters
from truedraft.train.canvases import TRAININGS, train_policy
from truedraft.train.loop import Plan
from truedraft.train.responses import Responding

NAMES = ["medusa", "eagle3", "draft-model", "hydra"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("target")
    target().save_pretrained(found)
    tokenizer().save_pretrained(found)
    return found


def jsonl(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


EMPTY = jsonl(*({"prompt": text, "response": ""} for text in texts(5)))
BLANK = jsonl(*({"prompt": text, "response": " \n"} for text in texts(5)))
TABS = "".join(f"{text}\t\n" for text in texts(5))
LONG = jsonl(*({"prompt": text, "response": "w9 w10 w11 w12"} for text in texts(5, longest=8)))
SINGLE = jsonl(*({"prompt_ids": [5, 6, 7], "response_ids": [i]} for i in range(8, 13)))
ALONE = "".join(f"w{i}\n" for i in range(8, 13))
GIVEN = ["--labels", "given"]
CASES: dict[str, tuple[str, str, list[str], str]] = {  # a file, options, and what is said
    "empty responses": ("a.jsonl", EMPTY, GIVEN, "--data: every line has nothing to predict"),
    "responses of white space": ("a.jsonl", BLANK, GIVEN, "--data: every line has nothing to predict"),
    "nothing after the tabs": ("a.txt", TABS, GIVEN, "--data: every line has nothing to predict"),
    "all cut away": ("a.jsonl", LONG, [*GIVEN, "--max-length", "2"], "nothing to predict within 2 tokens"),
    "responses of one token": ("a.jsonl", SINGLE, GIVEN, "a single token, and drafts begin with the second"),
    "texts of one token": ("a.txt", ALONE, GIVEN, "a single token, and drafts begin with the second"),
    "an empty file": ("a.txt", "", GIVEN, "the file has no text"),
    "empty lines": ("a.jsonl", "\n  \n", [], "the file has no text"),
    "no room for a response": ("a.txt", "\n".join(texts(5)), ["--max-new-tokens", "1"], "--max-new-tokens 1 and "),
    "no length for a response": ("a.txt", "\n".join(texts(5)), ["--max-length", "2"], "at most 2 tokens"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_a_drafter_is_not_trained_on_nothing(
    case: str, name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text, options, message = CASES[case]
    (tmp_path / file).write_text(text)
    base = ["train", name, "--target", str(folder), "--data", str(tmp_path / file), "--out", str(tmp_path / "out")]
    assert main([*base, *options, "--minutes", "0.01", "--device", "cpu"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
    assert not [*tmp_path.glob(f"out/{WEIGHTS}")] and not [*tmp_path.glob("out/*.safetensors")]


def test_compressed_data_and_texts_besides(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(EMPTY.encode()))
    (tmp_path / "b.txt").write_text("\n".join(texts(9)))
    (tmp_path / "c.txt").write_text(ALONE)
    base = ["train", "medusa", "--target", str(folder), "--out", str(tmp_path / "out"), "--minutes", "0.01", *GIVEN]
    assert main([*base, "--data", str(tmp_path / "a.jsonl.gz"), "--texts", str(tmp_path / "b.txt")]) == 2
    assert "--data: every line has nothing to predict" in capsys.readouterr().err
    assert main([*base, "--data", str(tmp_path / "b.txt"), "--texts", str(tmp_path / "c.txt")]) == 2
    assert "--texts: every line has nothing to predict" in capsys.readouterr().err


def test_responses_that_end_at_once_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model itself: every token ends its text."""
    model: Any = target()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    monkeypatch.setattr(test_train, "target", lambda: model)
    with pytest.raises(Refused, match="responses have fewer than 2 tokens each, which leaves nothing to draft"):
        trained(tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


def test_lines_with_nothing_are_left_out_beside_others(tmp_path: Path) -> None:
    """They are not counted, neither to train on nor among those that are held out, and their weights go with them."""
    said: list[str] = []
    answers = ["", "w9 w10 w11", *(["w12 w13 w14"] * 20), "", "w9"]
    _, found = trained(tmp_path, sources=texts(24), answers=answers, weights=[1.0] * 24, report=said.append)
    assert any("--data: 2 lines have nothing to predict" in line for line in said)
    assert found["tokens_per_pass"] >= 1 and any(" held out" in line for line in said)


def test_encoder_decoders_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = seq2seq_models.model()
    model.save_pretrained(tmp_path / "target")
    seq2seq_models.tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "a.txt").write_text("the red ball\t\nthe ball\t\n")
    base = ["train", "gad", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "a.txt"), *GIVEN]
    assert main([*base, "--out", str(tmp_path / "out"), "--minutes", "0.01"]) == 2
    assert "a side that is empty or longer" in capsys.readouterr().err


@pytest.mark.parametrize("policy", TRAININGS)
def test_policies_of_diffusion_models(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts without a token, and a model that writes nothing behind them."""
    training = TRAININGS[policy]()
    with pytest.raises(Refused, match="--data: no prompt leaves room"):
        train_policy(training, canvas(LAYOUTS[0]), Numbers(), ["", ""], tmp_path, Plan(steps=1))

    class Silent:
        target = None

        def generate(self, inputs: torch.Tensor, *, on_canvas: Any, **given: Any) -> None:
            canvas_of = type("Canvas", (), {"tokens": [7]})
            on_canvas([type("Row", (), {"text": [], "canvas": canvas_of}) for _ in inputs])

    for module in (certainty, filters):
        monkeypatch.setattr(module, "accelerate", lambda *args, **given: Silent())
    monkeypatch.setattr(filters, "_step", lambda *args: pytest.fail("there is no step"))
    monkeypatch.setattr(filters._Recorder, "found", {}, raising=False)
    monkeypatch.setattr(filters, "_Recorder", lambda reference: type("R", (), {"found": {0: []}})())
    with pytest.raises(Refused, match="--data: the model writes nothing behind these prompts"):
        train_policy(training, canvas(LAYOUTS[0]), Numbers(), PROMPTS[:1], tmp_path, Plan(steps=1))


def test_calibrations_on_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("", "the file has no text"), ("\n\n", "the file has no text")):
        (tmp_path / "a.txt").write_text(text)
        given = ["--target", "nano-draft", "--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
        for view in ("sleb", "draft-and-verify", "knn-ssd"):
            assert main(["calibrate", view, *given]) == 2
            assert message in capsys.readouterr().err
    from truedraft.calibrating import TextEvaluator

    for nothing in ([], [[]], [[5]]):
        with pytest.raises(Refused, match="--data: the calibration needs texts of at least two tokens, and has none"):
            TextEvaluator(target(), nothing)
    for prompts in ([], [[], []]):
        with pytest.raises(Refused, match="--data: the calibration reads the ends of prompts, and none has a token"):
            list(TextEvaluator(target(), [[5, 6, 7]], prompts).states())
    assert len(list(TextEvaluator(target(), [[5, 6, 7]], [[], [5, 6]]).states())) == 1
    assert Responding().max_new_tokens > 1 and not (tmp_path / "out").exists()
