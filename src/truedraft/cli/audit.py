"""`truedraft audit`: compares accelerated with plain decoding, and explains every difference."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft import loading
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
from truedraft.cli._tables import print_folded, print_table
from truedraft.cli._text import console, read, waiting
from truedraft.errors import Refused
from truedraft.layout import Column, Table, grouped, labelled
from truedraft.targets.kinds import reads_sources
from truedraft.text.token_text import token_text

if TYPE_CHECKING:
    from truedraft.audit.laws import Law
    from truedraft.audit.tokens import Audit, Divergence

EXACT, INEXACT, INTERRUPTED = 0, 1, 130


def audit(
    model: Annotated[str, Argument(help="An embedded model, a local folder, or a name on the hub.")] = "nano",
    draft: Annotated[list[str] | None, Option(help="A drafter; repeatable. By default all available ones.")] = None,
    prompt: Annotated[
        list[str] | None, Option(help="A prompt, or source; repeatable. By default the embedded ones.")
    ] = None,
    file: Annotated[list[Path] | None, Option(help="A prompt from a file; repeatable.")] = None,
    max_new_tokens: Annotated[int, Option(help="New tokens per prompt.")] = 64,
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
    check_seeds(seeds)
    check_names(model, dtype, quantize, drafts=draft or (), control=control, runs=CANVASES)
    if loading.kind_of(loading.source_of(model, "MODEL")) == "canvas":
        if laws or ties != "keep":
            raise Refused("--laws and --ties are for autoregressive models: leave them out for a diffusion model")
        found, tokenizer = _canvases(model, draft, control, texts, max_new_tokens, batches, seeds, temperature, dtype,
                                     quantize, threads)  # fmt: skip
        return _finished(found, [], tokenizer, as_json)
    with waiting("loading the model") as show:
        use_threads(threads)
        from truedraft import accelerate, registry
        from truedraft.audit.tokens import Mode
        from truedraft.audit.tokens import audit as compare

        parts = {name: registry.load("drafters", name) for name in draft or _all(model) if name != registry.NONE}
        target, tokenizer = load(model, dtype, quantize)
        if laws and reads_sources(target.config):
            raise Refused("--laws tests decoder language models, and this is an encoder-decoder: drop --laws")
        context = getattr(target.config, "max_position_embeddings", None)
        if context is not None and max_new_tokens >= context:
            raise Refused(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the model's context of {context}"
            )
        sides = {
            name: accelerate(target, tokenizer, draft=part, control=control, ties=ties)
            for name, part in {"plain": None, **parts}.items()
        }
        chosen = texts or _embedded(target, tokenizer, max_new_tokens)
        modes = [Mode(False), *(Mode(True, s, temperature) for s in seeds), Mode(False, penalty=1.2)]
        tested: list[Law] = []
        try:
            found = compare(target, tokenizer, sides, chosen, model, max_new_tokens, batches, modes, show)
            tested = law_audit(target, tokenizer, parts, chosen, progress=show) if laws else []
        except KeyboardInterrupt as stop:
            found = getattr(stop, "finished", None) or replace(
                found, interrupted=True
            )  # interrupted in the comparison, or in the law tests
    return _finished(found, tested, tokenizer, as_json)


def _canvases(
    model: str, draft: list[str] | None, control: str, texts: list[str], tokens: int, batches: list[int],
    seeds: list[int], temperature: float, dtype: str, quantize: str | None, threads: int | None,
) -> tuple[Audit, Any]:  # fmt: skip
    """The audit of a diffusion model, and its tokenizer."""
    with waiting("loading the model") as show:
        use_threads(threads)
        from truedraft import accelerate, registry
        from truedraft.audit.canvases import audit_canvases
        from truedraft.audit.tokens import Mode

        target, tokenizer = load(model, dtype, quantize, runs=CANVASES)
        sides: Any = {
            name: accelerate(target, tokenizer, draft=None if name == "plain" else name, control=control)
            for name in ("plain", *(draft or registry.names("canvas.speculators")))
        }
        chosen = texts or _embedded(target, tokenizer, tokens)
        modes = [Mode(False), *(Mode(True, seed, temperature) for seed in seeds)]
        try:
            found = audit_canvases(target, tokenizer, sides, chosen, model, tokens, batches, modes, show)
        except KeyboardInterrupt as stop:
            found = stop.finished  # type: ignore[attr-defined]
    return found, tokenizer


def _finished(found: Audit, tested: list[Law], tokenizer: Any, as_json: bool) -> int:
    """Print the results; returns the exit code."""
    if as_json:
        print(json.dumps({**found.as_dict(), **({"laws": [law.as_dict() for law in tested]} if tested else {})}))
    else:
        _print(found, tested, tokenizer)
    if found.interrupted:
        return INTERRUPTED
    return EXACT if found.exact and all(law.holds for law in tested) else INEXACT


def _all(model: str) -> list[str]:
    """Every available drafter: those that need nothing, and those with a model if there is one for `model`."""
    from truedraft import assets, registry

    small = {"draft model": assets.DRAFTS.get(model), "diffusion model": assets.DIFFUSION.get(model)}
    needs = {name: registry.method("drafters", name).card.needs for name in registry.names("drafters")}
    return [
        ":model=".join([name, *(small[need] or "" for need in what)])
        for name, what in needs.items()
        if len(what) <= 1 and all(small.get(need) for need in what)
    ]


def _embedded(model: Any, tokenizer: Any, tokens: int) -> list[str]:
    """The embedded stories and edits that fit into the context; for an encoder-decoder the sentences to correct."""
    from truedraft.bench.workloads import embedded

    room = getattr(model.config, "max_position_embeddings", None) or 10**9
    kinds = ("story", "edit", "mistakes")
    workloads = embedded(reads_sources(model.config))
    found = [item.text for workload in workloads if workload.name in kinds for item in workload.items]
    return [text for text in found if len(tokenizer(text)["input_ids"]) + tokens <= room]


def _print(found: Audit, tested: list[Law], tokenizer: Any) -> None:
    out = console()
    counts = found.as_dict()["divergences"]
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
    ]  # fmt: skip
    out.print(labelled(lines, out.width))
    out.print()
    if found.found:
        print_table(out, _differences(found.found, tokenizer))
    if tested:
        print_table(out, _laws(tested))
        print_folded(out, tested[0].caption)
    exact = found.exact and all(law.holds for law in tested)
    if found.interrupted:
        print_folded(out, "interrupted: these are the results until then")
    out.print("exact" if exact else "NOT exact: see the bugs above")


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
