"""Options shared by commands, and the checks of them that need no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option
from typer.core import TyperCommand

from truedraft import loading, registry
from truedraft.errors import Refused

# Kinds of models that commands run.
TEXT: tuple[loading.Kind, ...] = ("text",)
CANVASES: tuple[loading.Kind, ...] = (*TEXT, "canvas")
SUBSETS: tuple[loading.Kind, ...] = (*CANVASES, "subset")
OTHERS: dict[loading.Kind, str] = {  # what follows the name of a model that a command does not run
    "canvas": "is a diffusion model, which this command does not run: `truedraft generate`, `serve`, `bench`, `audit` "
    "and `demo --canvas` do",
    "subset": "is an any-subset model, which this command does not run: `truedraft generate` fills masks with it",
}
DRAFTERS: dict[loading.Kind, str] = {  # in the registry
    "text": "drafters",
    "canvas": "canvas.speculators",
    "subset": "canvas.subsets",
}
COLDEST = 1e-6  # temperature: below, the logits of many models overflow

Control = Annotated[str, Option(help="Draft size: cost (what pays here) or fixed (always full).")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
Quantize = Annotated[str | None, Option(help="Weights in int8 or int4; exact relative to the quantised model.")]
Stretched = Annotated[
    str | None, Option(help="Same text at a larger model's cost: nano at 0.1B or 0.5B; any at LAYERSxHIDDEN.")
]
Threads = Annotated[int | None, Option(metavar="N", help="Threads to use; by default torch's choice.")]
View = Annotated[str | None, Option(help="lossy/NAME: generate under a view, an approximation; another text.")]
ATTENTIONS = ("whole", "blocks")
AttentionOption = Annotated[
    str | None, Option("--attention", help="Of a diffusion model: whole or blocks; its views are for whole.")
]
AsJson = Annotated[bool, Option("--json", help="One JSON object on standard output.")]


FIELD_OPTIONS = {"eos_token_id": "--eos", "stop_strings": "--stop", "do_sample": "--sample"}
ARGUMENT_OPTIONS = FIELD_OPTIONS | {"view": "--lossy"}  # where a command has no option of the argument's own name
METHODS = ("control", "draft", "rule", "ties", "view")  # arguments whose names are words of the language too


class Command(TyperCommand):
    """A command that refuses an option given twice unless it is repeatable, and whose refusals name its options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as e:
            if not isinstance(e, Refused) and type(e) is not ValueError:  # such as text that is not UTF-8
                raise
            options = {p.name: p.opts[0] for p in self.params if p.name and p.opts[0].startswith("--")}
            raise Refused(as_options(str(e), options)) from e

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for param in order:
            if order.count(param) > 1 and not (param.multiple or param.nargs == -1 or param.is_eager):
                ctx.fail(f"{param.opts[0]} was given {order.count(param)} times: give it once.")
        return super().parse_args(ctx, args)


def as_options(message: str, options: Mapping[str, str]) -> str:
    """A message of the library that names options in the place of arguments: `--max-new-tokens 5` for
    `max_new_tokens=5`.

    options: names of arguments -> the options of the command.
    """
    known = {field: option for field, option in ARGUMENT_OPTIONS.items() if option in options.values()} | {**options}
    for name, option in known.items():
        if "_" in name or name in METHODS:
            start = rf"(?<![\w.:,('\"-]){name}"
            message = re.sub(rf"{start}='([^' ]*)'", rf"{option} \1", message)
            message = re.sub(f"{start}=", f"{option} ", message)
        if "_" in name:
            message = re.sub(rf"{start}\b", option, message)
    return message


def check_names(
    model: str,
    dtype: str = "auto",
    quantize: str | None = None,
    argument: str = "MODEL",
    *,
    drafts: Sequence[str] = (),
    control: str = "cost",
    rule: str | None = None,
    views: Sequence[str | None] = (),
    attention: str | None = None,
    runs: Collection[loading.Kind] = TEXT,
) -> None:
    """Raises Refused for an unknown model, dtype, quantisation, method, knob or attention, or a model of another kind.

    views: that the model generates under.
    attention: of a diffusion model; models on the hub, whose kind is known once they are loaded, are checked then.
    runs: kinds of models that the command runs.
    """
    kind = loading.kind_of(loading.check(model, dtype, quantize, argument))
    check_kind(kind, model, argument, runs)
    if attention is not None:
        if attention not in ATTENTIONS:
            raise Refused(f"--attention {attention}: choose one of {', '.join(ATTENTIONS)}")
        if kind != "canvas" and isinstance(loading.source_of(model, argument), Path):
            raise Refused(f"--attention {attention} is for diffusion models, and {argument} {model!r} is none: drop it")
    for draft in drafts if kind == "text" else {*drafts} - {registry.AUTO, registry.NONE}:
        registry.check(DRAFTERS[kind], draft)
    given = [view for view in views if view]
    if kind == "subset":
        for option, value in (("--rule", rule), *(("--view", view) for view in given)):
            if value is not None:
                raise Refused(f"{option} {value} is not for any-subset models: leave it out")
    elif kind == "canvas":
        if rule is not None:
            registry.check("canvas.policies", rule)
        for view in given:
            registry.check("canvas.views", registry.canvas_view(view))
    else:
        registry.check("control", control)
        if rule is not None:
            registry.check("accept", rule)
        for view in given:
            registry.check_lossy_view(view)


def check_kind(kind: loading.Kind, model: str, argument: str, runs: Collection[loading.Kind]) -> None:
    """Raises Refused for a model of a kind that a command does not run."""
    if kind not in runs:
        raise Refused(f"{argument} {model!r} {OTHERS[kind]}")


def use_threads(threads: int | None) -> None:
    """Set torch's number of threads.

    Raises:
        Refused: this machine has fewer cores; raised before torch is loaded.
    """
    if threads is None:
        return
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise Refused(f"--threads {threads}: this machine has {cores} cores; give 1 to {cores}")
    import torch

    torch.set_num_threads(threads)


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises Refused for a seed outside of torch's range."""
    for seed in seeds:
        if not 0 <= seed < 2**64:
            raise Refused(f"--seed {seed} must be at least 0 and below 2**64")
