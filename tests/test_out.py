"""Where a command writes: an impossible place is refused before any work, and nobody's files are replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from truedraft import Refused, loading
from truedraft.cli import _models, app, main
from truedraft.cli._models import load
from truedraft.files import check_file, check_folder
from truedraft.train.checkpoints import STATE

WRITING = ("--out", "--html")
TRAINING = ["train", "medusa", "--target", "nano-draft", "--data", "{lines}", "--out"]
COMMANDS = {  # by name, the arguments before the path
    "train": TRAINING,
    "train a draft model": ["train", "draft-model", *TRAINING[2:]],
    "train a policy": ["train", "lossy/dparallel", "--target", "nano-diffusion", "--data", "{lines}", "--out"],
    "calibrate": ["calibrate", "sleb", "--target", "nano-draft", "--data", "{lines}", "--out"],
    "corpus build": ["corpus", "build", "{lines}", "--tokenizer", "nano", "--out"],
    "export": ["export", "nano-eagle3", "--target", "nano", "--format", "vllm", "--out"],
    "shapes": ["shapes", "--target", "nano", "--data", "{lines}", "--model", "nano-draft", "--out"],
    "correct": ["correct", "{lines}", "--out"],
    "translate": ["translate", "{lines}", "--model", "nano-gec", "--out"],
    "bench": ["bench", "nano", "--html"],
}
FOLDERS = {"train", "train a draft model", "train a policy", "export", "shapes"}
# Paths that cannot be written, and what the message says
IMPOSSIBLE = {
    "{file}/x": "director|folder",
    "{file}/x/y": "director|folder",
    "/proc/none/x": "No such file|folder",
    "/dev/null/x": "director|folder",
    "{folder}/" + "long" * 90: "too long",
    "{folder}/null\0": "null",
    "/dev/null": "not a folder|not a regular file",
}


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The commands with an option for a path to write."""
    below = [one for name, sub in getattr(command, "commands", {}).items() for one in commands(sub, (*path, name))]
    own = [path] if any(set(WRITING) & set(param.opts) for param in command.params) else []
    return own + below


def test_all_commands_that_write_are_tried() -> None:
    tried = {" ".join(name.split(" a ")[0].split()) for name in COMMANDS}
    assert {" ".join(path) for path in commands(get_command(app))} == tried


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_impossible_place_is_refused_before_any_work(
    command: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def working(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    for module, name in ((loading, "load"), (_models, "load"), (_models, "accelerated"), (_models, "load_tokenizer")):
        monkeypatch.setattr(module, name, working)
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "lines.txt").write_text("once upon a time\n")
    given = [part.format(lines=tmp_path / "lines.txt") for part in COMMANDS[command]]
    assert main([*given, path.format(file=tmp_path / "lines.txt", folder=folder)]) == 2
    told = capsys.readouterr().err
    assert "corpus " in told if command == "corpus build" and "\0" not in path else given[-1] in told
    assert told.count("\n") == 1

    assert re.search(IMPOSSIBLE[path], told), told
    assert [*folder.iterdir()] == [] and sorted(tmp_path.iterdir()) == [folder, tmp_path / "lines.txt"]


def test_a_check_leaves_nothing_behind_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for path in (tmp_path / "a" / "b" / "c", tmp_path, tmp_path / "a"):
        check_folder(path, "--out")
    for path in (tmp_path / "new.txt", tmp_path / "kept"):
        check_file(path, "--out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "x")
    with pytest.raises(Refused, match="name a file in one that exists"):
        check_file(tmp_path / "link", "--out")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for check in (check_file, check_folder):
        with pytest.raises(Refused, match=r"--out cannot be written|is no folder"):
            check(tmp_path / "loop" / "x", "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link", "loop"]
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("spec", ["draft-model", "s2d:model=nano-draft", "lossy/dparallel"])
def test_a_training_does_not_replace_a_model_that_was_there(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one file or in shards, and no advice is given that would."""
    model, _ = load("nano-draft")
    target = "nano-diffusion" if "lossy" in spec else "nano"
    (tmp_path / "lines.txt").write_text("once upon a time\n" * 12)
    for size in ("5GB", "2MB"):
        mine = tmp_path / size
        model.save_pretrained(mine, max_shard_size=size)
        before = {path.name: path.read_bytes() for path in mine.iterdir()}
        given = ["--target", target, "--data", str(tmp_path / "lines.txt"), "--out", str(mine), "--minutes", "0.01"]
        assert main(["train", spec, *given]) == 2
        told = capsys.readouterr().err
        assert f"'{mine}' holds a checkpoint" in told and "give another folder" in told and "--resume" not in told
        assert {path.name: path.read_bytes() for path in mine.iterdir()} == before
    (mine / STATE).write_bytes(b"")
    assert main(["train", spec, *given]) == 2 and "go on from it with --resume" in capsys.readouterr().err


def test_a_head_is_not_written_over_another_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, run = tmp_path / "lines.txt", tmp_path / "run"
    lines.write_text("once upon a time\n" * 12)
    given = ["--target", "nano-draft", "--data", str(lines), "--max-new-tokens", "4", "--minutes", "0.01"]
    assert main(["train", "medusa:heads=2", *given, "--out", str(run)]) == 0
    before = (run / "drafter.safetensors").read_bytes()
    capsys.readouterr()
    for more in ([], ["--resume"]):
        assert main(["train", "hydra", *given, "--out", str(run), *more]) == 2
    assert "is a checkpoint of medusa" in capsys.readouterr().err
    assert main(["train", "hydra", *given, "--out", str(tmp_path / "new"), "--from", str(run)]) == 2
    assert "is a checkpoint of medusa" in capsys.readouterr().err
    assert (run / "drafter.safetensors").read_bytes() == before
    assert json.loads((run / "log.jsonl").read_text().splitlines()[0])
