"""Output for people: tables at any width, pages, ASCII terminals, closed pipes."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

import truedraft
from truedraft import registry
from truedraft.audit.laws import Law
from truedraft.audit.tokens import Audit, Compared, Divergence
from truedraft.bench import columns, page
from truedraft.bench.compare import Figures
from truedraft.bench.oracle import Attained
from truedraft.bench.replay import Replayed
from truedraft.bench.roofline import Machine, RooflinePoint
from truedraft.cli import _tables, audit, demo, main
from truedraft.cli._page import origin, processor
from truedraft.cli._text import console
from truedraft.errors import why
from truedraft.layout import Column, Table, fold, labelled
from truedraft.stats import Attribution, Emission, Pass, Report

WIDTHS = (60, 80, 120)
DRAFTER = "input-guided|suffix-wide|token-recycling>prompt-lookup-long"
WORKLOAD = "a-file-of-prompts-whose-name-describes-everything-that-there-is-in-the-whole-file"
MODEL = "/models/" + "of-a-folder-with-a-long-name/" * 3 + "model"
WAYS = ("transformers", "transformers assisted", DRAFTER, "<llma> & more")


def figures(rounds: int) -> list[Figures]:
    """Figures of two workloads, all different numbers."""
    numbers = random.Random(rounds)
    found = []
    for workload in (WORKLOAD, "edit"):
        for way in WAYS:
            of_ours = way == DRAFTER
            middle = 1.0 if way == "transformers" else numbers.uniform(9, 13)
            spread = 0.0 if way == "transformers" or rounds == 1 else 1.5
            found.append(
                Figures(
                    workload, way, 16, 0.7, "prompt 3, new token 17: 5 instead of 6" if way == WAYS[1] else None,
                    tokens=2345, tokens_per_second=numbers.uniform(10_000, 20_000),
                    time_to_first_token=numbers.uniform(1, 9), time_per_output_token=numbers.uniform(1, 9),
                    inter_token_latency=(numbers.uniform(1, 9), numbers.uniform(10, 90)),
                    passes=numbers.randint(100_000, 200_000) if of_ours else None,
                    mean_acceptance_length=numbers.uniform(2, 9) if of_ours else None,
                    acceptance_by_position=[0.9, 0.5, 0.1] * 9 if of_ours else [],
                    draft_share=0.21 if of_ours else None, target_share=0.62 if of_ours else None,
                    peak_memory=numbers.randint(1 << 33, 1 << 34),
                    speed_up=None if way == WAYS[1] else (middle, middle - spread, middle + spread),
                    against_no_drafts=1.23 if of_ours else None, bound=2.34 if of_ours else None, cut=2, texts=16,
                    as_undrafted=True if of_ours else None, as_model=way != WAYS[1],
                    apart={"unclassified": 3} if way == WAYS[1] else {}, agreement=0.5,
                )
            )  # fmt: skip
    return found


REPLAYED = [
    Replayed(WORKLOAD, kind, way, 80, 123_456, 45_678, 2.71, 31.4, None if way == "llma" else 0.17, 654.3)
    for kind in ("first turn", "second turn")
    for way in (DRAFTER, "llma")
]
ATTAINED = [Attained(WORKLOAD, 0.8, 4, 3.36, 2.91, 2.55), Attained("edit", 0.9, 8, 6.13, 4.44, 3.21)]
MACHINE = Machine(21.6e9, 98.7e9)
ROWS = [RooflinePoint(1, 0.00358, 0.00983, "reading"), RooflinePoint(64, 0.01795, 0.04755, "multiplying")]
DIFFERENCES = [
    Divergence(DRAFTER, "seed 0, temperature 1", 4, 11, 63, 5, -1, None, 0.55, 1.25, "numerics"),
    Divergence("llma", "greedy", 1, 2, 17, 5, 6, 0.016, 0.55, 1.25, "bug"),
]
LAWS = [
    Law("multi-round", DRAFTER, "temperature 0.7, top-p 0.9, repetition penalty 1.2", 54_321, 2.5, 0.034, 1e-5, 0.0123)
]


class WordTokenizer:
    """A tokenizer whose tokens are words."""

    added_tokens_decoder: dict[int, Any] = {}
    all_special_ids: list[int] = []

    def __len__(self) -> int:
        return 5000

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"word{i}" for i in ids]

    def decode(self, ids: list[int], **settings: Any) -> str:
        return "".join(f" word{i}" for i in ids)


def outcome(name: str) -> demo.Outcome:
    emitted = Emission(0, tuple(range(40)), 30, 32)
    report = Report(DRAFTER, "greedy", "tokens", "cost", "compiled pass", passes=[Pass(8, (emitted,))])
    ids = list(range(40))
    return demo.Outcome(demo.Case(name, "", 40), ids, ids, [2.0], [0.5], report)


TABLES: dict[str, Callable[[], Table[Any]]] = {
    "speed": lambda: columns.speed(figures(5), 5),
    "latency": lambda: columns.latency(figures(5), 5),
    "oracle": lambda: columns.with_oracle(ATTAINED),
    "roofline": lambda: columns.roofline(ROWS, MACHINE),
    "replayed": lambda: columns.replayed(REPLAYED, MODEL),
    "differences": lambda: audit._differences(DIFFERENCES, WordTokenizer()),
    "laws": lambda: audit._laws(LAWS),
    "demo": lambda: demo._table([outcome(WORKLOAD), outcome("edit")]),
}


@pytest.fixture
def printed() -> Callable[..., list[str]]:
    """The lines of a table on a terminal of a width and an encoding."""

    def lines(table: Table[Any], width: int, encoding: str = "utf-8") -> list[str]:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        _tables.print_table(Console(file=file, width=width, markup=False, highlight=False, emoji=False), table)
        file.flush()
        return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]

    return lines


def complete(name: str, lines: list[str]) -> bool:
    """Whether the lines have a name, whole or folded at the beginning of lines that follow each other."""
    return any(
        all(line.startswith(piece) for line, piece in zip(lines[at:], pieces, strict=False))
        for pieces in {tuple(fold(name, width)) for width in range(4, 121)}
        for at in range(len(lines) - len(pieces) + 1)
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", TABLES)
def test_table_keeps_figures_and_names_complete(kind: str, width: int, printed: Callable[..., list[str]]) -> None:
    table = TABLES[kind]()
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    names, *others = table.filled
    words = {word for line in lines for word in re.split(r"\s{2,}", line.strip())}
    for group, entries in table.groups.items():
        assert not group or complete(group, lines)
        for entry in entries:
            assert complete(names.cell(entry), lines)
            assert all(column.cell(entry) in words | {""} for column in others)
    explained = " ".join(" ".join(lines).split())
    assert all(" ".join(means.split()[:3]) in explained for _, means in table.legend)


def test_columns_without_room_follow_below_with_the_names(printed: Callable[..., list[str]]) -> None:
    table = columns.speed(figures(5), 5)
    parts = [sum(line.startswith("transformers  ") for line in printed(table, width)) // 2 for width in (60, 80, 160)]
    assert parts[0] > parts[1] >= parts[2] == 1


def test_empty_columns_are_left_out() -> None:
    table = Table("t", [Column("a", "", str), Column("b", "", lambda _: "")], {"": [1, 2]})
    assert [column.head for column in table.filled] == ["a"]


def test_interval_by_number_of_rounds() -> None:
    assert "from-to" not in [column.head for column in columns.speed(figures(1), 1).filled]
    assert "95 %" not in dict(columns.speed(figures(5), 5).legend)["from-to"]
    assert "95 %" in dict(columns.speed(figures(6), 6).legend)["from-to"]
    assert "medians" not in columns.speed(figures(1), 1).title


@pytest.mark.parametrize("seed", range(20))
def test_folded_text_is_complete(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(100):
        words = ["".join(numbers.choices("ab|+/-", k=numbers.randint(1, 30))) for _ in range(numbers.randint(0, 9))]
        width = numbers.randint(1, 40)
        lines = fold(" ".join(words), width)
        assert max(map(len, lines)) <= width and "".join(lines).replace(" ", "") == "".join(words)
        whole = " ".join(lines).split()
        assert all(word in whole for word in words if len(word) <= width)


def test_names_fold_after_their_separators() -> None:
    assert fold(DRAFTER, 30) == ["input-guided|suffix-wide|", "token-recycling>", "prompt-lookup-long"]
    assert fold("speed 12.5 tokens/s", 12) == ["speed 12.5", "tokens/s"]


def test_report_fits_in_sixty_columns() -> None:
    notes = [
        f"a note about {MODEL} that has many details, and gives them in a sentence that continues for quite a while"
    ]
    emissions = (Emission(0, (1, 2, 3), 2, 40), Emission(1, (4,), 0, 40))
    report = Report(
        DRAFTER, "seeded", "tokens", "cost", "compiled linear layers (there is no program for gpt_neox models)", notes,
        [Pass(0, emissions), Pass(41, emissions)], {"all": 2.0, "prefill": 0.5, "draft": 0.1, "target": 1.0},
        attributions=(Attribution(0, 1, 3, "references[0]", 7),),
    )  # fmt: skip
    text = str(report)
    assert max(map(len, text.splitlines())) <= 60
    flat = " ".join(text.split())
    for words in (
        "mean acceptance length 2.00", "2% of drafted nodes accepted", "4.0 tokens/s", "guarantee: tokens",
        "target 50%", "8 in 2 passes", "2 tokens copied, 1 spans of references[0]", "a note about",
    ):  # fmt: skip
        assert words in flat
    texts = [line[len("passes by  ") :] for line in text.splitlines()]
    assert "".join(texts).count(DRAFTER) == 1 and MODEL in "".join(texts)


@pytest.mark.parametrize(("given", "width"), [("60", 60), ("0", 120), ("", 120)])
def test_width_is_that_of_the_terminal(given: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", given)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    assert console().width == width


@pytest.mark.parametrize("width", WIDTHS)
def test_methods_at_a_width(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    flat = " ".join(" ".join(lines).split())
    for kind in registry.KINDS:
        for name in registry.names(kind):
            assert name in lines and registry.method(kind, name).card.idea in flat


@pytest.mark.parametrize("width", WIDTHS)
def test_audit_at_a_width(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = Audit(
        MODEL, "bfloat16", "float64", "compiled pass", [DRAFTER, "llma"], ["greedy", "seed 0, temperature 1"], [1, 4],
        7, 84, [Compared(DRAFTER, 42, 123_456)], 99, 0.86, 0.33, DIFFERENCES, interrupted=True,
    )  # fmt: skip
    audit._print(found, LAWS, {"swift": "it refuses this model"}, WordTokenizer())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    joined = "".join(line[len("differences  ") :] for line in lines)
    assert MODEL in joined and DRAFTER in joined
    assert "0 ties, 1 by numerics, 1 bugs" in " ".join(lines) and lines[-1].startswith("NOT exact")


class Ascii(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", TABLES)
def test_tables_on_an_ascii_terminal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Ascii()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("truedraft.cli.app", lambda *_, **__: _tables.print_table(Console(width=80), TABLES[kind]()))
    assert main(["any"]) == 0
    assert max(map(len, out.text().splitlines())) <= 80 and "---" in out.text()
    assert out.errors == "strict"


def test_text_on_an_ascii_terminal_has_substitutes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Ascii()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("truedraft.cli.app", lambda *_, **__: print("“it’s” – 2 × 5 µs… é 日 \ud800"))
    assert main(["any"]) == 0
    assert out.text() == '"it\'s" - 2 x 5 us... \\xe9 \\u65e5 \\ud800\n'


def command(*args: str, **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "truedraft", *args], stderr=subprocess.PIPE, text=True, **settings)


@pytest.mark.skipif(os.name != "posix", reason="pipes and descriptors of POSIX")
@pytest.mark.parametrize("args", [pytest.param(["methods"], marks=pytest.mark.slow), ["--help"]])
def test_closed_pipe_ends_the_command_as_usual(args: list[str]) -> None:
    with command(*args, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=100)) == ("", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_unwritable_output_is_reported_in_one_line() -> None:
    with open("/dev/full", "w") as full, command("--help", stdout=full) as process:
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(timeout=100)) == ("error: No space left on device\n", 2)


@pytest.mark.skipif(os.name != "posix", reason="pipes and descriptors of POSIX")
def test_closed_standard_output_is_refused_before_any_work() -> None:
    line = 'exec "$0" -m truedraft generate nano x >&-'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("error: standard output is closed")
    assert done.stderr.count("\n") == 1


def test_reasons_have_no_error_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert why(FileNotFoundError(2, "No such file", "x")) == "No such file"
    assert (
        why(ValueError("request to the hub: [Errno 111] Connection refused"))
        == "request to the hub: Connection refused"
    )
    assert why(KeyError()) == "KeyError"
    nowhere = str(tmp_path / "nowhere.jsonl")
    commands = [
        ["bench", "--prompts", nowhere],
        ["bench", "nano", "--replay", nowhere],
        ["generate", "nano", "--file", nowhere],
        ["generate", "nano", "--file", str(tmp_path)],
        ["correct", nowhere],
        ["train", "gad", "--target", "nano", "--data", nowhere, "--out", nowhere],
        ["corpus", "info", str(tmp_path)],
    ]
    for args in commands:
        assert main(args) == 2
        error = capsys.readouterr().err
        assert "Errno" not in error and error.count("\n") == 1 and error.count(str(tmp_path)) == 1, error


class Parsed(HTMLParser):
    """A page: its text, its elements, and whether every one that was opened was closed in its turn."""

    VOID = {"meta", "wbr", "br", "path"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def text(self, *within: str) -> str:
        return "".join(data for tag, data in self.words if not within or tag in within)

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


FACTS = {"model": MODEL, **origin(["bench", MODEL, "--draft", DRAFTER, "--html", "a <page>.html"])}


def measured(rounds: int) -> str:
    return page.measured(f"bench of {MODEL}", FACTS, figures(rounds), rounds, MACHINE, ROWS, ATTAINED)


@pytest.mark.parametrize("text", [measured(5), page.replayed("replay", FACTS, REPLAYED, MODEL, "no model & no logits")])
def test_page_is_valid_and_names_its_settings(text: str) -> None:
    parsed = Parsed(text)
    assert text.startswith("<!doctype html>") and next(parsed.of("html"))["lang"] == "en"
    (viewport,) = [meta["content"] for meta in parsed.of("meta") if meta.get("name") == "viewport"]
    assert viewport is not None and "width=device-width" in viewport
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.elements}
    assert "http" not in text and "url(" not in text and "prefers-color-scheme:dark" in text
    settings = parsed.text("dd")
    assert f"truedraft bench {MODEL} --draft '{DRAFTER}' --html 'a <page>.html'" in settings
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d", settings) and processor() in settings
    for package in (truedraft, torch, transformers):
        assert f"{package.__name__} {package.__version__}" in settings
    assert "mean acceptance length" in settings


@pytest.mark.parametrize("rounds", [1, 5])
def test_page_of_a_benchmark(rounds: int) -> None:
    parsed = Parsed(measured(rounds))
    text = parsed.text()
    for table in (columns.speed(figures(rounds), rounds), columns.latency(figures(rounds), rounds)):
        assert all(head in parsed.text("th") and means in parsed.text("dd") for head, means in table.legend)
        assert all(column.cell(f) in parsed.text("td", "th") for f in figures(rounds) for column in table.filled)
    assert f"{WORKLOAD}, batch 16, temperature 0.7, {WAYS[1]}: prompt 3, new token 17" in text
    assert all(way in parsed.text("span") for way in WAYS if way != WAYS[1]), "labels of bars are text that wraps"
    assert DRAFTER not in parsed.text("text"), "and not parts of drawings, which would cut them"
    whiskers = [span for span in parsed.of("span") if span.get("class") == "whisker"]
    assert len(whiskers) == (0 if rounds == 1 else 4) and ("One round was measured" in text) == (rounds == 1)
    assert ("from-to" in text) == (rounds > 1)


def test_bars_stay_within_their_tracks() -> None:
    for style in (span.get("style") or "" for span in Parsed(measured(5)).of("span")):
        widths = [float(number) for number in re.findall(r"(?:left|width):([\d.]+)%", style)]
        assert sum(widths) <= 100.02


def test_replay_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, html = tmp_path / "a.jsonl", tmp_path / "page.html"
    recorded.write_text(json.dumps({"prompt": "one day", "output": " a cat saw a cat and a cat saw a cat"}))
    assert main(["bench", "nano", "--replay", str(recorded), "--draft", "llma", "--html", str(html), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["replay"]
    parsed = Parsed(html.read_text())
    assert f"--replay {recorded}" in parsed.text("dd") and "no model was run" in parsed.text("p")
    assert f"{found['mean_acceptance_length']:.2f}" in parsed.text("td") and "llma" in parsed.text("span")
    assert main(["bench", "nano", "--replay", str(recorded), "--html", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_labelled_lines() -> None:
    assert labelled([("a", "b c"), ("long", "d"), ("none", "")], 8) == "a     b\n      c\nlong  d"
