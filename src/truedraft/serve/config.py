"""The settings of a server: the options of `truedraft serve`, and the names in its config file."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truedraft.errors import Refused, why
from truedraft.packaged import MODEL_HELP

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _setting(
    default: Any, help: str, low: float | None = None, high: float | None = None, among: tuple[str, ...] = ()
) -> Any:
    """A field with its help text and the values that it may have."""
    kept = {"help": help, "low": low, "high": high, "among": among}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=kept)
    return field(default=default, metadata=kept)


@dataclass(frozen=True)
class ServeConfig:
    """All settings of `truedraft serve`.

    Raises:
        Refused: a value is of another type, or out of range.
    """

    model: str = _setting("", MODEL_HELP)
    served_model_name: str | None = _setting(None, "The model's name in the API; by default MODEL.")
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16.")
    quantize: str | None = _setting(None, "Weights in int8 or int4; exact relative to the quantised model.")
    release_weights: bool = _setting(True, "Keep weights once, in the order in which compiled passes read them.")
    stretched: str | None = _setting(None, "Same text at a larger model's cost: nano at 0.1B or 0.5B.")
    chat_template: str | None = _setting(None, "A file with a chat template, or plain: the messages' text alone.")

    draft: str = _setting("auto", "The drafter of requests that name none; none for no drafts.")
    allow_draft: tuple[str, ...] = _setting((), "A further drafter that requests may name; repeatable.")
    rule: str | None = _setting(None, "An acceptance rule; by default the output is the model's.")
    view: str | None = _setting(None, "lossy/NAME: generate under a view, an approximation; another text.")
    attention: str | None = _setting(None, "Of a diffusion model: whole or blocks; its views are for whole.")
    control: str = _setting("cost", "Draft size: cost (what pays here) or fixed (always full).")
    memory: Path | None = _setting(None, "A file of earlier outputs, read at the start and written at the end.")
    record: Path | None = _setting(None, "A file to keep prompts and responses in, to train drafters on.")
    train: Path | None = _setting(
        None, "A folder: train the drafter on what is recorded; a better one takes its place."
    )
    train_every: int = _setting(500, "Responses that are recorded before each training.", 10)
    train_minutes: float = _setting(10.0, "Minutes of a training.", 1e-3)
    train_threads: int = _setting(1, "Threads of a training, which has the lowest priority.", 1)
    train_knobs: str = _setting("", "Knobs of the training, as in DRAFTER:knob=value of truedraft train.")
    train_weights: str = _setting(
        "none", "Train on responses equally often, or as their tokens per pass: accepted.", among=("none", "accepted")
    )
    reference: dict[str, Path] = _setting({}, "NAME=PATH of a text that requests may name as a reference; repeatable.")

    threads: int | None = _setting(None, "Threads to use; by default torch's choice.", 1)
    max_rows: int = _setting(16, "Most rows (choices of requests) that run at once.", 1, 4096)
    max_model_len: int | None = _setting(None, "Most tokens of prompt and answer; by default the model's context.", 2)
    kv_cache_memory_bytes: int | None = _setting(
        None, "Memory for keys and values, of prefixes too, as 8G; by default what memory_utilization leaves.", 1
    )
    memory_utilization: float = _setting(
        0.8, "Share of the machine's memory that may be in use, by whatever, once that is full.", 1e-3, 1
    )
    prefix_bytes: int = _setting(1 << 30, "Memory for prefixes of earlier texts, as 512M or 2G; 0 for none.", 0)
    share_prefixes: bool = _setting(False, "Let namespaces reuse each other's prefixes.")
    piece_seconds: float = _setting(
        0.05, "Longest part of a prompt that is read between two passes, in seconds.", 1e-3, 60
    )
    max_waiting: int = _setting(256, "Rows of a namespace that may wait; beyond them the answer is 429.", 0)
    max_rows_per_namespace: int | None = _setting(None, "Rows that a namespace may have while others wait.", 1)
    deadline: float | None = _setting(None, "Most seconds that a request may take.", 1e-3)

    host: str = _setting("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = _setting(8000, "Port to listen on; 0 for a free one.", 0, 65535)
    api_keys: Path | None = _setting(None, "A file of NAMESPACE=KEY lines; or the variable TRUEDRAFT_API_KEYS.")
    allow_origin: tuple[str, ...] = _setting((), "An origin whose pages may call the API; repeatable.")
    page: bool = _setting(True, "Serve a page at / that shows what happens.")
    max_connections: int = _setting(16384, "Connections at once; further ones are closed.", 1)
    idle_seconds: float = _setting(30.0, "Seconds that a client may take to send a request.", 0.1)
    write_seconds: float = _setting(60.0, "Seconds that a client may leave a stream unread.", 0.1)

    max_body_bytes: int = _setting(8 << 20, "Bytes of a request's body.", 1024)
    max_prompts: int = _setting(64, "Prompts in a request.", 1)
    max_n: int = _setting(16, "Choices for a prompt.", 1)
    max_stop: int = _setting(16, "Stop strings, and stop token ids, in a request.", 0)
    max_stop_chars: int = _setting(256, "Characters of the stop strings of a request, together.", 1)
    max_logit_bias: int = _setting(1024, "Entries of logit_bias.", 0)
    max_logprobs: int = _setting(20, "Likeliest tokens returned with each token.", 0)
    max_references: int = _setting(16, "References in a request.", 0)
    max_reference_tokens: int = _setting(100_000, "Tokens of references and prediction in a request.", 0)
    max_schema_bytes: int = _setting(64 << 10, "Bytes of a JSON schema, grammar or regular expression.", 0)

    ray: bool = _setting(False, "Run replicas of the server on Ray, on one machine or several.")
    replicas: int = _setting(1, "Replicas on Ray.", 1, 4096)

    shutdown_seconds: float = _setting(120.0, "Seconds that running requests have after SIGTERM.", 0)
    stream_interval: float = _setting(0.01, "Least seconds between two events of a stream.", 0, 1)
    log_level: str = _setting("info", "debug, info, warning or error.", among=("debug", "info", "warning", "error"))
    log_json: bool = _setting(False, "One JSON object per line of the log.")
    log_prompts: bool = _setting(False, "Prompts and texts in the log.")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, _checked(each, hints[each.name], getattr(self, each.name)))
        if not self.model:
            raise Refused("MODEL is missing: name a model, or give model= in the config file")
        if self.replicas > 1 and not self.ray:
            raise Refused(f"replicas={self.replicas} needs Ray: give --ray")
        if self.train is not None:
            self._check_training()

    def _check_training(self) -> None:
        """Raises Refused where a drafter cannot be trained beside the server."""
        given = f"train={str(self.train)!r}"
        if self.record is None:
            raise Refused(f"{given} trains on what is recorded: give record= a file as well")
        if self.ray:
            raise Refused(f"{given}: replicas would train each for itself: leave it out, or ray")
        if self.quantize is not None:
            raise Refused(f"{given} needs the model's own weights: leave it out, or quantize={self.quantize!r}")
        if self.view is not None:
            raise Refused(f"{given} trains for the model, and view={self.view!r} is another: leave one out")

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafters that a request may name, the default first."""
        return tuple(dict.fromkeys([self.draft, *self.allow_draft, "none"]))


def configured(file: Path | None, options: Mapping[str, Any]) -> ServeConfig:
    """The settings of a config file (TOML), with options in their place.

    Raises:
        Refused: the file cannot be read, or a setting is unknown, of another type, or out of range.
    """
    settings: dict[str, Any] = {}
    if file is not None:
        try:
            settings = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise Refused(f"config {file}: {why(e)}") from e
        if unknown := sorted({*settings} - {each.name for each in dataclasses.fields(ServeConfig)}):
            raise Refused(f"config {file}: {unknown[0]} is no setting; `truedraft serve --help` lists them")
    return ServeConfig(**settings | dict(options))


FORMS: dict[type, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path",
    tuple: "a list of texts", dict: "a table of names and paths",
}  # fmt: skip


def _checked(each: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """A value as its setting has it: sizes as numbers, lists as tuples, names of files as paths."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    meta = each.metadata
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    origin = typing.get_origin(kind) or kind
    if kind is int and isinstance(value, str) and (match := re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", value.strip())):
        value = int(match[1]) * UNITS[match[2]]
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if origin is dict and isinstance(value, dict):
        value = {name: Path(path) for name, path in value.items()}
    if kind is Path and isinstance(value, str):
        value = Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and kind is not bool):
        raise Refused(f"{each.name}={value!r}: give {FORMS[origin]} ({meta['help'].rstrip('.')})")
    low, high = meta["low"], meta["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        raise Refused(f"{each.name}={value!r}: give {bounds}")
    if meta["among"] and value not in meta["among"]:
        raise Refused(f"{each.name}={value!r}: choose one of {', '.join(meta['among'])}")
    return value
