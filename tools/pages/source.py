"""The package's source as documents show it: files of definitions, quoted definitions, signatures of contracts.

Everything is read from syntax trees, so that links follow files that move, and a name that was removed is an error.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "truedraft"
LINK = re.compile(r"\[`([\w.]+)`\]\(((?:\.\./)*src/truedraft/[^)]*)\)")  # a name in code, and the file that defines it


class Definition(NamedTuple):
    """Where a class, a function or an attribute is defined."""

    file: Path
    node: ast.stmt


class Unknown(Exception):
    """A document refers to a name that the source does not define."""


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def definitions() -> dict[str, list[Definition]]:
    """Name -> its definitions: of classes, functions and constants, and as `Class.name` of what classes contain."""
    found: dict[str, list[Definition]] = {}
    for file in files():
        for name, node in _defined(parsed(file).body):
            found.setdefault(name, []).append(Definition(file, node))
    return found


def _defined(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _defined(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield within + node.target.id, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield within + node.targets[0].id, node


def definition(name: str, present: Path | None = None) -> Definition:
    """The one definition of a name: of several that in the file `present`, or else the only class among them.

    Raises:
        Unknown: nothing has that name, or several things have.
    """
    known = definitions().get(name, [])
    found = known
    if len(known) > 1:
        here = [one for one in known if one.file == present]
        found = here or [one for one in known if isinstance(one.node, ast.ClassDef)]
    if len(found) != 1:
        where = ", ".join(str(one.file.relative_to(ROOT)) for one in known)
        raise Unknown(f"{name} is defined {f'in {where}: link to one of these' if where else 'nowhere'}")
    return found[0]


def link(name: str, document: Path, present: Path | None = None) -> str:
    """A name in code, linked to the file that defines it."""
    return f"[`{name}`]({relative(definition(name, present).file, document)})"


def relative(file: Path, document: Path) -> str:
    return Path(os.path.relpath(file, document.parent)).as_posix()


def linked(text: str, document: Path) -> str:
    """A document with every link from a name to its file updated to the file that defines the name."""

    def renewed(match: re.Match[str]) -> str:
        present = (document.parent / match[2]).resolve()
        return match[0] if present.name == match[1] and present.exists() else link(match[1], document, present)

    return LINK.sub(renewed, text)


def quoted(name: str) -> str:
    """The source of a definition, without the indentation of its class."""
    file, node = definition(name)
    lines = file.read_text("utf-8").splitlines()
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def signatures(name: str) -> str:
    """A contract: the class with its public fields and methods as in its file, without bodies."""
    file, node = definition(name)
    assert isinstance(node, ast.ClassDef)
    source = file.read_text("utf-8").splitlines()
    lines = source[node.lineno - 1 : node.body[0].lineno - 1]
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not _private(ast.unparse(part.target)):
            lines += source[part.lineno - 1 : part.end_lineno]
        elif isinstance(part, ast.FunctionDef) and not _private(part.name):
            if lines[-1].strip() and not lines[-1].endswith("..."):
                lines.append("")  # as the formatter has it, between fields and methods
            lines += [f"    @{ast.unparse(decorator)}" for decorator in part.decorator_list]
            lines += _signature(part, source)
    return "\n".join(lines)


def _private(name: str) -> bool:
    return name.startswith("_")


def _signature(node: ast.FunctionDef, source: list[str]) -> list[str]:
    lines = source[node.lineno - 1 : node.body[0].lineno - 1]
    if not lines:  # the body is on the same line
        return [source[node.lineno - 1]]
    return [*lines[:-1], f"{lines[-1]} ..."]


def summary(node: ast.AST) -> str:
    """The first sentence of a docstring, on one line."""
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    return " ".join(text.split("\n\n")[0].split())


CONTRACTS = ("Target", "View", "Learner")


def contracts() -> list[str]:
    """The signatures of the contracts that have no section of their own on the page."""
    lines: list[str] = []
    for name in CONTRACTS:
        if name in definitions():
            lines += [
                f"**{name}.** {summary(definition(name).node)}",
                "",
                "```python source",
                signatures(name),
                "```",
                "",
            ]
    return lines
