"""The generated parts of the documents: fresh, and in agreement with the source as imported."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import docs
from pages import methods, rooms, source
from truedraft import registry
from truedraft.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "page.md"
SOURCE = {
    line.strip() for file in sorted((ROOT / "src").rglob("*.py")) for line in file.read_text("utf-8").splitlines()
}


@pytest.mark.parametrize("document", docs.DOCUMENTS, ids=lambda path: path.name)
def test_a_document_is_fresh(document: Path) -> None:
    assert docs.filled(document.read_text("utf-8"), document) == document.read_text("utf-8"), "run python tools/docs.py"


def test_a_stale_part_is_rewritten_and_the_rest_kept() -> None:
    text = "before\n\n<!-- generated: quote Engine.step -->\n\nstale\n\n<!-- end -->\n\nbehind\n"
    fresh = docs.filled(text, PAGE)
    assert inspect.cleandoc("\n" + inspect.getsource(Engine.step)) in inspect.cleandoc(fresh)
    assert "stale" not in fresh and fresh.startswith("before\n") and fresh.endswith("\nbehind\n")
    assert docs.filled(fresh, PAGE) == fresh


def test_a_link_follows_its_name() -> None:
    where = os.path.relpath(inspect.getsourcefile(Engine) or "", PAGE.parent)
    assert docs.filled("x [`Engine.step`](../src/truedraft/gone.py) y", PAGE) == f"x [`Engine.step`]({where}) y"


@pytest.mark.parametrize(
    "text", ["[`Enginne`](../src/truedraft/engine.py)", "<!-- generated: frob -->\n<!-- end -->\n"]
)
def test_an_unknown_name_is_an_error(text: str) -> None:
    with pytest.raises(source.Unknown):
        docs.filled(text, PAGE)


def quotes(document: Path) -> list[str]:
    tokens = MarkdownIt().parse(document.read_text("utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info.strip() == docs.CODE]


def test_every_quoted_line_is_in_the_source() -> None:
    found = [quote for document in docs.DOCUMENTS for quote in quotes(document)]
    assert len(found) >= 4
    for quote in found:
        ast.parse(quote)
        for line in filter(None, map(str.strip, quote.splitlines())):
            assert line in SOURCE or line.removesuffix(" ...") in SOURCE, line


def test_listed_imports_are_those_at_run_time() -> None:
    """For rooms that import few others: the modules of the objects in them are among the listed imports."""
    found = rooms.imports()
    assert (
        "tree" in found["engine"]
        and "errors" in found["registry"]
        and found["tree"] == {"tree_shape"}
        and not found["tree_shape"]
    )
    for room in ("tree", "chance", "stats"):
        module = importlib.import_module(f"truedraft.{room}")
        used = {str(getattr(value, "__module__", "")) for value in vars(module).values()}
        assert {name.split(".")[1] for name in used if name.startswith("truedraft.")} - {room} <= found[room]


def test_imported_rooms_are_in_lower_layers() -> None:
    assert rooms.layers({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [[("a",)], [("b", "c"), ("d",)]]
    found = rooms.imports()
    level = {room: i for i, groups in enumerate(rooms.layers(found)) for group in groups for room in group}
    together = {room: group for groups in rooms.layers(found) for group in groups for room in group}
    assert set(level) == set(found)
    assert all(level[o] > level[r] or together[o] == together[r] for r, others in found.items() for o in others)


def test_every_room_is_listed_with_its_docstring() -> None:
    text = "\n".join(rooms.table(PAGE))
    for init in (ROOT / "src" / "truedraft").rglob("__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT / "src").parts)
        if package != "truedraft":
            module = sys.modules.get(package) or importlib.import_module(package)
            assert " ".join((module.__doc__ or "").split("\n\n")[0].split()) in text


def test_new_things_fulfil_their_contracts_and_are_registered_as_listed() -> None:
    lines = rooms.new_things(PAGE)[2:]
    methods_of = {registry.method(kind, name) for kind in registry.KINDS for name in registry.names(kind)}
    by_name = {method.__name__: method for method in methods_of}
    for line, (contracts, example) in zip(lines, rooms.NEW_THINGS.values(), strict=True):
        assert line.endswith("| by its file name |") == (example in by_name), line
        if example in by_name:
            assert contracts[0] in {base.__name__ for base in by_name[example].__mro__}


def test_figures_are_of_methods_that_exist_and_all_are_printed() -> None:
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    for kind, of_kind in json.loads(methods.MEASURED.read_text("utf-8")).items():
        for name, figures in of_kind.items():
            assert name in registry.names(kind)
            section = page.split(f"### {methods.heading(kind, name)}\n")[1].split("\n### ")[0]
            for figure in figures:
                assert set(figure) - {"note"} == {"what", "value", "unit", "setting", "machine", "command"}
                assert re.search(rf"{re.escape(figure['what'])} {re.escape(str(figure['value']))}", section)


def test_the_index_has_every_method_once_and_its_links_lead_to_sections() -> None:
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    headings = {re.sub(r"[`/:]", "", h).replace(" ", "-").lower() for h in re.findall(r"^#+ (.+)$", page, re.M)}
    linked = re.findall(r"\]\(#([\w-]+)\)", page)
    assert len(linked) == len(set(linked)) == sum(len(registry.names(kind)) for kind in registry.KINDS)
    assert set(linked) <= headings
