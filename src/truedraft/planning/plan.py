"""The memory plan of a model with its drafter: its parts, what fits in a limit, and the least that drafting needs.

After SpecMemo (see `docs/deploying.md`): weights, keys and values, and what a pass over a tree allocates, as a function
of the tree's nodes, the rows and their length, from configurations and file headers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from truedraft.errors import Refused
from truedraft.planning.drafters import Load, named, planned_drafter
from truedraft.planning.models import Sized, sized
from truedraft.planning.parts import Part, by_device, size
from truedraft.runtime.curve import WIDTHS

SAMPLED = 4  # of a pass's logits: processed scores, their distribution, the noise, and its quotients
CHECKED = 10  # nodes of the passes by which a model is compared with its own forward
SHORT = 4096  # tokens of a row, for which it is told how many fit
MOST_ROWS, MOST_TOKENS = 1 << 14, 1 << 24  # that are looked for


@dataclass
class Setup:
    """A model and a drafter, without their weights.

    memory: bytes that there are on a device for all of it; copies of weights are made where they take no more than a
        share of it.
    """

    target: Sized
    draft: str
    memory: Callable[[str], int]
    spare: int | None = None

    def __post_init__(self) -> None:
        self.drafter, self.sides = planned_drafter(self.draft, self.target)

    @cached_property
    def width(self) -> int:
        """Nodes of a full draft."""
        return self.drafter.width

    def load(self, rows: int, tokens: int, nodes: int | None = None, sampled: bool = False) -> Load:
        """What runs at once. nodes: of a draft; None for those of a full one."""
        drafted = self.width if nodes is None else nodes
        return Load(rows, tokens, drafted + 1, drafted if self.spare is None else self.spare, sampled)

    def parts(self, load: Load) -> list[Part]:
        """All parts of the memory that is needed, those of the target first."""
        return [*self.of_target(load), *self.of_drafter(load)]

    def of_target(self, load: Load) -> list[Part]:
        """The parts without those of the drafter."""
        target = self.target
        found = [Part("weights", target.weights, _weights(target))]
        if copies := target.copies(self._free(self.device)):
            found.append(Part("copies", copies, "weights in the order in which compiled passes read them"))
        found += self._of_passes(load)
        found += [Part("further", 0, unknown, known="unknown") for unknown in target.unknown]
        return [replace(part, device=self.device) for part in found]

    def of_drafter(self, load: Load) -> list[Part]:
        """The parts of the drafter; none without drafts."""
        copies = self.target.copies(self._free(self.device))

        def free(device: str) -> int:
            return self._free(device) - (copies if device == self.device else 0)

        return [part for side in self.sides if load.nodes > 1 for part in side.parts(load, free)]

    @property
    def device(self) -> str:
        """Where the target is."""
        return str(self.target.device)

    def _free(self, device: str) -> int:
        """Bytes beside the target's weights."""
        return self.memory(device) - (self.target.weights if device == self.device else 0)

    def _of_passes(self, load: Load) -> list[Part]:
        """The target's cache, and what its passes allocate."""
        target, rows, positions = self.target, load.rows, load.tokens + load.spare
        nodes, layers = rows * load.nodes, len(self._taps)
        measured = (1, 1 + WIDTHS[-1])
        buffers = target.buffers(CHECKED, *WIDTHS, target.pieces(rows, load.tokens), nodes)
        of = f"{rows} rows x {load.tokens:,} tokens and {load.spare} for drafts"
        found = [
            Part("KV cache", target.cache(rows, positions), of),
            Part("timed passes", target.cache(*measured), "a cache of their own, for the cost control", "start"),
        ]
        if target.program is not None:
            tables = Part("tables", target.tables(max(positions, measured[1])), "by position, of rotary embeddings")
            found += [tables, Part("buffers", buffers, "activations of compiled passes", known="at most")]
        if reading := target.reading(load.tokens):
            of = f"the model's own forward over a prompt of {load.tokens:,} tokens"
            found.append(Part("prompts", reading, of, "prompt", "estimate"))
        found.append(Part("logits", target.logits(nodes), f"{nodes} nodes of a pass", "pass"))
        if load.sampled:
            of = "scores, distributions and noise of a sampled pass"
            found.append(Part("laws", SAMPLED * target.logits(nodes), of, "pass", "at most"))
        if layers:
            found.append(Part("hidden states", target.hidden(nodes, layers), f"{layers} layers at each node", "pass"))
        of = "of threads" if target.program is not None else "activations"
        found.append(Part("work space", target.scratch(nodes, positions), of, "pass", "estimate"))
        return found

    @property
    def _taps(self) -> set[int]:
        layers = {layer for side in self.sides for layer in side.drafter.needs.hidden}
        return layers | {layer for side in self.sides for layer in getattr(side.head, "layers", ())}

    def bytes(self, load: Load) -> int:
        """The most that is held at once where the target is."""
        return self.needed(load)[self.device]

    def needed(self, load: Load) -> dict[str, int]:
        """The most that is held at once on each device."""
        return by_device(self.parts(load))

    def fits(self, load: Load) -> bool:
        """Whether it fits on every device."""
        return all(needed <= self.memory(device) for device, needed in self.needed(load).items())

    def without_copies(self) -> Setup:
        """The same by `runtime="in-place"`."""
        models = [self.target, *(model for side in self.sides for model in side.models)]
        for model in models:
            model.in_place = True
        return self


@dataclass(frozen=True)
class Plan:
    """What a setup needs, and what fits in its memory.

    memory, needed, plain, least, in_place are bytes where the target is.

    parts: of the memory for `load`. needed: bytes at once. plain: bytes without drafts. least: bytes with drafts of one
        node.
    beside: by other device, the bytes at once, and those that there are.
    nodes, rows, tokens: the most that fit with the other two as in `load`; None where none do. No more tokens than the
        model's context has, unless `load` has more.
    context: the tokens that the model was trained for; None where its configuration names none.
    in_place: bytes without copies of weights.
    contexts: tokens of a row, the model's context among them -> the rows of so many that fit at once.
    """

    memory: int
    load: Load
    parts: list[Part]
    needed: int
    plain: int
    least: int
    nodes: int | None
    rows: int | None
    tokens: int | None
    in_place: int
    contexts: dict[int, int]
    context: int | None
    beside: dict[str, tuple[int, int]]

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory and all(needed <= there for needed, there in self.beside.values())

    def check(self) -> None:
        """Raises Refused where it does not fit, with what would."""
        if self.fits:
            return
        for device, (needed, there) in self.beside.items():
            if needed > there:
                raise Refused(
                    f"the draft model on {device} needs {size(needed)} of the {size(there)} that there are: name it "
                    "with the device of the model, or quantize"
                )
        load, lack = self.load, f"{size(self.needed - self.memory)} more than the {size(self.memory)} that there are"
        what = f"rows={load.rows}, tokens={load.tokens:,}, nodes={load.nodes - 1}: {lack}"
        raise Refused(f"{what}: {self.remedy}")

    @property
    def remedy(self) -> str:
        """What to change so that it fits."""
        if self.in_place <= self.memory:
            return "accelerate(runtime='in-place') makes no copies of weights, and fits"
        if self.nodes:
            return f"drafts of {self.nodes} nodes fit"
        if self.tokens or self.rows:
            fit = [f"{self.rows} rows" if self.rows else "", f"{self.tokens:,} tokens" if self.tokens else ""]
            return f"{' or '.join(filter(None, fit))} fit"
        if self.plain <= self.memory:
            return f"drafting needs {size(self.least)}, and draft='none' fits"
        return (
            f"the least with drafts is {size(self.least)}, and {size(self.plain)} without: quantize, or a smaller model"
        )


def planned(
    model: str,
    draft: str = "auto",
    rows: int = 1,
    tokens: int = 2048,
    memory: int | None = None,
    *,
    free: Callable[[str], int],
    dtype: str = "auto",
    quantize: str | None = None,
    stretched: str | None = None,
    sampled: bool = False,
) -> Plan:
    """The plan of a model with a drafter, by names; nothing is loaded.

    Args:
        rows: of a batch. tokens: of a row, prompt and output together.
        memory: bytes that there are where the model is; by default those of `free`, of a device.
        dtype, quantize, stretched: see `loading.load` and `bench.sizes.size_of`.
        sampled: whether tokens are drawn.

    Raises:
        Refused: an unknown model or drafter, or one without its draft model or head.
    """
    target = sized(model, dtype, quantize, stretched)
    home = str(target.device)
    free = cache(free)
    limit = free(home) if memory is None else memory
    setup = Setup(target, draft, lambda device: limit if device == home else free(device))
    load = setup.load(rows, tokens, sampled=sampled)
    parts = setup.parts(load)

    def fits(**changed: Any) -> bool:
        given = {"rows": rows, "tokens": tokens, "nodes": None, "sampled": sampled} | changed
        return setup.fits(setup.load(**given))

    nodes = most(lambda count: fits(nodes=count), setup.width)
    context = getattr(target.config, "max_position_embeddings", None)
    longest = context if context and tokens <= context else MOST_TOKENS
    found = (most(lambda count: fits(rows=count), MOST_ROWS), most(lambda count: fits(tokens=count), longest))
    contexts = {
        length: most(lambda count, length=length: fits(rows=count, tokens=length), MOST_ROWS) or 0  # type: ignore[misc]
        for length in sorted({min(SHORT, context or SHORT), context or SHORT})
    }
    plain, least = (setup.bytes(setup.load(rows, tokens, count, sampled)) for count in (0, min(1, setup.width)))
    needed = by_device(parts)
    beside = {device: (most_held, free(device)) for device, most_held in needed.items() if device != home}
    in_place = setup.without_copies().bytes(load)
    return Plan(limit, load, parts, needed[home], plain, least, nodes, *found, in_place, contexts, context, beside)


def most(fits: Callable[[int], bool], highest: int) -> int | None:
    """The largest count up to `highest` that fits, by bisection; None where not even one does."""
    if highest < 1 or not fits(1):
        return None
    low, high = 1, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _weights(target: Sized) -> str:
    if target.stored:
        return "quantised, as they are in the files"
    once = ", kept once, in the order in which compiled passes read them" if target.replaced[0] else ""
    return f"{target.model.num_parameters():,} parameters in {target.quantize or named(target.dtype)}{once}"
