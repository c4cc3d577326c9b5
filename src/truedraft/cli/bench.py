"""`truedraft bench`: compares decoding methods, equality before speed; and measures the machine's limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from truedraft import assets, registry
from truedraft.bench.sizes import size_of
from truedraft.canvas.layout import Layout, attending, layout_of
from truedraft.cli._models import load
from truedraft.cli._models import machine as measured_on
from truedraft.cli._options import (
    CANVASES,
    COLDEST,
    AsJson,
    AttentionOption,
    Dtype,
    Quantize,
    Stretched,
    Threads,
    check_names,
    check_seeds,
    use_threads,
)
from truedraft.cli._page import check_page, origin, write_page
from truedraft.cli._replay import replay_files
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, waiting
from truedraft.errors import Refused
from truedraft.packaged import MODEL_HELP
from truedraft.targets.kinds import reads_sources

if TYPE_CHECKING:
    from truedraft.bench.compare import Figures
    from truedraft.bench.lossy import Quality
    from truedraft.bench.oracle import Attained
    from truedraft.bench.roofline import Machine, RooflinePoint
    from truedraft.bench.sides import Side
    from truedraft.bench.workloads import Workload

    Sides = Callable[[Sequence[Side]], list[Side]]  # those that are compared, given those of transformers

DRAFTS = ["auto", "prompt-lookup-long"]
CANVAS_DRAFTS = ["lattice", "freedave", "ssd"]  # of diffusion models
LIMIT = 8
# options that the measurements other than the comparison do not use
UNUSED = {
    "oracle": ("draft", "limit", "batch", "temperature", "seed", "control", "ties", "baselines", "assistant"),
    "roofline": ("draft", "prompts", "chat", "limit", "max_new_tokens", "batch", "temperature", "rounds", "seed",
                 "control", "ties", "baselines", "assistant"),
    "lossy": ("ties", "baselines", "assistant"),
    "diffusion": ("ties", "baselines", "assistant", "oracle", "roofline"),
    "replay": ("prompts", "chat", "max_new_tokens", "batch", "temperature", "rounds", "seed", "control", "ties",
               "baselines", "assistant", "dtype", "quantize", "stretched", "oracle", "roofline", "lossy", "attention"),
}  # fmt: skip
REPLAYED = ("tokenizer", "questions", "budget")  # options for recorded outputs only


def bench(
    context: Context,
    model: Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)] = "nano",
    draft: Annotated[list[str] | None, Option(help="A drafter, or `name:knob=value`; may be repeated.")] = None,
    prompts: Annotated[
        list[Path] | None, Option(help="Prompts from a file (JSON lines or text), instead of the small embedded set.")
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Put the prompts of --prompts into the model's chat template.")
    ] = False,
    limit: Annotated[int | None, Option(help="Prompts of each kind, at most: 8; recorded conversations: all.")] = None,
    max_new_tokens: Annotated[int | None, Option(help="Most tokens per prompt.")] = None,
    batch: Annotated[list[int] | None, Option(help="Batch size; may be repeated.")] = None,
    temperature: Annotated[list[float] | None, Option(help="0 is greedy; may be repeated.")] = None,
    rounds: Annotated[int, Option(help="Rounds of every method.")] = 3,
    seed: Annotated[int, Option(help="Seed of torch, where temperature is not 0.")] = 0,
    control: Annotated[str, Option(help="Draft size (see `truedraft methods`).")] = "cost",
    ties: Annotated[str, Option(help="keep or recheck: near-ties scored again as transformers does.")] = "keep",
    baselines: Annotated[bool, Option(help="Also transformers' own prompt lookup and assisted decoding.")] = True,
    assistant: Annotated[
        str | None, Option(help="The draft model of transformers' assisted decoding; for nano, nano-draft.")
    ] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    stretched: Stretched = None,
    threads: Threads = None,
    oracle: Annotated[bool, Option(help="Known outputs drafted at set acceptance rates, against theory.")] = False,
    roofline: Annotated[bool, Option(help="Only pass times by width, against bandwidth and multiply rate.")] = False,
    lossy: Annotated[
        list[str] | None,
        Option(help="A view that the model generates under, lossy/NAME: quality and speed; may be repeated."),
    ] = None,
    attention: AttentionOption = None,
    replay: Annotated[list[Path] | None, Option(help="Recorded outputs, replayed without a model.")] = None,
    tokenizer: Annotated[str | None, Option(help="Tokenizer of recorded outputs, if not that of MODEL.")] = None,
    questions: Annotated[Path | None, Option(help="MT-Bench's questions, if not beside its answers.")] = None,
    budget: Annotated[int | None, Option(help="Nodes per pass, replaying; by default each drafter's own.")] = None,
    as_json: AsJson = False,
    html: Annotated[Path | None, Option(help="Write one self-contained page with plots.")] = None,
) -> int:
    """Compare truedraft with transformers, interleaved in one process; without identical output there is no speed-up.

    \f
    Returns the exit code: 1 where a token of truedraft differs, 130 after Ctrl-C. Raises Refused for a bad argument.
    """
    counts = {"--limit": limit, "--rounds": rounds, "--budget": budget, "--max-new-tokens": max_new_tokens}
    _check_numbers(counts, batch or [], temperature or [], seed if _given(context, "seed") else None)
    check_page(html)
    modes = [mode for mode, given in (("oracle", oracle), ("roofline", roofline), ("lossy", lossy)) if given]
    _refuse_unused(context, ["replay"] if replay else modes)
    if replay:
        reads, page = _tokenizer(context, model, tokenizer), (html, context.obj)
        return replay_files(replay, draft or DRAFTS, reads, questions, limit, budget, threads, as_json, *page)
    if lossy and len(modes) > 1:
        raise Refused(f"--lossy and --{modes[0]} measure different things: leave one of them out")
    _check_names(model, dtype, quantize, draft or (), control, assistant, prompts, lossy or (), attention, stretched)
    with waiting("loading the model") as show:
        use_threads(threads)
        loaded, reader = load(model, dtype, quantize, stretched=stretched, runs=CANVASES)
        sources = _check_sources(loaded, modes)
        layout = attending(loaded.config, reader, attention, f"MODEL {model!r}")
        if diffuses := layout_of(loaded.config, reader) is not None:
            _refuse_for_diffusion(context)
        todo = _workloads(prompts, limit or LIMIT, max_new_tokens, sources, None if diffuses else reader)
        todo = _in_chat(todo, reader, sources, prompts) if chat else todo
        machine, rows = _roofline(loaded) if roofline or (html and not sources and not diffuses) else (None, [])
        figures: list[Figures] = []
        found: list[Quality] = []
        interrupted = False
        attained: list[Attained] = []
        if oracle:
            from truedraft.bench.oracle import attain

            attained = attain(loaded, reader, todo, show, rounds)
        elif not roofline:
            others = baselines and not lossy and not diffuses
            of_transformers = _baselines(model, assistant, loaded, reader, dtype) if others else []
            settings = (rounds, seed, product(temperature or [0.0], batch or [1]))
            sides: Sides = partial(_sides, loaded, reader, draft or DRAFTS, control, ties)
            if diffuses:
                sides = partial(_canvas_sides, loaded, reader, draft, control, lossy or (), layout)
            elif lossy:
                found, sides = _lossy(loaded, reader, lossy, draft or ["none"], control, todo, show)
            interrupted = _compare(figures, sides, of_transformers, todo, loaded, reader, *settings, show)
    name = model if stretched is None else f"{model} stretched to {stretched}"
    if html is not None:
        weights = quantize or _weights(loaded)
        facts = {"model": name, "weights": weights, **origin(context.obj)}
        _write_page(html, facts, figures, rounds, machine, rows, attained, found)
    if as_json:
        of_model = {"model": name, "dtype": str(loaded.dtype), "quantized": quantize}
        print(json.dumps({**of_model, **_result(figures, attained, machine, rows, found)}, indent=2))
    else:
        if stretched is not None:
            print_folded(console(), name, "bold")
        _print(figures, attained, machine, rows, rounds, found)
    if interrupted:
        print("interrupted: the workloads that were finished are shown", file=sys.stderr)
        return 130
    return int(not found and any(f.differs is not None and f.passes is not None for f in figures))


def _compare(
    figures: list[Figures],
    sides: Sides,
    baselines: Sequence[Side],
    workloads: Sequence[Workload],
    model: Any,
    tokenizer: Any,
    rounds: int,
    seed: int,
    settings: Iterable[tuple[float, int]],
    show: Callable[[str], None],
) -> bool:
    """Append the figures of each finished workload, by temperature and batch size; returns whether interrupted."""
    from truedraft.bench.compare import compare

    try:
        for temperature, size in settings:
            alone = size == 1 and temperature == 0  # only here does transformers guarantee the same tokens
            methods = sides(baselines if alone else [])
            for workload in workloads:
                room = _room(model, workload)
                figures += compare(
                    methods, workload, tokenizer, model.device, size, rounds, temperature, seed, room, show
                )  # fmt: skip
    except KeyboardInterrupt:
        return True
    return False


def _weights(model: Any) -> str:
    """What the weights of a model are, for the page."""
    from truedraft.runtime.packed import PackedTensor

    dtype = str(model.dtype).removeprefix("torch.")
    packed = any(isinstance(parameter.data, PackedTensor) for parameter in model.parameters())
    return f"integers, as its files have them, and activations in {dtype}" if packed else dtype


def _write_page(path: Path, facts: Mapping[str, str], *results: Any) -> None:
    """Write the page of these results; see `bench.page.measured`."""
    from truedraft.bench.page import measured

    write_page(path, measured(f"truedraft bench: {facts['model']}", facts, *results))


def _result(
    figures: Sequence[Figures], attained: Sequence[Attained], limits: Machine | None, rows: Sequence[RooflinePoint],
    found: Sequence[Quality],
) -> dict[str, Any]:  # fmt: skip
    return {
        "machine": measured_on(),
        "figures": [asdict(f) for f in figures],
        "oracle": [{**asdict(a), "share": a.share} for a in attained],
        "limits": limits and asdict(limits),
        "roofline": [{**asdict(row), "attained": row.attained} for row in rows],
        "quality": [asdict(quality) for quality in found],
    }


def _check_sources(model: Any, modes: Sequence[str]) -> bool:
    """Whether prompts are sources; raises Refused for a measurement of decoder language models only."""
    sources = reads_sources(model.config)
    if sources and modes:
        raise Refused(f"--{modes[0]} measures decoder language models, and this is an encoder-decoder: drop it")
    return sources


def _workloads(
    prompts: Sequence[Path] | None, limit: int, tokens: int | None, sources: bool, tokenizer: Any
) -> list[Workload]:
    from truedraft.bench.workloads import Workload, embedded, from_file

    if prompts:
        found = [workload for path in prompts for workload in from_file(path, limit, sources=sources)]
    else:
        found = embedded(sources, tokenizer)
    return [Workload(w.name, w.items[:limit], tokens or w.tokens) for w in found]


def _in_chat(
    workloads: Sequence[Workload], tokenizer: Any, sources: bool, prompts: Sequence[Path] | None
) -> list[Workload]:
    """Workloads whose prompts are messages of a user, in the chat template of the tokenizer."""
    from truedraft.text.templates import check_chat, request_text

    if not prompts:
        raise Refused("--chat: requests of the embedded set are in the chat template already; drop --chat")
    if sources:
        raise Refused("--chat: this model is an encoder-decoder, which reads one source; drop --chat")
    check_chat(tokenizer)
    return [
        replace(load, items=tuple(replace(item, text=request_text(tokenizer, item.text)) for item in load.items))
        for load in workloads
    ]


def _room(model: Any, workload: Workload) -> int | None:
    """Most tokens of a prompt, so that prompt and output fit the context; for an encoder-decoder, of a source.

    Raises:
        Refused: the context leaves no room for a prompt.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        return None
    if workload.tokens >= context:
        raise Refused(
            f"{workload.name}: {workload.tokens} new tokens leave no room for a prompt in the model's context of "
            f"{context}: give a smaller --max-new-tokens"
        )
    return int(context if reads_sources(model.config) else context - workload.tokens)


def _refuse_unused(context: Context, modes: Sequence[str]) -> None:
    """Raises Refused for an option that none of the requested measurements uses."""
    unused = set.intersection(*(set(UNUSED[mode]) for mode in modes)) if modes else set()
    for name in sorted(unused):
        if _given(context, name):
            flags = " and ".join(f"--{mode}" for mode in modes)
            raise Refused(f"--{name.replace('_', '-')} has no meaning together with {flags}: leave one of them out")
    for name in REPLAYED:
        if "replay" not in modes and _given(context, name):
            raise Refused(f"--{name} has no meaning without --replay: leave it out, or give recorded outputs")


def _refuse_for_diffusion(context: Context) -> None:
    """Raises Refused for an option that has no meaning for diffusion models."""
    for name in UNUSED["diffusion"]:
        if _given(context, name):
            raise Refused(f"--{name} has no meaning for a diffusion model: leave it out")


def _given(context: Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _tokenizer(context: Context, model: str, tokenizer: str | None) -> tuple[str, str]:
    """The name of the tokenizer for recorded outputs, and the argument that gave it."""
    if _given(context, "model") == (tokenizer is not None):
        raise Refused("--replay needs one tokenizer: give --tokenizer NAME, or MODEL for that of a model")
    return (model, "MODEL") if tokenizer is None else (tokenizer, "--tokenizer")


def _baselines(name: str, assistant: str | None, model: Any, tokenizer: Any, dtype: str) -> list[Side]:
    """transformers' own speculative decoding."""
    from truedraft.bench.sides import transformers_side

    found = [transformers_side("transformers lookup", model, tokenizer=tokenizer, prompt_lookup_num_tokens=10)]
    if drafting := assistant or assets.DRAFTS.get(name):
        small, _ = load(drafting, dtype, argument="--assistant")
        found.append(transformers_side("transformers assisted", model, tokenizer=tokenizer, assistant_model=small))
    return found


def _canvas_sides(
    model: Any, tokenizer: Any, drafts: Sequence[str] | None, control: str, views: Sequence[str], layout: Layout | None,
    _: Sequence[Side],
) -> list[Side]:  # fmt: skip
    from truedraft.bench.sides import canvas_sides

    chosen = drafts or ([] if views else CANVAS_DRAFTS)
    return canvas_sides(model, tokenizer, chosen, control, views, layout)


def _sides(
    model: Any, tokenizer: Any, drafts: Sequence[str], control: str, ties: str, baselines: Sequence[Side]
) -> list[Side]:
    from truedraft import accelerate
    from truedraft.bench.sides import transformers_side, truedraft_side

    sides = [transformers_side("transformers", model, tokenizer=tokenizer), *baselines]
    sides.append(truedraft_side("no drafts", accelerate(model, tokenizer, draft=None, ties=ties)))
    for draft in drafts:
        if draft == registry.NONE:  # already in the list
            continue
        fast = accelerate(model, tokenizer, draft=draft, control=control, ties=ties)
        sides.append(truedraft_side(draft, fast))
    return sides


def _lossy(
    model: Any, tokenizer: Any, views: Sequence[str], drafts: Sequence[str], control: str, todo: Sequence[Workload],
    show: Callable[[str], None],
) -> tuple[list[Quality], Sides]:  # fmt: skip
    """The quality of views that the model generates under, by workload, and the sides that compare their speed."""
    from truedraft.bench.lossy import approximations, qualities
    from truedraft.bench.sides import truedraft_side

    ways = approximations(model, tokenizer, views, drafts, control)
    found = [one for work in todo for one in qualities(ways, tokenizer, work, _room(model, work), show)]
    return found, lambda _: [truedraft_side(name, fast) for name, fast in ways.items()]


def _roofline(model: Any) -> tuple[Machine, list[RooflinePoint]]:
    from truedraft.bench.roofline import Gauge, bytes_read, measure_passes, roofline
    from truedraft.targets.hosting import hosted

    if model.device.type != "cpu":
        raise Refused("--roofline measures the CPU's memory, and the model is on another device")
    target = hosted(model)
    context = min(256, (target.context or 512) // 2)
    gauge = Gauge(dtype=target.dtype, working_set=bytes_read(target, context))
    seconds = measure_passes([target], context, gauge=gauge)[0]
    return gauge.machine(), roofline(target, gauge.machine(), seconds, context)


def _check_names(
    model: str, dtype: str, quantize: str | None, drafts: Sequence[str], control: str, assistant: str | None,
    prompts: Sequence[Path] | None, views: Sequence[str], attention: str | None,
    stretched: str | None,
) -> None:  # fmt: skip
    """Raises Refused, before a model is loaded, for an unknown name or an unusable file."""
    names: dict[str, Any] = {"drafts": drafts, "control": control, "views": views, "attention": attention}
    check_names(model, dtype, quantize, **names, runs=CANVASES)
    if stretched is not None:
        size_of(stretched, model)
    if assistant is not None:
        check_names(assistant, argument="--assistant")
    if prompts:
        _workloads(prompts, LIMIT, None, sources=False, tokenizer=None)


def _check_numbers(
    counts: Mapping[str, int | None], batches: Sequence[int], temperatures: Sequence[float], seed: int | None
) -> None:
    """Raises Refused for a count below one, a temperature below zero, or a seed without sampling.

    seed: None where none was given.
    """
    for name, value in [*counts.items(), *(("--batch", size) for size in batches)]:
        if value is not None and value < 1:
            raise Refused(f"{name} {value} must be at least 1")
    for temperature in temperatures:
        if temperature and not COLDEST <= temperature < inf:
            raise Refused(f"--temperature {temperature:g} must not be negative: 0 (greedy), or at least {COLDEST:g}")
    if seed is not None:
        check_seeds([seed])
        if not any(temperatures):
            raise Refused(f"--seed {seed} needs a --temperature above 0: greedy text is the same under every seed")


def _print(
    figures: Sequence[Figures],
    attained: Sequence[Attained],
    machine: Machine | None,
    rows: Sequence[RooflinePoint],
    rounds: int,
    found: Sequence[Quality],
) -> None:
    from truedraft.bench import columns

    out = console()
    if found:
        print_table(out, columns.lossy(figures, found))
    elif figures:
        print_table(out, columns.speed(figures, rounds))
        print_table(out, columns.latency(figures, rounds))
        for fault in columns.faults(figures):
            print_folded(out, fault, "red")
        for note in columns.notes(figures):
            print_folded(out, note)
    if attained:
        print_table(out, columns.with_oracle(attained))
    if rows and machine is not None:
        print_table(out, columns.roofline(rows, machine))
        print_folded(out, columns.free(rows))
