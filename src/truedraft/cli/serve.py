"""`truedraft serve`: an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from truedraft.cli._models import accelerated
from truedraft.cli._options import CANVASES, check_names
from truedraft.errors import Refused
from truedraft.packaged import MODEL_HELP
from truedraft.serve.config import ServeConfig, configured

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance")


def serve(**options: Any) -> int:
    """Serve a model to OpenAI's clients: every request's text is that of the model alone.

    Settings may also be given in a config file, under the same names; options replace them.

    \f
    Returns the exit code. Raises Refused for a bad setting.
    """
    file, check = options.pop("config"), options.pop("check")
    given = {name: _parsed(name, value) for name, value in options.items() if value not in (None, (), [])}
    config = configured(file, given)
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise Refused(f"truedraft serve needs {package}: pip install 'truedraft[serve]'")
    drafts = [name for name in config.drafts if name != "none"]
    check_names(
        config.model, config.dtype, config.quantize,
        drafts=drafts, control=config.control, rule=config.rule, views=[config.view],
        attention=config.attention, runs=CANVASES,
    )  # fmt: skip
    from truedraft.serve.keys import read_keys

    keys = read_keys(config.api_keys)
    if check:
        from truedraft.serve import plan

        print(plan.described(found := plan.planned(config)))
        plan.check_fits(found, config)
        return 0
    load = functools.partial(
        accelerated, config.model, config.dtype, config.draft, config.control, config.quantize, config.rule,
        threads=config.threads, stretched=config.stretched, view=config.view,
        attention=config.attention, runs=CANVASES, release_weights=None if config.release_weights else False,
    )  # fmt: skip
    if config.ray:
        if importlib.util.find_spec("ray") is None:
            raise Refused("truedraft serve --ray needs ray: pip install 'truedraft[ray]'")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read as Ray is imported: every line of the log, not one of many
        from truedraft.serve.ray import serve_on_ray

        return serve_on_ray(load, config, keys)
    from truedraft.serve.serving import serve as run

    return run(load(), config, keys)


def _parsed(name: str, value: Any) -> Any:
    if name != "reference":
        return tuple(value) if isinstance(value, list) else value
    named = [entry.partition("=") for entry in value]
    for label, sign, path in named:
        if not (label and sign and path):
            raise Refused(f"--reference {label}: give NAME=PATH")
    return {label: Path(path) for label, _, path in named}


def _option(each: dataclasses.Field[Any], hint: Any) -> Any:
    """The type and option of a setting; its default is that of the settings, shown in the help text."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = kinds[0]
    text = each.metadata["help"]
    if typing.get_origin(kind) in (tuple, dict):
        return Annotated[list[str] | None, Option(help=text)]
    if kind is bool:
        return Annotated[bool | None, Option(help=f"{text} [{'on' if each.default else 'off'}]", show_default=False)]
    if each.name.endswith("_bytes"):
        kind = str
    shown = "" if each.default is None else f" [{each.default}]"
    return Annotated[kind | None, Option(help=text + shown, show_default=False)]


def _signature() -> inspect.Signature:
    """The options of the command: those of `ServeConfig`."""
    hints = typing.get_type_hints(ServeConfig)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("model", keyword, default=None, annotation=Annotated[
            str | None, Argument(metavar="MODEL", help=MODEL_HELP)]),
        inspect.Parameter("config", keyword, default=None, annotation=Annotated[
            Path | None, Option(help="A TOML file of settings, under the names of these options.")]),
        inspect.Parameter("check", keyword, default=False, annotation=Annotated[
            bool, Option("--check", help="Print what memory is needed, and exit.")]),
    ]  # fmt: skip
    for each in dataclasses.fields(ServeConfig)[1:]:
        annotation = _option(each, hints[each.name])
        parameters.append(inspect.Parameter(each.name, keyword, default=None, annotation=annotation))
    return inspect.Signature(parameters)


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: p.annotation for name, p in serve.__signature__.parameters.items()}  # type: ignore[attr-defined]
