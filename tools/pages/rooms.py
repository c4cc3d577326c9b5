"""The rooms of the package, the files in each, and which way imports point: read from folders and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from pages.source import PACKAGE, Unknown, definition, files, link, parsed, relative, summary
from truedraft import registry


def rooms() -> dict[str, Path]:
    """Dotted name -> folder, of every package below the top one."""
    found = {file.parent for file in files() if file.name == "__init__.py"} - {PACKAGE}
    return {".".join(folder.relative_to(PACKAGE).parts): folder for folder in sorted(found)}


def table(document: Path) -> list[str]:
    """Every room with the summary of its docstring, its shared parts (`_name.py`) and its other files."""
    lines = ["| room | what it holds | files | shared parts |", "|---|---|---|---|"]
    for name, folder in rooms().items():
        text = summary(parsed(folder / "__init__.py"))
        if not text:
            raise Unknown(f"the package {name} has no docstring")
        inside = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
        own, shared = [n for n in inside if n[0] != "_"], [n for n in inside if n[0] == "_"]
        where = f"[`{name.replace('.', '/')}/`]({relative(folder, document)})"
        lines.append(f"| {where} | {text} | {_names(own)} | {_names(shared)} |")
    return lines


def single(document: Path) -> list[str]:
    """Every module outside of the rooms, with the summary of its docstring."""
    lines = ["| file | what it is |", "|---|---|"]
    for file in files():
        if file.parent == PACKAGE and not file.stem.startswith("_"):
            lines.append(f"| [`{file.name}`]({relative(file, document)}) | {summary(parsed(file))} |")
    return lines


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def imported(file: Path) -> set[str]:
    """The rooms and modules of the package that a file imports from, imports for type checkers left out."""
    found: set[str] = set()
    for part in parsed(file).body:
        if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING":
            continue
        for node in ast.walk(part):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
                rest = str(node.module).split(".")[1:]
                found |= {rest[0]} if rest else {alias.name for alias in node.names}
    return found


def imports() -> dict[str, set[str]]:
    """Room, or module outside of the rooms -> the others that it imports from."""
    found: dict[str, set[str]] = {}
    for file in files():
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not room.startswith("__"):
            found.setdefault(room, set()).update(imported(file))
    return {room: {other for other in others if other in found and other != room} for room, others in found.items()}


def layers(of: Mapping[str, Iterable[str]]) -> list[list[tuple[str, ...]]]:
    """Layers, the topmost first: each imports from lower ones alone. Rooms that import each other share an entry."""
    reached = {room: _reached(room, of) for room in of}
    groups = {tuple(sorted({room, *(o for o in reached[room] if room in reached[o])})) for room in of}
    left, found = sorted(groups), []
    while left:
        level = [g for g in left if not any(set(other) & reached[g[0]] for other in left if other != g)]
        found.append(level)
        left = [g for g in left if g not in level]
    return found[::-1]


def _reached(room: str, of: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    left = list(of[room])
    while left:
        if (other := left.pop()) not in found:
            found.add(other)
            left += of[other]
    return found


def directions() -> list[str]:
    """The layers as a list; a room imports from lines below its own, and rooms joined by an arrow from each other."""
    lines = []
    for level in layers(imports()):
        names = [" ↔ ".join(f"`{room}`" for room in group) for group in level]
        lines.append(f"{len(lines) + 1}. {', '.join(names)}")
    return lines


# what is new -> the contracts that it fulfils, and an example whose folder its file goes to
NEW_THINGS = {
    "a lookup drafter": (("PerRow",), "PromptLookup"),
    "a draft-model tree": (("ShapedDrafter",), "OptTree"),
    "a learned drafter (head)": (("Drafter", "Learner"), "Gad"),
    "an acceptance rule, by row": (("Rule",), "Block"),
    "an acceptance rule, by node": (("NodeRule",), "Rejection"),
    "a lossy rule": (("LossyRule",), "Typical"),
    "a control": (("Control",), "Fixed"),
    "a view": (("View",), "SkipLayers"),
    "a kind of target": (("Target",), "Seq2SeqTarget"),
}


def new_things(document: Path) -> list[str]:
    """What is new: the folder of its file, the contracts that it fulfils, an example, and whether it is registered."""
    lines = ["| new | folder of its one file | fulfils | example | registered |", "|---|---|---|---|---|"]
    for thing, (contracts, example) in NEW_THINGS.items():
        folder = definition(example).file.parent
        kinds = [PACKAGE.joinpath(*kind.split(".")) for kind in registry.KINDS]
        lines.append(
            f"| {thing} | [`{folder.relative_to(PACKAGE)}/`]({relative(folder, document)}) "
            f"| {', '.join(link(contract, document) for contract in contracts)} | {link(example, document)} "
            f"| {'by its file name' if any(folder.is_relative_to(kind) for kind in kinds) else 'no'} |"
        )
    return lines
