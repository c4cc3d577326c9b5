"""Methods by name: a file's name is its registration.

`drafters/lookup/prompt_lookup.py` is the drafter `prompt-lookup`: folders group methods and are no part of their names,
and files that begin with an underscore are no methods. Packages outside register with an entry-point group per kind
(`truedraft.drafters`, `truedraft.accept`, `truedraft.accept.lossy`, `truedraft.control`, `truedraft.views`,
`truedraft.canvas.policies`, `truedraft.canvas.policies.lossy`, `truedraft.canvas.speculators`,
`truedraft.canvas.subsets`, `truedraft.canvas.views`), each entry pointing to a class.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any

from truedraft.card import shown, values_of
from truedraft.declared import declared
from truedraft.errors import Refused


@dataclass(frozen=True)
class Wanted:
    """A method that a spec names.

    kind, name, knobs: of the method. asked: the name in the spec, which may be a preset's.
    """

    kind: str
    name: str
    knobs: dict[str, Any]
    asked: str

    def made(self, spec: str) -> Any:
        """An instance, which knows by which name it was asked for (see `card.lacking`); `spec` is for messages."""
        made = built(method(self.kind, self.name), self.name, spec, self.knobs)
        object.__setattr__(made, "asked", self.asked)
        return made

    def check(self, spec: str) -> None:
        """The checks of `made` for knobs, without importing the method."""
        if self.name in _files(self.kind):
            built(declared(_files(self.kind)[self.name]).knobs, self.name, spec, self.knobs)


@dataclass(frozen=True)
class Kind:
    """A kind of methods; its methods are the files of its package, in folders or not.

    base: their base class, in the package's `_base`.
    noun: its name in messages.
    title, use: heading and introduction of a list of them.
    argument: the argument of `accelerate`, and the option of commands, for such a method.
    spelling: the form of a name there.
    models: those that take it.
    """

    base: str
    noun: str
    title: str
    use: str
    argument: str
    spelling: str
    models: str = "models that write one token after another"


DIFFUSION, SUBSET = "diffusion models", "any-subset models"
KINDS = {
    "drafters": Kind(
        "Drafter", "drafter", "Drafters", "Sources of drafts; knobs as in `NAME:knob=value`.", "draft", "NAME",
    ),
    "accept": Kind("Rule", "acceptance rule", "Acceptance rules", "How much of a draft is kept.", "rule", "NAME"),
    "accept.lossy": Kind(
        "LossyRule", "lossy rule", "Lossy rules", "Text that differs from the model's own; only by explicit choice.",
        "rule", "lossy/NAME",
    ),
    "control": Kind("Control", "control", "Controls", "How much is drafted and verified.", "control", "NAME"),
    "views": Kind(
        "View", "view", "Views",
        "The target drafts for itself, run lighter; `a+b` is both at once, in `a<b` the drafter b drafts for a. "
        "`view=lossy/NAME` generates so.",
        "draft", "NAME",
    ),
    "canvas.speculators": Kind(
        "Speculator", "speculator of diffusion models", "Speculators of diffusion models",
        "Canvases that later steps may reach, verified in one pass.", "draft", "NAME", DIFFUSION,
    ),
    "canvas.subsets": Kind(
        "SubsetDrafter", "drafter of any-subset models", "Drafters of any-subset models",
        "Tokens at masked positions, verified in one pass.", "draft", "NAME", SUBSET,
    ),
    "canvas.policies": Kind(
        "Policy", "policy of diffusion models", "References of diffusion models",
        "Step-by-step decoding: which positions a step fixes.", "rule", "NAME", DIFFUSION,
    ),
    "canvas.policies.lossy": Kind(
        "Policy", "lossy policy of diffusion models", "Lossy policies of diffusion models",
        "More positions per step than step-by-step decoding fixes: another text; only by explicit choice.",
        "rule", "lossy/NAME", DIFFUSION,
    ),
    "canvas.views": Kind(
        "CanvasView", "view of diffusion models", "Views of diffusion models", "Part of a canvas is computed.", "view",
        "lossy/NAME", DIFFUSION,
    ),
}  # fmt: skip
SELF_DRAFTER = "truedraft.drafters.self_._drafter"  # drafts by any view
SIGNS = "|+?><"  # between drafters that act as one, the loosest first
AUTO, NONE = "auto", "none"  # drafters without a file of their own: the default, and no drafts
DEFAULT = "input-guided+suffix-wide+token-recycling"  # the drafters of "auto"


@cache
def _files(kind: str) -> dict[str, str]:
    return {module.rpartition(".")[2].replace("_", "-"): module for module in _modules(f"truedraft.{kind}")}


def _modules(package: str) -> Iterator[str]:
    """Modules of methods, including those in folders that are no kind of their own."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if found.ispkg and found.name.removeprefix("truedraft.") not in KINDS:
            yield from _modules(found.name)
        elif not found.ispkg and not found.name.rpartition(".")[2].startswith("_"):
            yield found.name


@cache
def _foreign(kind: str) -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=f"truedraft.{kind}")}


def names(kind: str) -> list[str]:
    """Names of all methods of a kind, including those of other packages, sorted."""
    return sorted({*_files(kind), *_foreign(kind)})


def method(kind: str, name: str) -> Any:
    """The class of a method.

    Raises:
        Refused: no such method; the message gives the nearest names.
    """
    if name in _files(kind):
        module = importlib.import_module(_files(kind)[name])
        base = getattr(importlib.import_module(f"truedraft.{kind}._base"), KINDS[kind].base)
        found = [
            c
            for c in vars(module).values()
            if inspect.isclass(c) and issubclass(c, base) and c.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise TypeError(f"{module.__name__} must define one {base.__name__}, found {len(found)}")
        return found[0]
    if name in _foreign(kind):
        return _foreign(kind)[name].load()
    raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> Refused:
    if kind == "drafters" and name in (AUTO, NONE):
        return Refused(f"draft={name!r} has no knobs: leave them out")
    answer: Refused = importlib.import_module("truedraft.answers").unknown(kind, name)
    return answer


@cache
def presets(kind: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Preset name -> (method, knobs), from the cards."""
    return {preset: (name, dict(knobs)) for name, (found, _) in _cards(kind).items() for preset, knobs in found.items()}


def also(kind: str) -> dict[str, Mapping[str, str]]:
    """Method -> names of papers and other projects and what there is here for them, from the cards."""
    return {name: found for name, (_, found) in _cards(kind).items()}


@cache
def _cards(kind: str) -> dict[str, tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]]:
    """Method -> `presets` and `also` of its card, in the order of the names; own methods are not imported."""
    own = {name: (card.presets, card.also) for name, card in ((n, declared(m)) for n, m in _files(kind).items())}
    cards = {name: getattr(entry.load(), "card", None) for name, entry in _foreign(kind).items() if name not in own}
    foreign = {name: (card.presets, card.also) for name, card in cards.items() if card is not None}
    return dict(sorted({**own, **foreign}.items()))


def load(kind: str, spec: str, **knobs: Any) -> Any:
    """A method from its name, a preset's name, or `name:knob=value,knob=value`; a lossy rule from `lossy/name`;
    several drafters as one from their names and the signs between them (`drafters/_compose.py`); the drafters "auto"
    and "none"; and from the name of a view the target as its own drafter.

    Raises:
        Refused: unknown method, unknown knob, or a value that is not valid for it.
    """
    if kind == "drafters" and (split(spec)[0] or spec in (AUTO, NONE)):
        compose = importlib.import_module("truedraft.drafters._compose").compose
        return compose(spec, lambda part: load(kind, part))
    if kind == "drafters" and is_view(spec):
        return _self_drafter(spec, knobs)
    return _wanted(kind, spec, knobs).made(spec)


def is_view(spec: str) -> bool:
    """Whether a spec names a view, or several as one."""
    name = spec.partition(":")[0].partition("+")[0].strip()
    return name in names("views") or name in presets("views")


def lossy_view(spec: str) -> Any:
    """The view of `lossy/NAME`, or of several as one, which a model generates under.

    Raises:
        Refused: another form, an unknown view or knob, or a knob of drafts.
    """
    return _view(_lossy(spec), spec)


def check_lossy_view(spec: str) -> None:
    """The checks of `lossy_view` for names and knobs, without importing the views.

    Raises:
        Refused: as `lossy_view`, but for what only the view itself checks.
    """
    for view in _lossy(spec):
        view.check(spec)


def canvas_view(spec: str) -> str:
    """The view of `lossy/NAME`, which a diffusion model generates under, as `load` and `check` take it; raises Refused
    for another form."""
    if spec.partition(":")[0] in (*names("canvas.views"), *presets("canvas.views")):
        raise Refused(f"view={spec!r} is an approximation of the model: choose it with view='lossy/{spec}'")
    return spec.removeprefix("lossy/")


def _lossy(spec: str) -> list[Wanted]:
    """The views in a spec that begins with `lossy/`."""
    name = spec.removeprefix("lossy/")
    if not is_view(name):
        raise _unknown("views", name.partition(":")[0].partition("+")[0].strip())
    if name == spec:
        raise Refused(
            f"view={spec!r} is an approximation of the model: choose it with view='lossy/{spec}', or let it draft for "
            f"the model's own text with draft={spec!r}"
        )
    sides, drafting = _sides(name, {})
    if drafting:
        raise Refused(f"{shown(spec)}: {min(drafting)} is a knob of drafts, and a lossy view makes none: leave it out")
    return sides


def _view(sides: Sequence[Wanted], spec: str) -> Any:
    """The view of a spec, all of them as one."""
    views = [side.made(spec) for side in sides]
    if len(views) == 1:
        return views[0]
    return importlib.import_module("truedraft.views._together").Together(tuple(views))


def _self_drafter(spec: str, knobs: Mapping[str, Any]) -> Any:
    """The drafter by a view, or by several as one."""
    sides, drafting = _sides(spec, knobs)
    view = _view(sides, spec)
    drafter = importlib.import_module(SELF_DRAFTER).SelfDrafter
    return built(drafter, view.name, spec, {"view": view, **drafting})


def _sides(spec: str, knobs: Mapping[str, Any]) -> tuple[list[Wanted], dict[str, Any]]:
    """The views in a spec, and the knobs of their drafter.

    Raises:
        Refused: a knob of the drafter is given twice.
    """
    drafts = set(signature(declared(SELF_DRAFTER).knobs).parameters) - {"view"}
    sides: list[Wanted] = []
    drafting: dict[str, Any] = {}
    for i, side in enumerate(spec.split("+")):
        view = _wanted("views", side.strip(), knobs if i == 0 else {})
        if twice := sorted(drafts & drafting.keys() & view.knobs.keys()):
            raise Refused(f"{shown(spec)} gives {twice[0]} twice: its views share one drafter, give it once")
        drafting |= {key: view.knobs.pop(key) for key in drafts & view.knobs.keys()}
        sides.append(view)
    return sides, drafting


def check(kind: str, spec: str) -> None:
    """The checks of `load` for names and knobs, without importing the methods.

    Raises:
        Refused: unknown method, unknown knob, or a value of another type than the knob's.
    """
    sign, sides = split(spec) if kind == "drafters" else ("", [spec])
    if sign:
        for side in sides:
            check(kind, side)
    elif kind == "drafters" and is_view(spec):
        views, drafting = _sides(spec, {})
        for view in views:
            view.check(spec)
        built(declared(SELF_DRAFTER).knobs, spec, spec, {"view": None, **drafting})
    elif kind != "drafters" or spec not in (AUTO, NONE):
        _wanted(kind, spec, {}).check(spec)


def _wanted(kind: str, spec: str, knobs: Mapping[str, Any]) -> Wanted:
    """The method of a spec, which may name a lossy rule or a preset.

    Raises:
        Refused: the kind has no such name, or the spec has another form.
    """
    if kind in ("accept", "canvas.policies") and spec.startswith("lossy/"):
        kind, spec = f"{kind}.lossy", spec.removeprefix("lossy/")
    name = spec.partition(":")[0]
    if name not in names(kind) and name not in presets(kind):
        raise _unknown(kind, name)
    _, given = parsed(spec)
    method, preset = (name, {}) if name in names(kind) else presets(kind)[name]
    return Wanted(kind, method, {**preset, **knobs, **given}, name)


def split(spec: str) -> tuple[str, list[str]]:
    """The loosest sign between drafters and the parts on its sides; "" and the whole spec where there is one drafter,
    as several views are.

    Raises:
        Refused: a side is empty, or one of several views has its drafter before the next.
    """
    for sign in SIGNS:
        if sign in spec:
            sides = [side.strip() for side in spec.split(sign)]
            if not all(sides):
                if importlib.import_module("truedraft.answers").answers(name := spec.partition(":")[0]):
                    raise _unknown("drafters", name)  # a paper, such as specdec++
                raise Refused(f"draft={spec!r}: there is no drafter on one side of {sign!r}")
            if sign == "+" and len(views := [side for side in sides if _of_view(side)]) > 1:
                if any("<" in view for view in views[:-1]):
                    raise Refused(f"draft={spec!r}: views that draft together stand together before the '<'")
                sides = [sign.join(views), *(side for side in sides if side not in views)]
            if len(sides) > 1:
                return sign, sides
    return "", [spec]


def _of_view(side: str) -> bool:
    """Whether a side of a "+" is a view, drafted for or not."""
    return is_view(side.partition("<")[0]) and not set(side) & set("?>")


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the knobs of `name:knob=value,knob=value`; of one with a model also `name:MODEL,knob=value`.

    Raises:
        Refused: the spec has another form.
    """
    name, _, given = spec.partition(":")
    knobs: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, eq, value = part.partition("=")
        if not eq and not knobs and _has_model(name):
            knobs["model"] = part.strip()
            continue
        if not eq:
            raise Refused(f"cannot read {shown(part)} in {shown(spec)}: knobs are written name:knob=value,knob=value")
        if key.strip() in knobs:
            raise Refused(f"{shown(spec)} gives {key.strip()} twice: give it once")
        try:
            knobs[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            knobs[key.strip()] = value
    return name, knobs


def _has_model(name: str) -> bool:
    """Whether a drafter has a draft model or a checkpoint, or a view has one."""
    name = presets("drafters").get(name, (name, {}))[0]
    module = (_files("drafters") | _files("views")).get(name)
    return module is not None and "model" in signature(declared(module).knobs).parameters


def built(cls: Any, name: str, spec: str, knobs: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from its knobs; `name` and `spec` are for messages.

    Raises:
        Refused: unknown knob, or an invalid value: declared knobs check themselves (`card.knob`), others must have
            the type of their default.
    """
    allowed = list(signature(cls).parameters)
    for key in knobs:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(allowed) or 'none'}."
            raise Refused(f"{name} has no knob {shown(key)}: {hint}")
        default = signature(cls).parameters[key].default
        if isinstance(default, int | float) and values_of(cls, key) is None:
            sign = "" if default < 0 else "non-negative "
            if type(knobs[key]) is not type(default) or not math.isfinite(knobs[key]) or (sign and knobs[key] < 0):
                raise Refused(
                    f"{name}:{key}={shown(knobs[key])}: give a {sign}{type(default).__name__}, like {default}"
                )
    try:
        return cls(**knobs)
    except TypeError as e:
        raise Refused(f"{name} cannot be built from {shown(spec)}: {e}") from e
