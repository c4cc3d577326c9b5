"""Tables of passes over the weights of real files: beside llama.cpp, by width, and in large pages."""

from __future__ import annotations

from pages.figures import _results, _table


def quantised(of: str = "quantised") -> list[str]:
    """Files of GGUF by llama.cpp and without drafts here: plain decoding and prompts."""
    rows = [row for row in _results(of) if "plain" in row]
    engines = ("llama.cpp", "float32", "bfloat16")
    table = [
        [
            row["model"], *(f"{row['plain'][engine]:.1f}" for engine in engines),
            *(f"{row['prompt'][engine]:.0f}" for engine in engines),
            f"{row['plain_ratio']['bfloat16']:.2f}, {row['prompt_ratio']['bfloat16']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = [f"{what}, {engine}" for what in ("plain", "prompts") for engine in engines]
    return _table(["file", *head, "bfloat16 over llama.cpp"], table)


def widths(of: str = "quantised") -> list[str]:
    """Passes over several tokens in files of GGUF, in passes over one."""
    rows = [row for row in _results(of) if "widths" in row]
    table = [
        [
            row["model"],
            f"{row['widths']['1']:.1f}",
            *(f"{ms / row['widths']['1']:.2f}" for ms in row["widths"].values()),
        ]
        for row in rows
    ]
    return _table([f"file, {rows[0]['dtype']}", "ms of one token", *rows[0]["widths"]], table)


def large_pages() -> list[str]:
    """Passes over weights in pages of 4 KB, over those in pages of 2 MB."""
    table = []
    for row in _results("large_pages"):
        small, large = row["milliseconds"].values()
        ratios = (f"{ms / large[width]:.2f}" for width, ms in small.items())
        table.append([row["model"], f"{row['threads']}", f"{small['1']:.1f}", f"{large['1']:.1f}", *ratios])
    return _table(["model", "threads", "ms, 4 KB", "ms, 2 MB", *(f"at {width}" for width in small)], table)


def answers(of: str = "quantised") -> list[str]:
    """Answers to nine requests by llama.cpp and here, prompts counted."""
    rows = [row for row in _results(of) if "answers" in row]
    table = [
        [
            row["model"],
            *(f"{speed:.1f}" for speed in row["answers"].values()),
            f"**{row['default_over_llama.cpp']:.2f}**",
        ]
        for row in rows
    ]
    return _table(["file", *rows[0]["answers"], "default over llama.cpp's better way"], table)
