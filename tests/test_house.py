"""House net: cards complete, knobs commented, imports in one direction, files short, every method in every net."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from nets import PROCESSORS, REGISTERED, RULES
from test_text import ROWS, SETTINGS, cases
from truedraft import registry
from truedraft.card import Range, Switch, values_of
from truedraft.declared import declared
from truedraft.drafters import _compose

SOURCE = Path(__file__).resolve().parents[1] / "src" / "truedraft"
METHODS = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_cards_are_complete_and_knobs_commented(kind: str, name: str) -> None:
    method = registry.method(kind, name)
    card = method.card
    assert card.paper and card.idea.endswith(".") and card.family
    assert dataclasses.is_dataclass(method), "the knobs are dataclass fields"
    source = inspect.getsource(method)
    comments = {
        t.start[0]: t.string
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    lines = source.split("\n")
    for field in dataclasses.fields(method):
        if not field.name.startswith("_"):
            (at,) = [i for i, line in enumerate(lines, 1) if re.match(rf"\s+{field.name}\s*:", line)]
            assert len(comments.get(at, "")) > 5, f"{name}.{field.name} has no trailing comment"
    assert (sys.modules[method.__module__].__doc__ or "").strip(), "the file has a docstring"


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_declaration_read_from_source_equals_the_imported_one(kind: str, name: str) -> None:
    method = registry.method(kind, name)
    read = declared(method.__module__)
    assert dict(read.presets) == dict(method.card.presets)
    knobs, found = inspect.signature(method).parameters, inspect.signature(read.knobs).parameters
    assert {k: p.default for k, p in found.items()} == {k: p.default for k, p in knobs.items()}
    ranges = {k: v if isinstance(v, Range | Switch) else None for k, v in ((k, values_of(method, k)) for k in knobs)}
    assert ranges == {k: values_of(read.knobs, k) for k in found}


def test_signs_of_compositions() -> None:
    assert "".join(_compose.KINDS) == registry.SIGNS


def test_presets_can_be_built() -> None:
    for kind in registry.KINDS:
        for preset in registry.presets(kind):
            registry.load(kind, preset)


def test_every_registered_drafter_and_preset_has_its_cases() -> None:
    covered = {name: [case[1:] for case in cases() if case[0] == name] for name in REGISTERED}
    product = {(rule, rows, processors) for rule, processors in SETTINGS for rows in ROWS}
    for name in registry.names("drafters"):
        assert [{*values} for values in zip(*covered[name], strict=True)] == [{*RULES}, {*ROWS}, {*PROCESSORS}]
    assert {case for name in registry.names("drafters") for case in covered[name]} == product
    for name in registry.presets("drafters"):
        assert {rule for rule, _, _ in covered[name]} == set(RULES)


# package -> the packages of truedraft that it may import from; the engine imports contracts only
ALLOWED = {
    # registry: a cascade loads its last drafter by name; runtime: a drafter's own modules run by the compiled code
    # that runs targets; caches: of such modules; canvas: the passes of diffusion models; text: the bytes of tokens
    "drafters": {"assets", "registry", "identity", "runtime", "caches", "views", "canvas", "text"}
    | {"tree", "tree_shape", "card", "chance", "sampling", "errors", "drafters", "targets", "loading", "stores"},
    "accept": {"tree", "card", "chance", "sampling", "stopping", "stats", "errors", "accept", "stores", "delegate"},
    "control": {"tree", "card", "errors", "stats", "control", "drafters", "runtime", "targets"},
    "targets": {"tree", "caches", "runtime", "errors", "identity", "targets", "views"},
    # drafters: the contract of what is learned, and checkpoints of it
    "views": {"tree", "card", "errors", "files", "identity", "views", "drafters"},
    "caches": {"tree", "errors", "caches"},
    "runtime": {"tree", "caches", "errors", "files", "identity", "runtime", "views"},
    # registry: policies and speculators by name; call, standin, stopwatch: the surroundings of a call; stores: the
    # format of files; loading: guides by name
    "canvas": {"canvas", "caches", "runtime", "targets", "errors", "card", "stats", "call", "standin"}
    | {"stopwatch", "registry", "stores", "loading"},
    "chains": {"tree"},
    "engine": {"tree", "chains", "request", "cohort", "stats", "accept", "drafters", "control", "targets"},
    "reading": {"tree", "request", "engine", "caches", "control", "targets", "runtime"},
    "cohort": {"tree", "request", "drafters"},
    "request": {"tree", "chance", "sampling", "stopping", "stats", "accept", "drafters", "logprobs"},
    "tree": {"tree_shape"},
    "tree_shape": set(),
    "chance": {"tree", "errors", "stores"},
    "sampling": {"tree", "errors", "logprobs"},
    "logprobs": {"tree", "errors"},
    "stopping": {"tree", "sampling"},
    "stats": {"layout"},
    "layout": set(),
    "card": {"errors"},
    "delegate": set(),
    "errors": set(),
    "files": {"errors"},
    "identity": {"errors"},
    # accelerated: drafters are trained on outputs of their target; drafters: the contract of learned drafters;
    # runtime: the target's hidden states; bench: its plots; canvas: filters of policies; card: knobs of trainings;
    # registry: a reference by name; tree: the passes whose time is measured
    "train": {"errors", "files", "train", "accelerated", "drafters", "stores", "runtime", "bench", "canvas"}
    | {"card", "registry", "tree"},
    # runtime: the hidden states of given texts
    "stores": {"tree", "card", "errors", "files", "stores", "runtime"},
    "registry": {"card", "declared", "errors"},
    "declared": {"card"},
    "packaged": {"errors"},
    "loading": {
        "assets",
        "packaged",
        "errors",
        "runtime",
        "targets",
        "canvas",
    },  # canvas: the layouts that configurations declare
    "assets": {"errors"},
}


def imports(file: Path) -> set[str]:
    found = set()
    whole = ast.parse(file.read_text())
    typing = [part for part in whole.body if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"]
    for node in [node for part in whole.body if part not in typing for node in ast.walk(part)]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("truedraft"):
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
            assert (
                len(rest) < 2 or rest[0] not in ("drafters", "accept", "control", "views") or rest[-1].startswith("_")
            ), f"{file.name} names the method {rest[-1]}"
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_follow_the_table_and_files_are_short(file: Path) -> None:
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ALLOWED:
        assert imports(file) <= ALLOWED[room] | ({"drafters"} if room == "control" else set())
    else:
        imports(file)
    assert len(file.read_text().splitlines()) <= 700
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1  # the signature of a command is its options
            assert lines <= 60, f"{node.name} has {lines} lines"


@pytest.mark.parametrize(
    "file", [file for file in FILES if "targets" not in file.relative_to(SOURCE).parts], ids=lambda f: f.name
)
def test_only_targets_distinguish_kinds_of_targets(file: Path) -> None:
    source = file.read_text()
    assert "is_encoder_decoder" not in source
    imported = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert not imported & {"truedraft.targets.decoder", "truedraft.targets.seq2seq"}, "hosted(model) makes a target"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions and for type checkers are counted, but for that of the type of `tree.Row.request`."""
    modules = {_module(file): file for file in FILES}
    arrows = {name: _imported(file, modules) - {name} for name, file in modules.items()}
    arrows["truedraft.tree"].discard("truedraft.request")
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_families_of_drafters_do_not_import_each_other() -> None:
    families = {folder.name for folder in (SOURCE / "drafters").iterdir() if (folder / "__init__.py").exists()}
    modules = {_module(file): file for file in FILES}
    for name, file in modules.items():
        if name.startswith("truedraft.drafters.") and (family := name.split(".")[2]) in families:
            drafters = [other for other in _imported(file, modules) if other.startswith("truedraft.drafters.")]
            assert not {other.split(".")[2] for other in drafters} & families - {family}, name


def _module(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("truedraft", *parts)).removesuffix(".__init__")


def _imported(file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "truedraft":
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys() or {node.module}
    return found


def test_no_name_is_an_everyday_word() -> None:
    """Names that the package defines: of files, classes, functions, arguments, attributes and variables."""
    banned = {"dress", "heard", "hope", "hopes", "listening", "said", "tips", "told", "trust", "turned"}
    banned |= {"wants", "wave", "worth"}

    def everyday(source: str) -> set[str]:
        nodes = list(ast.walk(ast.parse(source)))
        names = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
        names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        words = {name: {w.lower() for w in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)} for name in names}
        return {name for name in names if words[name] & banned}

    sample = "class PairListening: ...\ndef f(_told, x):\n    x.hopes_of, WORTH, wavelength = 1, 2, 3"
    assert everyday(sample) == {"PairListening", "_told", "hopes_of", "WORTH"}
    found = {str(file.relative_to(SOURCE)): everyday(f"{file.stem} = 0\n{file.read_text()}") for file in FILES}
    assert not any(found.values()), {file: names for file, names in found.items() if names}
