"""The example drafter of CONTRIBUTING, added in both ways: as a file, and as an entry point of a package."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import truedraft
from truedraft import loading, registry
from truedraft.cli import app

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text("utf-8")
BLOCK = next(token.content for token in MarkdownIt().parse(TEXT) if token.type == "fence" and "PerRow" in token.content)
STORY = "one day, a little girl named lily found a red ball"


def clear_registry() -> None:
    """Clear the registry's caches of files and entry points."""
    for found in vars(registry).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, entry: str) -> None:
    """Make a folder with a module an installed package whose entry point in a group is `name = module:Class`, until
    `monkeypatch.undo` and `clear_registry`."""
    name, module = entry.split(" = ")[0], entry.split(" = ")[1].split(":")[0]
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    monkeypatch.syspath_prepend(str(folder))
    clear_registry()


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The block as a file of the package, or as a package of its own with an entry point; by `request.param`."""
    (tmp_path / "my_idea.py").write_text(BLOCK)
    if request.param == "file":
        path = re.search(r"Create `src/([\w/]+)/my_idea\.py`", TEXT)
        assert path is not None
        package = importlib.import_module(path[1].replace("/", "."))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        clear_registry()
    else:
        group = re.search(r"entry-point group `(truedraft\.\w+)`", TEXT)
        assert group is not None
        install(tmp_path, monkeypatch, group[1], "my-idea = my_idea:MyIdea")
    yield
    monkeypatch.undo()
    clear_registry()


@pytest.mark.parametrize("registered", ["file", "entry point"], indirect=True)
def test_example_drafter_runs_by_its_name(registered: None) -> None:
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert "my-idea" in [entry["name"] for entry in listed["drafters"]]
    model, tokenizer = loading.load("nano")
    inputs = tokenizer(STORY, return_tensors="pt", return_token_type_ids=False)
    settings = dict(max_new_tokens=24, do_sample=False)
    fast = truedraft.accelerate(model, tokenizer, draft="my-idea:length=2", control="fixed")
    assert fast.generate(**inputs, **settings).equal(model.generate(**inputs, **settings))
    report = fast.report()
    assert report.drafter.startswith("my-idea") and report.acceptance_rate is not None
    assert max(len(emission.tokens) for p in report.passes for emission in p.emitted) <= 3
    with pytest.raises(truedraft.Refused, match="my-idea has no knob 'lenght': did you mean 'length'"):
        truedraft.accelerate(model, tokenizer, draft="my-idea:lenght=2")


VIEW = """
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Reduction, View


@dataclass(frozen=True)
class Last(View):
    card = Card(paper="none", idea="Without the last layers.", family="self-drafting")
    count: int = knob(1, 1, 8)

    def reduction(self, layers: int) -> Reduction:
        last = frozenset(range(layers - self.count, layers))
        return Reduction(last, last)
"""


def test_view_of_another_package_drafts_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "last_layers.py").write_text(VIEW)
    install(tmp_path, monkeypatch, "truedraft.views", "last-layers = last_layers:Last")
    command = ["generate", "nano", STORY, "--max-new-tokens", "16", "--json", "--draft"]
    drafted = CliRunner().invoke(app, [*command, "last-layers:count=1+early-exit:depth=4"])
    plain = CliRunner().invoke(app, [*command, "none"])
    monkeypatch.undo()
    clear_registry()
    assert json.loads(drafted.stdout)["text"] == json.loads(plain.stdout)["text"]


def test_example_drafter_is_unregistered_afterwards() -> None:
    assert "my-idea" not in registry.names("drafters")
