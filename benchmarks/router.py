"""A router on a row that changes its subject: the drafter chosen, over time.

    python benchmarks/router.py [--draft "input-guided|suffix|token-recycling"] [--html FILE]

The embedded model's tokenizer and texts, replayed (`truedraft bench --replay` explains the limits of a replay): a new
story, then the Python class of the prompt with one method renamed, then the same story once more.
"""

from __future__ import annotations

import argparse
from collections import Counter
from html import escape
from pathlib import Path

from rich.console import Console

from truedraft import assets, registry
from truedraft.bench.page import document
from truedraft.bench.plots import COLORS
from truedraft.bench.recordings import Recording
from truedraft.bench.replay import ReplayTarget, replayed
from truedraft.drafters._compose import Route, name_of
from truedraft.files import write_whole
from truedraft.loading import load_tokenizer
from truedraft.stopwatch import Stopwatch


def recording() -> tuple[Recording, list[tuple[str, int]], int]:
    """The row, the offset of each of its subjects, and the size of its vocabulary."""
    tokenizer = load_tokenizer("nano")
    code = assets.prompt("edit.py.txt")
    story = assets.prompt("stories.txt").replace("\n", " ")
    name = next(line.split("(")[0].split()[-1] for line in code.split("\n") if "def " in line and "__" not in line)
    subjects = [("a story", story), ("the class, a method renamed", code.replace(name, f"{name}_now"))]
    subjects.append(("the story again", story))
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in subjects]
    prompt = tokenizer(f"{code}\nTell a story, rename {name}, tell it again.\n", add_special_tokens=False)["input_ids"]
    begins, at = [], 0
    for (subject, _), ids in zip(subjects, texts, strict=True):
        begins.append((subject, at))
        at += len(ids)
    return Recording("", tuple(prompt), tuple(t for ids in texts for t in ids)), begins, len(tokenizer)


def chosen(draft: str) -> tuple[list[tuple[int, str, int]], list[tuple[str, int]]]:
    """(tokens emitted before, part chosen, tokens emitted) of every pass, and the offsets of the subjects."""
    row, begins, vocabulary = recording()
    router = registry.load("drafters", draft)
    if not isinstance(router, Route):
        raise SystemExit(f"--draft {draft!r} is no router: write parts with | between them")
    target = ReplayTarget(vocabulary)
    router.bind(target)
    control = registry.load("control", "fixed", nodes=16)
    passes = list(replayed(row, target, router, control, Stopwatch()))
    emitted, steps = 0, []
    names = [name_of(part) for part in router.parts]
    choices = {step: names[part] for _, step, part in router.history}
    for done in passes:
        tokens = sum(len(e.tokens) for e in done.emitted)
        if emitted in choices:
            steps.append((emitted, choices[emitted], tokens))
        emitted += tokens
    return steps, begins


def plot(steps: list[tuple[int, str, int]], begins: list[tuple[str, int]]) -> str:
    """A page: the part chosen (vertical) by tokens emitted (horizontal); marks are as high as the tokens of a pass."""
    parts = sorted({part for _, part, _ in steps})
    width, line, left = 900, 90, 150
    scale = (width - left - 20) / max(emitted + tokens for emitted, _, tokens in steps)
    shapes = []
    for subject, at in begins:
        x = left + at * scale
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{40 + line * len(parts)}" stroke="#999"/>')
        shapes.append(f'<text x="{x + 4:.1f}" y="16">{escape(subject)}</text>')
    for i, part in enumerate(parts):
        base = 30 + line * (i + 1)
        shapes.append(f'<text x="4" y="{base}">{escape(part)}</text>')
        for emitted, which, tokens in steps:
            if which == part:
                x, wide, high = left + emitted * scale, max(tokens * scale - 0.5, 0.6), min(4 * tokens, line - 10)
                shapes.append(
                    f'<rect x="{x:.1f}" y="{base - high}" width="{wide:.1f}" height="{high}" fill="{COLORS[i]}"/>'
                )
    svg = f'<svg viewBox="0 0 {width} {60 + line * len(parts)}">{"".join(shapes)}</svg>'
    explained = "<p>Tokens from left to right; a mark is a pass, its height the tokens emitted.</p>"
    return document("Which drafter the router chooses", [explained, svg])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="input-guided|suffix|token-recycling")
    parser.add_argument("--html", type=Path)
    given = parser.parse_args()
    steps, begins = chosen(given.draft)
    console = Console(width=120)
    ends = [at for _, at in begins[1:]] + [steps[-1][0] + 1]
    letters = {part: chr(ord("A") + i) for i, part in enumerate(sorted({part for _, part, _ in steps}))}
    console.print(", ".join(f"{letter} {part}" for part, letter in letters.items()), markup=False)
    for (subject, begin), end in zip(begins, ends, strict=True):
        inside = [(emitted, part, tokens) for emitted, part, tokens in steps if begin <= emitted < end]
        share = Counter(part for _, part, _ in inside)
        length = sum(tokens for *_, tokens in inside) / len(inside)
        shares = ", ".join(f"{part} {n / len(inside):.0%}" for part, n in share.most_common())
        console.print(f"{subject}: {len(inside)} passes, {length:.2f} tokens a pass; {shares}", markup=False)
        console.print("".join(letters[part] for _, part, _ in inside), markup=False)
    if given.html is not None:
        write_whole(given.html, plot(steps, begins))


if __name__ == "__main__":
    main()
