"""Docs net: every block of code in the documents runs, or is a valid line of its command."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown_it import MarkdownIt
from typer.main import get_command

import docs
import truedraft
from truedraft import loading, packaged, registry
from truedraft.cli import EXAMPLES, app
from truedraft.declared import declared

pytestmark = pytest.mark.pythons

ROOT = Path(__file__).resolve().parents[1]
# the info strings of blocks; shell lines are indented; quotes are of the package's own source
PYTHON, QUOTE, SHELL = "python", docs.CODE, ""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STORY = "one day, a little girl named lily found a red ball"


class Block(NamedTuple):
    """A block of code. kind: its info string. line: the line on which it begins."""

    document: str
    line: int
    kind: str
    text: str


def blocks(document: str, text: str) -> Iterator[Block]:
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            yield Block(document, (token.map or [0])[0] + 1, token.info.strip(), token.content)


BLOCKS = [block for path in docs.DOCUMENTS for block in blocks(str(path.relative_to(ROOT)), path.read_text("utf-8"))]


METHODS = [block for block in BLOCKS if block.kind == PYTHON and block.document == "CONTRIBUTING.md"]
DRAFTER, *OWN_RULES = METHODS


def of_kind(kind: str) -> Any:
    """Blocks of a kind as parameters of a test, except those of CONTRIBUTING that are files."""
    found = [block for block in BLOCKS if block.kind == kind and block not in METHODS]
    return pytest.mark.parametrize("block", [pytest.param(b, id=f"{b.document}:{b.line}") for b in found])


def test_every_block_has_a_known_kind() -> None:
    assert {block.kind for block in BLOCKS} <= {PYTHON, QUOTE, SHELL}
    found = [
        b.kind for b in blocks("x", "```\na\n```\n\n```python\nb\n```\n\n    make c\n\n- d\n\n  ```json\n  e\n  ```\n")
    ]
    assert found == ["", "python", "", "json"]


def names(block: Block) -> dict[str, Any]:
    """The names that a block may use."""
    model, tokenizer = loading.load("nano-gec" if "Rewriter" in block.text else "nano")
    tokenizer.chat_template = TEMPLATE
    given: dict[str, Any] = {
        "truedraft": truedraft,
        "accelerate": truedraft.accelerate,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer(STORY, return_tensors="pt", return_token_type_ids=False),
        "document": STORY,
        "passages": [STORY],
    }
    if re.search(r"\b(fast|OpenAI)\b", block.text):
        given["fast"] = truedraft.accelerate(model, tokenizer)
    if "small_model" in block.text:
        given["small_model"] = loading.load("nano-draft")[0]
    return given


def check_installed(block: Block) -> None:
    """Skips a block with a model whose package is not installed."""
    for name in {*packaged.MODELS} - {*packaged.names()}:
        if f'"{name}"' in block.text:
            pytest.skip(f"{packaged.MODELS[name].name} is not installed")


@contextlib.contextmanager
def serving(fast: Any) -> Iterator[str]:
    """A server for a block that talks to one; yields its address."""
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from served import running

    with running(fast, reference={"code": Path("notes.txt")}) as server:
        yield server.url


@of_kind(PYTHON)
def test_python_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_installed(block)
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("He go home.\nShe have a cat.\n")
    given = names(block)
    given["model"].generation_config.max_new_tokens = 8
    text = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", block.text)
    with contextlib.ExitStack() as stack:
        if "OpenAI(" in text:
            text = text.replace("http://127.0.0.1:8000", stack.enter_context(serving(given["fast"])))
        exec(compile("\n" * block.line + text, block.document, "exec"), given)
    if expected := re.findall(r"^# prints: (.*)$", block.text, re.M):
        assert capsys.readouterr().out.splitlines() == expected


def test_the_first_snippet_of_the_readme_is_complete() -> None:
    block = next(block for block in BLOCKS if block.document == "README.md" and block.kind == PYTHON)
    check_installed(block)
    exec(compile(block.text, block.document, "exec"), {})


def imported(block: Block, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A block as a module."""
    path = tmp_path / f"{name}.py"
    path.write_text(block.text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    return module


def same_text(block: Block, **parts: Any) -> truedraft.Report:
    """The report of a call, after its text was compared with that of the model."""
    given = names(block)
    fast = truedraft.accelerate(given["model"], given["tokenizer"], control="fixed", **parts)
    settings = dict(max_new_tokens=24, do_sample=False)
    assert fast.generate(**given["inputs"], **settings).equal(given["model"].generate(**given["inputs"], **settings))
    return fast.report()


def test_the_drafter_of_contributing_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(DRAFTER, "my_idea", tmp_path, monkeypatch)
    knobs = inspect.signature(declared("my_idea").knobs).parameters
    assert list(knobs) == list(inspect.signature(module.MyIdea).parameters)
    assert all(re.search(rf"{knob}:.*# \w+", DRAFTER.text) for knob in knobs), "knobs are explained"
    report = same_text(DRAFTER, draft=module.MyIdea())
    assert report.drafter == "my-idea" and report.acceptance_rate is not None


@pytest.mark.parametrize(("block", "name"), zip(OWN_RULES, ("MyRule", "MyNodeRule"), strict=True))
def test_the_rules_of_contributing_accept(
    block: Block, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(block, name, tmp_path, monkeypatch)
    assert declared(name).presets == {}
    report = same_text(block, rule=getattr(module, name)())
    assert report.rule == name and report.guarantee == "tokens" and report.mean_acceptance_length > 1.1


def lines(text: str) -> list[list[str]]:
    """Command lines split into words as by a shell, without comments, each part of a pipe by itself."""
    joined = text.replace("\\\n", " ").splitlines()
    parts = [re.split(r"\s\|\s", line) for line in joined if line.strip()]
    return [words for line in parts for part in line if (words := shlex.split(part, comments=True))]


def check_line(words: list[str]) -> None:
    """Raises for a line whose command is unknown or would refuse it."""
    program, *args = words
    if program == "truedraft":
        check_command(args)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert args and {arg for arg in args if "=" not in arg} <= set(targets)
    elif program == "python":
        script = (ROOT / args[0]).read_text("utf-8")
        assert all(f'"{arg}"' in script for arg in args if arg.startswith("--"))
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        assert args[0] == "install" and set(re.findall(r"\w+", args[-1])) - {"truedraft"} <= set(extras)
    else:
        assert words[:2] == ["git", "show"], f"{program} is not a command of the documents"


def check_command(args: list[str]) -> None:
    """Parses a line of `truedraft`, and checks the drafters that it names."""
    command = get_command(app)
    while hasattr(command, "commands"):
        name, *args = args
        command = command.commands[name]
    given = command.make_context(name, list(args)).params
    drafts = given.get("draft") or []
    for draft in [drafts] if isinstance(drafts, str) else drafts:
        registry.check("drafters", draft)


@of_kind(SHELL)
def test_shell_lines_are_valid(block: Block) -> None:
    for words in lines(block.text):
        check_line(words)


@pytest.mark.parametrize("example", [*EXAMPLES.values(), "truedraft corpus info project.tdc"])
def test_examples_of_help_are_valid(example: str) -> None:
    check_line(shlex.split(example))


@pytest.mark.parametrize(
    "line",
    [
        "truedraft generate nano x --frob", "truedraft generate", "truedraft frobnicate",
        "truedraft bench --rounds many",
        "truedraft generate nano x --draft frob", "truedraft generate nano x --draft suffix:frob=1", "make frob",
        "pip install 'truedraft[frob]'", "python benchmarks/frob.py", "python benchmarks/stores.py --frob", "frob",
        'accelerate(model, quantize="int8")',
    ],
)  # fmt: skip
def test_an_invalid_line_is_found(line: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever the parsers raise
        for words in lines(line):
            check_line(words)
