"""What drafters allocate: draft models, learned heads, copies for views, and what lookup drafters keep of texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truedraft import assets, registry
from truedraft.caches.rows import RowCache
from truedraft.drafters._base import Drafter, PerRow, Plain
from truedraft.drafters._compose import compose
from truedraft.drafters._growing import GrowingDrafter
from truedraft.drafters._learned import WEIGHTS
from truedraft.drafters.heads._checkpoint import Foreign, folder_of
from truedraft.drafters.heads._crossing import CrossingHead
from truedraft.drafters.heads._drafter import LearnedDrafter
from truedraft.drafters.heads._head import Head
from truedraft.drafters.heads._quantize import NONE, copies_of
from truedraft.drafters.heads._reader import CHUNK as READ
from truedraft.drafters.heads._reader import FEW
from truedraft.drafters.heads._weights import StoredWeights
from truedraft.drafters.models._model import unnamed
from truedraft.drafters.models._reader import CHUNK
from truedraft.errors import Refused
from truedraft.planning.models import (
    FLOAT,
    META,
    STORED,
    CountedCopies,
    Sized,
    buffer_bytes,
    grown_to,
    header,
    room_numbers,
    sized,
    table_bytes,
)
from truedraft.planning.parts import Part
from truedraft.runtime import native
from truedraft.runtime.heads import program_of
from truedraft.runtime.linears import Linears
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable
from truedraft.stores.memory import BYTES, Tenants

TEXT = 160  # bytes of an automaton per token of its text, at most
COPIES = 3  # of a level's logits while it is grown: processed scores and distributions beside them
PROMPTS = 3  # of a prompt's hidden states while it is read: by piece, as a whole, and side by side for the head
UNCHANGED = 64  # bits: no weight has more, so that none is copied
PADDING = 2  # places of a head's cache behind drafts


@dataclass(frozen=True)
class Load:
    """What runs at once.

    rows: of a batch. tokens: of a row, prompt and output together. nodes: of a row's tree, the pending token included.
    spare: positions of the target's cache behind a row's tokens, for drafts.
    sampled: whether tokens are drawn.
    """

    rows: int
    tokens: int
    nodes: int
    spare: int
    sampled: bool = False


@dataclass
class Side:
    """A drafter without parts, by name, for a target.

    models: its draft models. head: its head, on the meta device. int8: whether that is read in int8.
    """

    spec: str
    drafter: Drafter
    target: Sized
    models: Sequence[Sized] = ()
    head: Any = None
    int8: bool = False

    def parts(self, load: Load, free: Callable[[str], int]) -> Iterator[Part]:
        """Its parts. free: the bytes that are left beside the target on a device."""
        target, held = str(self.target.device), dict[str, int]()
        for model in self.models:
            device = str(model.device)
            left = free(device) - held.get(device, 0)
            yield from (replace(part, device=device) for part in self._of_model(model, load, left))
            held[device] = held.get(device, 0) + model.weights + model.copies(left - model.weights)
            if device != target:
                moved = COPIES * model.logits(load.rows * self._level(load))
                yield Part("moved logits", moved, "those of a level, and their distributions", "draft", device=target)
        if not self.models:
            yield from (replace(part, device=target) for part in self._of_other(load))

    def _of_other(self, load: Load) -> Iterator[Part]:
        """The parts of a drafter without a draft model."""
        if self.head is not None:
            yield from self._of_head(load)
        elif registry.is_view(self.spec):
            yield from self._of_view()
        elif isinstance(self.drafter, PerRow):
            yield from self._of_texts(load)
        elif not isinstance(self.drafter, Plain):
            yield Part("drafter", 0, f"{self.spec}: what it keeps is not planned", known="unknown")

    def expansions(self, load: Load) -> int:
        """Nodes of a draft that its own passes read."""
        most = min(load.nodes - 1, self.drafter.width)
        return self.drafter.room(most) if isinstance(self.drafter, GrowingDrafter) else most

    def _level(self, load: Load) -> int:
        """Nodes of a row that a pass of it computes logits of, at most."""
        read = self.expansions(load)
        return 1 if getattr(self.drafter, "levels", 0) >= read else min(read, getattr(self.drafter, "top_k", read))

    def _of_model(self, model: Sized, load: Load, free: int) -> Iterator[Part]:
        rows, expansions, level = load.rows, self.expansions(load), load.rows * self._level(load)
        positions = load.tokens + expansions + CHUNK
        yield Part("draft weights", model.weights, f"{model.name} in {named(model.dtype)}")
        if copies := model.copies(free - model.weights):
            yield Part("draft copies", copies, "its weights in the order in which compiled passes read them")
        yield Part("draft KV cache", model.cache(rows, positions), f"{rows} rows x {positions:,} positions")
        prompt = model.pieces(rows, load.tokens)
        buffers = model.buffers(10, prompt, rows * (CHUNK + expansions)) + model.tables(positions)
        yield Part("draft buffers", buffers, "activations of its passes, and tables by position", known="at most")
        if reading := model.reading(load.tokens):
            yield Part("draft prompts", reading, "its own forward over a prompt", "prompt", "estimate")
        together = COPIES if model.device == self.target.device else 1
        logits = together * model.logits(level) + model.scratch(level, positions)
        yield Part(
            "draft logits",
            logits,
            f"{level} nodes of a level{', and their distributions' if together > 1 else ''}",
            "draft",
            "estimate",
        )

    def _of_head(self, load: Load) -> Iterator[Part]:
        head, rows, target = self.head, load.rows, self.target
        tensors = {id(t): t for t in [*head.parameters(), *head.buffers()]}.values()
        size = sum(t.numel() * (target.dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
        yield Part("head weights", size, f"{self.spec} in {named(target.dtype)}")
        program, copies = self._head_program()
        if copies.bytes:
            yield Part("head copies", copies.bytes, "its weights, and the output head that it uses, in int8")
            yield Part("rounding", copies.rounding, "while these copies are made", "start", "estimate")
        if not hasattr(head, "allocate"):  # all tokens at once, from the last hidden state
            logits = COPIES * rows * (load.nodes - 1) * target.config.vocab_size * FLOAT
            yield Part("head logits", logits, "its drafts, and their distributions", "draft", "at most")
            return
        positions = load.tokens + self._behind(load) + PADDING
        cache = RowCache(head.cached_layers, rows, positions)
        head.allocate(cache)
        held = sum(kept.nbytes for layer in cache.layers if layer.is_initialized for kept in layer.kept)
        yield Part("head KV cache", held, f"{rows} rows x {positions:,} positions")
        layers = len(head.layers)
        features = PROMPTS * target.hidden(rows * load.tokens, layers)
        yield Part("features", features, f"{layers} layers at the prompts' tokens", "prompt", "at most")
        if program is None:
            yield Part("head buffers", 0, "activations of its passes in torch", known="unknown")
        else:
            yield from self._of_head_passes(program, load, positions)

    def _of_head_passes(self, program: Program, load: Load, positions: int) -> Iterator[Part]:
        level = load.rows * self._level(load)
        size = buffer_bytes(program, grown_to(READ, load.rows * FEW + level))
        with META:
            size += table_bytes(program, positions, self.target.dtype)
        yield Part("head buffers", size, "activations of its passes, and tables by position", known="at most")
        rooms = torch.get_num_threads() * room_numbers(program, level, positions)
        logits = (COPIES * level * program.widths["logits"] + rooms) * FLOAT
        yield Part("head logits", logits, f"{level} nodes of a level, and their distributions", "draft", "estimate")

    def _behind(self, load: Load) -> int:
        """Places of its cache behind a row's tokens."""
        if isinstance(self.drafter, GrowingDrafter):
            return self.expansions(load)
        return int(getattr(self.head, "block_size", load.nodes))

    def _head_program(self) -> tuple[Program | None, CountedCopies]:
        """Its compiled pass, and the copies of its weights that are read."""
        copies = CountedCopies(8 if self.int8 and self.target.device.type == "cpu" else UNCHANGED)
        if native.missing() or self.target.device.type != "cpu":
            return None, copies
        program = None
        with suppress(NotCompilable, RuntimeError, NotImplementedError), META:
            program = program_of(self.head, copies) if isinstance(self.head, Head | CrossingHead) else None
        Linears(self.head, copies)
        return program, copies

    def _of_view(self) -> Iterator[Part]:
        drafter: Any = self.drafter
        bits = drafter.view.reduction(self.target.config.num_hidden_layers).bits
        if not bits or self.target.program is None:
            yield Part("view", 0, f"{self.spec}: the target's own weights, cache and buffers")
            return
        numbers = sum(p.numel() for p in self.target.model.parameters())
        yield Part("view copies", numbers * (bits + 1) // 8, f"{self.spec}: weights in {bits} bits", known="at most")

    def _of_texts(self, load: Load) -> Iterator[Part]:
        texts = load.rows * load.tokens * TEXT
        yield Part("texts", texts, f"{self.spec}: {load.rows} rows x {load.tokens:,} tokens", known="estimate")
        for memory in self.drafter.memories():
            of = f"{self.spec}: earlier outputs of {memory.limit:,} tokens (knob memory)"
            yield Part("memory", memory.limit * TEXT, of, "later", "at most")
        if any(isinstance(kept, Tenants) for kept in vars(self.drafter).values()):
            yield Part("tables", BYTES, f"{self.spec}: of all namespaces", "later", "at most")


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def planned_drafter(spec: str | None, target: Sized) -> tuple[Drafter, list[Side]]:
    """A drafter by name, whose models have no weights, and its sides.

    Raises:
        Refused: an unknown name or knob; a draft model or a head is missing, or is not for this target.
    """
    sides: list[Side] = []

    def made(part: str) -> Drafter:
        if registry.split(part)[0] or part in (registry.AUTO, registry.NONE):
            return compose(part, made)
        side = registry.load("drafters", part) if registry.is_view(part) else None
        sides.append(Side(part, side, target) if side is not None else _side(part, target))
        return sides[-1].drafter

    return made(spec or registry.NONE), sides


def _side(spec: str, target: Sized) -> Side:
    name, knobs = registry.parsed(spec)
    given, source = knobs.pop("model", None), knobs.get("source")
    if isinstance(source, str) and given is None:
        inner = _side(source, target)
        drafter = registry.load("drafters", name, **{**knobs, "source": inner.drafter})
        return Side(spec, drafter, target, inner.models, inner.head, inner.int8)
    drafter = registry.load("drafters", name, **knobs)
    if isinstance(drafter, LearnedDrafter) or hasattr(drafter, "formats"):
        int8 = copies_of(getattr(drafter, "quantize", NONE)) is not None
        return Side(spec, drafter, target, head=_head(drafter, given, target), int8=int8)
    if given is None and "draft model" in drafter.card.needs:
        raise unnamed(drafter, f"--draft {name}:MODEL")
    if given is None:
        return Side(spec, drafter, target)
    models = [sized(each.strip(), argument="the draft model") for each in str(given).split(";")]
    empty = [each.model for each in models]
    return Side(spec, registry.load("drafters", name, **knobs, model=empty if empty[1:] else empty[0]), target, models)


def _head(drafter: Any, source: Any, target: Sized) -> Any:
    """A head on the meta device, from its configuration or the shapes in its files.

    Raises:
        Refused: there is none, or in no format that the method reads.
    """
    name = drafter.learner.name
    if source is None and (source := assets.head(name, str(target.source))) is None:
        raise Refused(f"{name} needs a head: draft='{name}:FOLDER', made by `truedraft train {name}`, or others'")
    folder = folder_of(name, source)
    with META:
        if (folder / WEIGHTS).exists():
            record = json.loads(header(folder / WEIGHTS)["__metadata__"]["config"])
            if (stretch := getattr(target.model, "stretch", None)) is not None:
                record = stretch.enlarged(record)
            return drafter.rebuilt(record, target.model).to(target.dtype)
        foreign = Foreign(str(source), folder)
        vars(foreign)["tensors"] = ShapesAlone(str(source), folder)
        for form in drafter.formats:
            if form.matches(foreign):
                return form.read(foreign, target.model).to(target.dtype)
    raise Refused(f"{name}: {str(source)!r} is in no format that it reads")


class ShapesAlone(StoredWeights):
    """Stored weights without their numbers: floating-point tensors on the meta device, integers as they are."""

    def __getitem__(self, name: str) -> Tensor:
        path = Path(self._folder) / self._shards[self._names[name]]
        if path.suffix != ".safetensors":
            return super().__getitem__(name)
        entry = header(path)[self._names[name]]
        if entry["dtype"] not in STORED:
            with torch.device("cpu"):
                return super().__getitem__(name)
        return torch.empty(entry["shape"], dtype=STORED[entry["dtype"]], device=META)
