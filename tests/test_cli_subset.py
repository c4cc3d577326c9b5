"""The command line and any-subset models: `truedraft generate` fills masks, and all other commands name it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import XLNetTokenizer

import truedraft
from test_canvas_subset import END, by_hand, model_of
from truedraft import Refused, loading
from truedraft.canvas.subset import reads_subsets
from truedraft.cli import main

SPECIAL = ("<unk>", "<s>", "<pad>", "</s>", "<sep>", "<cls>", "<mask>", "<eop>", "<eod>")
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "and", "red", "ball"]
REMEDY = "`truedraft generate` fills masks with it"
HOLES = "the cat <mask> on the <mask> <mask> mat"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocabulary = [(token, 0.0) for token in SPECIAL] + [(f"▁{word}", -float(i)) for i, word in enumerate(WORDS)]
    return XLNetTokenizer(vocab=vocabulary)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    made = model_of(len(tokenizer), mask=None, pad_token_id=tokenizer.pad_token_id)
    made.config.mask_token_id = tokenizer.mask_token_id
    return made


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """As published checkpoints are: the tokenizer has the mask, not the configuration."""
    found = tmp_path_factory.mktemp("subset")
    model_of(len(tokenizer), mask=None, pad_token_id=tokenizer.pad_token_id).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return str(found)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Without the tokens that end a text."""
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    out, said = capsys.readouterr()
    assert not out
    return said.removeprefix("error: ").strip()


@pytest.mark.covering(1)
@pytest.mark.parametrize("more", [(), ("--draft", "assd-bigram"), ("--draft", "none")])
@pytest.mark.parametrize("new", [0, 5])
def test_masks_are_filled_and_the_text_goes_on(
    new: int, more: tuple[str, ...], folder: str, model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, filled = by_hand(model, ids_of(tokenizer, HOLES), new)
    assert tokenizer.mask_token_id not in expected and filled > new
    command = ["generate", folder, HOLES, "--max-new-tokens", str(new), *more]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_ids"] == expected and found["tokens"] == filled
    assert found["drafter"] == ("none" if "none" in more else "assd")
    assert main(command) == 0
    assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_without_masks_the_new_text_is_printed_and_streamed(
    folder: str, model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ids_of(tokenizer, "the cat sat")
    new = by_hand(model, prompt, 6)[0][len(prompt) :]
    command = ["generate", folder, "the cat sat", "--max-new-tokens", "6"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == new
    assert main([*command, "--stream"]) == 0
    streamed = capsys.readouterr().out.split()
    assert streamed == tokenizer.decode(new, skip_special_tokens=True).split()


def test_samples_of_several_prompts(
    folder: str, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts of a file, each as alone; one of them has no masks."""
    (tmp_path / "prompts.txt").write_text(f"{HOLES}\n\nthe dog\n")
    sampled = ["--max-new-tokens", "4", "--sample", "--seed", "3", "-n", "2", "--json"]
    assert main(["generate", folder, "--prompts", str(tmp_path / "prompts.txt"), *sampled]) == 0
    together = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    alone = []
    for text in (HOLES, "the dog"):
        assert main(["generate", folder, text, *sampled]) == 0
        alone.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert together == alone and len(together[0]) == len(together[1]) == 2
    known = [i for i in ids_of(tokenizer, HOLES) if i != tokenizer.mask_token_id]
    holes = [place for place, i in enumerate(ids_of(tokenizer, HOLES)) if i == tokenizer.mask_token_id]
    for text in together[0]:
        assert [token for place, token in enumerate(text[:8]) if place not in holes] == known
        assert len(text) == 12 or text[-1] == END
    assert all(len(text) <= 4 for text in together[1])


def test_masks_are_not_streamed_on_a_terminal(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", folder, HOLES, "--max-new-tokens", "2"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--stream"], "--stream shows text after a prompt, and masks are within it: drop --stream"),
        (["--max-new-tokens", "-1"], "--max-new-tokens -1 must be at least 0"),
        (["--rule", "greedy"], "--rule greedy is not for any-subset models: leave it out"),
        (["--view", "lossy/dual-cache"], "--view lossy/dual-cache is not for any-subset models: leave it out"),
        (
            ["--draft", "suffix"],
            "there is no drafter of any-subset models 'suffix': it is a drafter of models that write",
        ),
        (["--draft", "assd:k=0"], "assd:k=0: give a whole number, 1 to 64"),
        (["--block-length", "4"], "--block-length is for diffusion models: leave it out"),
        (["--stop", "cat"], "--stop ['cat'] is not supported for any-subset models: leave it out"),
        (["--ties", "recheck"], "--ties recheck is for autoregressive models: leave it out"),
        (["--dtype", "bfloat16"], "load it in float32 (--dtype float32)"),
    ],
)
def test_options_of_generate_that_are_refused(
    more: list[str], why: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", folder, HOLES, *more]) == 2
    found = errors(capsys)
    assert why in found and "\n" not in found


COMMANDS = {
    "serve": ["serve", "MODEL"],
    "serve --check": ["serve", "MODEL", "--check"],
    "bench": ["bench", "MODEL"],
    "bench --assistant": ["bench", "nano", "--assistant", "MODEL"],
    "audit": ["audit", "MODEL"],
    "chat": ["chat", "MODEL"],
    "demo": ["demo", "--model", "MODEL"],
    "demo --canvas": ["demo", "--canvas", "--model", "MODEL"],
    "correct": ["correct", "DATA", "--model", "MODEL"],
    "calibrate": ["calibrate", "sleb", "--target", "MODEL", "--data", "DATA", "--out", "OUT"],
    "train": ["train", "gad", "--target", "MODEL", "--data", "DATA", "--out", "OUT"],
    "train, of a policy": ["train", "learn2pd", "--target", "MODEL", "--data", "DATA", "--out", "OUT"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_other_commands_name_the_one_that_runs_it(
    name: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.setattr(loading, "load", None)
    (tmp_path / "data.txt").write_text("the cat sat on the mat\n")
    given = {"MODEL": folder, "DATA": str(tmp_path / "data.txt"), "OUT": str(tmp_path / "out")}
    assert main([given.get(word, word) for word in COMMANDS[name]]) == 2
    found = errors(capsys)
    assert found.endswith(f"{folder!r} is an any-subset model, which this command does not run: {REMEDY}")
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_is_known_once_it_is_loaded(
    folder: str, model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loading.kind_of(Path(folder)) == "subset" and reads_subsets(model)
    monkeypatch.setattr(loading, "kind_of", lambda source: "text")
    assert main(["generate", folder, HOLES, "--max-new-tokens", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["token_ids"]
    assert found == by_hand(model, ids_of(tokenizer, HOLES), 3)[0]
    assert main(["bench", folder, "--limit", "1"]) == 2
    assert "is an any-subset model, which this command does not run" in errors(capsys)


def test_it_cannot_be_served(model: Any, tokenizer: Any) -> None:
    pytest.importorskip("fastapi")
    from truedraft.serve.app import create_app
    from truedraft.serve.config import ServeConfig

    fast: Any = truedraft.accelerate(model, tokenizer)
    with pytest.raises(Refused, match="XLNetLMHeadModel cannot be served"):
        create_app(fast, ServeConfig(model="x"))
