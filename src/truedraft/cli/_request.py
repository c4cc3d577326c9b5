"""What `truedraft generate` was asked for: prompt and settings, checked before a model is loaded."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli._text import read, waiting
from truedraft.errors import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from truedraft.accelerated import Accelerated
    from truedraft.stats import Pass

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
OPTIONS = {"eos_token_id": "--eos", "stop_strings": "--stop", "do_sample": "--sample"}  # the others follow their fields

RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_new_tokens": (lambda v: v >= 1, "at least 1"),
    "min_new_tokens": (lambda v: v >= 0, "at least 0"),
    "num_return_sequences": (lambda v: v >= 1, "at least 1"),
    "temperature": (lambda v: 0 < v < inf, "above 0: for the likeliest tokens drop --sample"),
    "top_k": (lambda v: v >= 0, "at least 0 (0 keeps all)"),
    "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "typical_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "epsilon_cutoff": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "eta_cutoff": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "repetition_penalty": (lambda v: 0 < v < inf, "above 0 (1 changes nothing)"),
    "no_repeat_ngram_size": (lambda v: v >= 0, "at least 0 (0 forbids nothing)"),
    "max_time": (lambda v: v > 0, "above 0 seconds"),
}


@dataclass(frozen=True)
class Request:
    """One call of generate.

    prompt: as text.
    settings: fields of GenerationConfig.
    references: documents that the output may copy from.
    seed: for torch.manual_seed; None leaves torch's stream as it is.
    chat: whether the prompt is a message for the tokenizer's chat template.
    """

    prompt: str
    settings: Mapping[str, Any]
    references: Sequence[str]
    seed: int | None
    chat: bool

    def run(self, fast: Accelerated, on_pass: Callable[[Pass], None]) -> list[list[int]]:
        """The new ids of every text; after Ctrl-C as far as they had come.

        Raises:
            Refused: the prompt or a setting cannot be served.
            ValueError: transformers does not take a setting.
        """
        import torch

        if self.chat and fast.model.config.is_encoder_decoder:
            raise Refused("--chat: this model is an encoder-decoder, which reads one source; drop --chat")
        inputs = {name: t.to(fast.model.device) for name, t in self._inputs(fast.tokenizer).items()}
        if self.seed is not None:
            torch.manual_seed(self.seed)
        out: Any
        given = {**inputs, "references": list(self.references) or None, "on_pass": on_pass, **self.settings}
        try:
            out = fast.generate(**given)
        except KeyboardInterrupt as interrupt:
            if (out := getattr(interrupt, "output", None)) is None:
                raise
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        lengths = [0] * len(sequences)  # shorter rows are padded
        for emission in (e for done in fast.report().passes for e in done.emitted):
            lengths[emission.row] += len(emission.tokens)
        start = sequences.shape[1] - max(lengths)
        return [row[start : start + n].tolist() for row, n in zip(sequences, lengths, strict=True)]

    def _inputs(self, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        assert tokenizer is not None
        if self.chat:
            if not tokenizer.chat_template:
                raise Refused("--chat: the tokenizer of this model has no chat template; drop --chat")
            encoded: Any = tokenizer.apply_chat_template(
                [{"role": "user", "content": self.prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        else:
            encoded = tokenizer(self.prompt, return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise Refused("PROMPT has no token in this model's tokenizer: give some text")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input; the last two lose a final newline.

    Raises:
        Refused: none was given, or two, or it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise Refused("PROMPT and --file were both given: choose one")
    if file is not None:
        text = read(file, "--file").removesuffix("\n")
    elif prompt not in (None, "-"):
        text = str(prompt)
    elif prompt is None and sys.stdin.isatty():
        raise Refused("PROMPT is missing: give it as an argument, with --file, or on standard input")
    else:
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as e:
            raise Refused("PROMPT on standard input is not UTF-8 text") from e
    if not text:
        raise Refused("PROMPT is empty: give some text as an argument, with --file, or on standard input")
    return text


def read_settings(fields: Mapping[str, Any], more: Sequence[str]) -> dict[str, Any]:
    """Fields of GenerationConfig from the options that were given (not None) and from `more`, each `key=value`.

    Raises:
        Refused: a value or a combination that cannot be meant, or an unknown field; the message names the option.
    """
    _check(fields)
    settings = {name: value for name, value in fields.items() if value is not None}
    return settings | dict(_setting(text, fields) for text in more)


def _check(fields: Mapping[str, Any]) -> None:
    if not fields["do_sample"]:
        for name in SAMPLING:
            if fields[name] is not None:
                raise Refused(f"{_option(name)} needs --sample")
        if fields["num_return_sequences"] > 1:
            raise Refused("--num-return-sequences above 1 needs --sample: greedy texts would all be the same")
    for name, (allowed, words) in RANGES.items():
        value = fields[name]
        if value is not None and not allowed(value):
            raise Refused(f"{_option(name)} {value:g} must be {words}")


def _setting(text: str, fields: Mapping[str, Any]) -> tuple[str, Any]:
    key, eq, value = text.partition("=")
    if not eq:
        raise Refused(f"--set {text!r}: write key=value")
    if key in fields:
        raise Refused(f"--set {key}: use {_option(key)}")
    with waiting("loading transformers"):
        from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise Refused(f"--set {key}: GenerationConfig has no such field{hint}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _option(field: str) -> str:
    return OPTIONS.get(field) or "--" + field.replace("_", "-")
