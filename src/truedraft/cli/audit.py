"""`truedraft audit`: compares accelerated with plain decoding, and explains every difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft import assets, loading, registry
from truedraft.cli._models import load
from truedraft.cli._options import (
    CANVASES,
    COLDEST,
    AsJson,
    Dtype,
    Quantize,
    Threads,
    check_names,
    check_seeds,
    use_threads,
)
from truedraft.cli._progress import Show, progressing
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, read
from truedraft.errors import Refused
from truedraft.layout import Column, Table, grouped, labelled
from truedraft.packaged import MODEL_HELP
from truedraft.targets.kinds import reads_sources
from truedraft.text.token_text import token_text

if TYPE_CHECKING:
    from truedraft.audit.laws import Law
    from truedraft.audit.tokens import Audit, Compared, Divergence

PLAIN = "plain"  # the engine without drafts
EXACT, INEXACT, INTERRUPTED = 0, 1, 130


def audit(
    model: Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)] = "nano",
    draft: Annotated[list[str] | None, Option(help="A drafter; repeatable. By default that of generate.")] = None,
    every: Annotated[bool, Option("--all", help="Every drafter that needs nothing, or has an embedded model.")] = False,
    prompt: Annotated[
        list[str] | None, Option(help="A prompt, or source; repeatable. By default the embedded ones.")
    ] = None,
    file: Annotated[list[Path] | None, Option(help="A prompt from a file; repeatable.")] = None,
    max_new_tokens: Annotated[int, Option(help="New tokens per prompt.")] = 24,
    batch: Annotated[list[int] | None, Option(help="Batch size; repeatable. By default 1 and 4.")] = None,
    seed: Annotated[list[int] | None, Option(help="Seed to sample under; repeatable. By default 0.")] = None,
    temperature: Annotated[float, Option(help="Temperature of the sampled runs.")] = 1.0,
    control: Annotated[str, Option(help="Draft size; fixed drafts in full, which tests more.")] = "fixed",
    ties: Annotated[str, Option(help="keep or recheck: near-ties scored again as transformers does.")] = "keep",
    laws: Annotated[bool, Option("--laws", help="Also test the law, for rules that guarantee only that.")] = False,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> int:
    """Compare drafted with plain decoding on this machine, token by token, and explain every difference.

    \f
    Returns the exit code: 0 where all differences are explained by rounding, else 1; 130 after Ctrl-C. Raises Refused
    for a bad argument.
    """
    batches, seeds = batch or [1, 4], [0] if seed is None else seed
    if min(batches) < 1 or max_new_tokens < 1 or not COLDEST <= temperature < inf:
        raise Refused(f"--batch and --max-new-tokens must be at least 1, --temperature at least {COLDEST:g}")
    texts = [*(prompt or ()), *(read(path, "--file").removesuffix("\n") for path in file or ())]
    if not all(texts):
        raise Refused("a prompt is empty: give some text")
    if laws:
        try:
            from truedraft.audit.laws import law_audit
        except ImportError as e:
            raise Refused("--laws needs scipy: pip install 'truedraft[audit]'") from e
    if every and draft:
        raise Refused(f"--all takes every drafter, and --draft {draft[0]} names one: leave one of the two out")
    check_seeds(seeds)
    check_names(model, dtype, quantize, drafts=draft or (), control=control, runs=CANVASES)
    canvas = loading.kind_of(loading.source_of(model, "MODEL")) == "canvas"
    if canvas and (laws or ties != "keep"):
        raise Refused("--laws and --ties are for autoregressive models: leave them out for a diffusion model")
    names = [name for name in draft or (_all(model, canvas) if every else [registry.AUTO]) if name != registry.NONE]
    try:
        with progressing("loading the model") as show:
            use_threads(threads)
            parts = {name: name if canvas else registry.load("drafters", name) for name in names}
            target, tokenizer = load(model, dtype, quantize, runs=CANVASES)
            _check(target, laws, max_new_tokens)
            chosen = texts or _embedded(target, tokenizer, max_new_tokens)
            sides, left_out = _sides(target, tokenizer, parts, every, control, ties, show)
            compare = _comparison(canvas, seeds, temperature)
            found = compare(target, tokenizer, sides, chosen, model, max_new_tokens, batches, progress=show)
    except KeyboardInterrupt as stop:
        if (found := getattr(stop, "finished", None)) is None:
            print("interrupted before anything was compared", file=sys.stderr)
            return INTERRUPTED
    tested: list[Law] = []
    if laws and not found.interrupted:
        try:
            with progressing("loading the drafters") as show:
                drawn: dict[str, Any] = {name: registry.load("drafters", name) for name in draft or _all(model)}
                tested = law_audit(target, tokenizer, drawn, chosen, progress=show)
        except KeyboardInterrupt as stop:
            tested, found.interrupted = getattr(stop, "finished", []), True
    return _finished(found, tested, left_out, tokenizer, as_json)


def _check(model: Any, laws: bool, tokens: int) -> None:
    """Raises Refused where the model cannot be audited as requested."""
    if laws and reads_sources(model.config):
        raise Refused("--laws tests decoder language models, and this is an encoder-decoder: drop --laws")
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and tokens >= context:
        raise Refused(f"--max-new-tokens {tokens} leaves no room for a prompt in the model's context of {context}")


def _sides(
    model: Any, tokenizer: Any, parts: Mapping[str, Any], every: bool, control: str, ties: str, show: Show
) -> tuple[dict[str, Any], dict[str, str]]:
    """The accelerated models by name, the first without drafts; and the drafters that refuse this model, with the
    reason.

    every: whether the drafters were not named one by one: then those that refuse the model are left out.

    Raises:
        Refused: the model cannot be hosted, or a drafter that was named refuses it.
    """
    from truedraft import accelerate

    sides: dict[str, Any] = {PLAIN: accelerate(model, tokenizer, draft=None, control=control, ties=ties)}
    left_out: dict[str, str] = {}
    for number, (name, part) in enumerate(parts.items(), 1):
        show(f"preparing {name}, {number} of {len(parts)}", 0.0)
        try:
            sides[name] = accelerate(model, tokenizer, draft=part, control=control, ties=ties)
        except Refused as refusal:
            if not every:
                raise
            left_out[name] = str(refusal)
    return sides, left_out


def _comparison(canvas: bool, seeds: Sequence[int], temperature: float) -> Any:
    """The audit of a diffusion model, or that of other models, with the ways in which tokens are chosen."""
    from truedraft.audit.canvases import audit_canvases
    from truedraft.audit.tokens import Mode
    from truedraft.audit.tokens import audit as compare

    modes = [Mode(False), *(Mode(True, seed, temperature) for seed in seeds)]
    if canvas:
        return partial(audit_canvases, modes=modes)
    return partial(compare, modes=[*modes, Mode(False, penalty=1.2)])


def _finished(found: Audit, tested: list[Law], left_out: Mapping[str, str], tokenizer: Any, as_json: bool) -> int:
    """Print the results; returns the exit code."""
    if as_json:
        laws = {"laws": [law.as_dict() for law in tested]} if tested else {}
        print(json.dumps({**found.as_dict(), "left_out": left_out, **laws}))
    else:
        _print(found, tested, left_out, tokenizer)
    if found.interrupted:
        return INTERRUPTED
    return EXACT if found.exact and all(law.holds for law in tested) else INEXACT


def _all(model: str, canvas: bool = False) -> list[str]:
    """Every available drafter: the default, those that need nothing, and those whose model or head is embedded."""
    if canvas:
        return registry.names("canvas.speculators")
    small = {"draft model": assets.DRAFTS.get(model), "diffusion model": assets.DIFFUSION.get(model)}
    needs = {name: registry.method("drafters", name).card.needs for name in registry.names("drafters")}
    heads = [name for name in assets.HEADS if assets.head(name, str(loading.source_of(model, "MODEL")))]
    available = [
        ":model=".join([name, *(small[need] or "" for need in what)])
        for name, what in needs.items()
        if len(what) <= 1 and all(small.get(need) for need in what)
    ]
    return [registry.AUTO, *available, *heads]


def _embedded(model: Any, tokenizer: Any, tokens: int) -> list[str]:
    """The embedded stories and edits that fit into the context, for a model with a chat template questions and edits;
    for an encoder-decoder the sentences to correct."""
    from truedraft.bench.workloads import embedded

    room = getattr(model.config, "max_position_embeddings", None) or 10**9
    kinds = ("story", "question", "edit", "mistakes")
    workloads = embedded(reads_sources(model.config), tokenizer)
    found = [item.text for workload in workloads if workload.name in kinds for item in workload.items]
    return [text for text in found if len(tokenizer(text)["input_ids"]) + tokens <= room]


def _print(found: Audit, tested: list[Law], left_out: Mapping[str, str], tokenizer: Any) -> None:
    out = console()
    counts, compared = found.of(), sum(one.texts for one in found.compared)
    lines = [
        ("model", f"{found.model}, {found.dtype}"),
        ("passes by", found.runtime),
        ("drafters", "; ".join(found.drafters)),
        ("modes", "; ".join(found.modes)),
        ("batches", ", ".join(map(str, found.batches))),
        ("compared", f"{found.tokens:,} tokens with model.generate, from {found.prompts} prompts"),
        ("differences", f"{counts['tie']} ties, {counts['numerics']} by numerics, {counts['bug']} bugs"),
        ("noise", f"the model's own logits have errors up to {found.noise:.2g} ({found.precise}); "
         f"the engine's up to {found.worst_row:.2g} times that"),
        ("left out", "; ".join(f"{name}: {reason}" for name, reason in left_out.items())),
    ]  # fmt: skip
    out.print(labelled(lines, out.width))
    out.print()
    if len(found.compared) > 2 or (found.interrupted and found.compared):
        print_table(out, _ways(found))
    if found.found:
        print_table(out, _differences(found.found, tokenizer))
    if tested:
        print_table(out, _laws(tested))
        print_folded(out, tested[0].caption)
    exact = found.exact and all(law.holds for law in tested)
    if found.interrupted:
        whole = f"all {compared} texts were compared, and {len(tested)} laws were tested; the other laws were not"
        part = f"{compared} of {found.texts} texts were compared, and the rest was not"
        print_folded(out, f"interrupted: {whole if compared == found.texts else part}")
    verdict = "exact" if exact else "NOT exact: see the bugs above"
    out.print(f"{verdict}, in what was compared" if found.interrupted and exact else verdict)


def _ways(found: Audit) -> Table[Compared]:
    columns: list[Column[Compared]] = [
        Column("way", "plain: the engine without drafts; else the drafter", lambda one: one.drafter),
        Column("texts", "that were compared with those of model.generate", lambda one: str(one.texts)),
        Column("tokens", "of these, up to the first difference of a text", lambda one: f"{one.tokens:,}"),
        Column("ties", "texts whose first difference rounding decides", lambda one: str(found.of(one.drafter)["tie"])),
        Column("numerics", "texts whose first difference is within the noise",
               lambda one: str(found.of(one.drafter)["numerics"])),
        Column("bugs", "texts whose first difference is neither", lambda one: str(found.of(one.drafter)["bug"])),
    ]  # fmt: skip
    return Table("Compared", columns, {"": found.compared})


def _differences(found: list[Divergence], tokenizer: Any) -> Table[Divergence]:
    def word(token: int) -> str:
        return "(ended)" if token < 0 else repr(token_text(tokenizer).name(token))

    columns: list[Column[Divergence]] = [
        Column("prompt", "", lambda d: f"prompt {d.prompt}"),
        Column("kind", "tie: rounding decides; numerics: within noise; bug: neither", lambda d: d.kind),
        Column("new token", "its index among the new ones, from 0", lambda d: str(d.position)),
        Column("expected", "the token of model.generate", lambda d: word(d.expected)),
        Column("got", "", lambda d: word(d.got)),
        Column(
            "gap",
            "difference of their scores, in higher precision",
            lambda d: "" if d.gap is None else f"{d.gap:.2g}",
        ),
        Column("noise", "error of such scores in the model itself", lambda d: f"{d.noise:.2g}"),
    ]
    return Table("First differences", columns, grouped(found, lambda d: f"{d.drafter}, {d.mode}, batch {d.batch}"))


def _laws(tested: list[Law]) -> Table[Law]:
    columns: list[Column[Law]] = [
        Column("rule", "", lambda law: law.rule),
        Column("verdict", "", lambda law: "holds" if law.holds else "BROKEN"),
        Column("p-value", "probability of such a sample if the law holds", lambda law: f"{law.p_value:.2g}"),
        Column("tokens", "sampled", lambda law: str(law.tokens)),
        Column(
            "a bias caught",
            "the least misplaced probability mass that this sample detects",
            lambda law: f"{law.bias:.2%}",
        ),
    ]
    return Table("Laws", columns, grouped(tested, lambda law: f"{law.drafter}, {law.settings}"))
