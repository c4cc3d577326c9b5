"""Files and settings as users give them: a byte order mark is no part of a text, and refusals name options."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from truedraft.bench.workloads import items_of
from truedraft.cli import main
from truedraft.cli._conversation import from_lines
from truedraft.cli._options import as_options
from truedraft.cli._request import read_prompt
from truedraft.cli._text import read
from truedraft.cli.train import lines_of
from truedraft.drafters.routing._specialists import read_file
from truedraft.errors import Refused
from truedraft.serve.config import ServeConfig, configured
from truedraft.serve.keys import read_keys

MARK = b"\xef\xbb\xbf"
READERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "prompts of JSON": (items_of, "a.jsonl", '{"prompt": "one day"}\n{"prompt": "a cat"}\n'),
    "prompts of text": (items_of, "a.txt", "one day\n\na cat\n"),
    "a prompt": (lambda path: read_prompt(None, path), "a.txt", "one day\n"),
    "a reference": (lambda path: read(path, "--reference"), "a.txt", "one day"),
    "training data of JSON": (lines_of, "a.jsonl", '{"prompt": "one day", "response": "a cat"}\n'),
    "training data of tabs": (lines_of, "a.tsv", "one day\ta cat\n"),
    "a conversation": (from_lines, "a.jsonl", '{"role": "user", "content": "hi"}\n'),
    "settings of a server": (lambda path: configured(path, {}), "a.toml", 'model = "nano"\n'),
    "keys": (lambda path: read_keys(path).namespaces, "keys", "ann=0123456789abcdef\n"),
    "specialists": (lambda path: read_file("text-routing", path), "a.toml",
                    '[code]\ndraft = "suffix"\nexamples = ["x = 1"]\n'),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_a_byte_order_mark_is_no_part_of_a_file(case: str, tmp_path: Path) -> None:
    reader, name, text = READERS[case]
    found = []
    for mark in (b"", MARK):
        file = tmp_path / name
        file.write_bytes(mark + text.encode())
        os.chmod(file, 0o600)
        found.append(reader(file))
    assert found[0] == found[1]


def test_a_byte_order_mark_is_no_part_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffone day\n"))
    assert read_prompt("-", None) == "one day"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("max_new_tokens=5 is too much", "--max-new-tokens 5 is too much"),
        ("set max_new_tokens to at most 5", "set --max-new-tokens to at most 5"),
        ("`top_k` has to be", "`--top-k` has to be"),
        ("stop_strings=['a'] need a tokenizer", "--stop ['a'] need a tokenizer"),
        ("rule='greedy' does not sample, and do_sample is True", "--rule greedy does not sample, and --sample is True"),
        ("gad needs a head: draft='gad:FOLDER'", "gad needs a head: --draft gad:FOLDER"),
        ("a draft of a rule", "a draft of a rule"),
        ("call accelerate(draft='suffix', max_new_tokens=5)", "call accelerate(draft='suffix', --max-new-tokens 5)"),
        ("draft-model:max_new_tokens=5", "draft-model:max_new_tokens=5"),
        ("--max-new-tokens 5 must be", "--max-new-tokens 5 must be"),
        ("no_such_option=5", "no_such_option=5"),
    ],
)
def test_arguments_are_named_as_options(message: str, named: str) -> None:
    names = ("max_new_tokens", "top_k", "stop", "eos", "sample", "rule", "draft", "view")
    assert as_options(message, {name: "--" + name.replace("_", "-") for name in names}) == named


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "nano", "x", "--ties", "maybe"], "--ties maybe: give"),
        (["generate", "nano", "x", "--rule", "greedy", "--sample"], "--rule greedy does not sample"),
        (["generate", "nano", "x", "--view", "sleb"], "--view sleb is an approximation"),
        (["bench", "nano", "--draft", "rest"], "--draft rest:corpus=FILE"),
    ],
)
def test_refusals_of_commands_name_their_options(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (_, err) = main(args), capsys.readouterr()
    assert (code, err.count("\n")) == (2, 1) and words in err
    assert "max_new_tokens" not in err and "rule=" not in err and "view=" not in err and "draft=" not in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_rows": "many"}, "give a whole number"),
        ({"max_rows": 1.5}, "give a whole number"),
        ({"deadline": "soon"}, "give a number"),
        ({"page": "yes"}, "give true or false"),
        ({"reference": "a.txt"}, "give a table of names and paths"),
        ({"allow_draft": "suffix"}, "give a list of texts"),
    ],
)
def test_settings_of_another_type_are_refused_with_what_to_give(given: dict[str, Any], words: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(Refused, match=rf"^{name}={value!r}: {words}"):
        ServeConfig(model="nano", **given)


def test_sizes_of_a_server_may_be_written_as_floats() -> None:
    assert json.dumps(ServeConfig(model="nano", max_rows=4.0).max_rows) == "4"  # type: ignore[arg-type]
