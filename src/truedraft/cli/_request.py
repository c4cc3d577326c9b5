"""The request of `truedraft generate`: prompt and settings, checked before a model is loaded."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.bench.workloads import Item, items_of
from truedraft.cli._options import FIELD_OPTIONS, check_seeds
from truedraft.cli._text import BOM, read, waiting
from truedraft.errors import Refused, why

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated
    from truedraft.stats import Pass

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}  # fields that others override
MOST_TEXTS = 10_000  # per prompt: transformers copies the prompt for each before memory can be checked here
CANVAS = {"block_length", "steps"}  # settings of diffusion models
SAMPLED = ("top_h",)  # as SAMPLING, without options of their own
NUMBERS = ("top_h", "guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "length_penalty")
LISTS = ("suppress_tokens", "begin_suppress_tokens")  # of token ids
LISTED = ("forced_eos_token_id", "decoder_start_token_id")  # token ids, one or a list
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "min_new_tokens": (lambda v: v >= 0, "at least 0"),
    "num_return_sequences": (lambda v: 1 <= v <= MOST_TEXTS, f"between 1 and {MOST_TEXTS:,}"),
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
    place: its number among several prompts, a prefix of messages; "" for a single prompt.
    settings: fields of GenerationConfig.
    references: documents that the output may copy from.
    seed: for torch.manual_seed; None leaves torch's generator alone.
    chat: whether the prompt is a message for the tokenizer's chat template.
    """

    prompt: str
    settings: Mapping[str, Any]
    references: Sequence[str]
    seed: int | None
    chat: bool
    place: str = ""

    def check(self, fast: Accelerated) -> None:
        """Raises Refused for what can be checked before any request is run."""
        from truedraft.call.arguments import check_lengths
        from truedraft.canvas.targets import CanvasTarget

        if not isinstance(fast.target, CanvasTarget):
            for name in CANVAS & self.settings.keys():
                raise Refused(f"--{name.replace('_', '-')} is for diffusion models: leave it out")
        check_tokens(self.settings, fast.target.vocabulary)
        sources = fast.target.reads_sources
        if self.chat and sources:
            raise Refused("--chat: this model is an encoder-decoder, which reads one source; drop --chat")
        try:
            length = self._inputs(fast)["input_ids"].shape[1]
            if not sources:
                check_lengths(fast.target, length, self.settings["max_new_tokens"])
        except Refused as e:
            raise Refused(f"{self.place}{e}") from e

    def masks(self, fast: Accelerated) -> int:
        """How many masks of the prompt an any-subset model fills; 0 of other models."""
        return 0 if (mask := _mask(fast)) is None else int((self._inputs(fast)["input_ids"] == mask).sum())

    def run(
        self, fast: Accelerated, on_pass: Callable[[Pass], None], on_read: Callable[[int, int], None]
    ) -> list[list[int]]:
        """The new ids of every text; after Ctrl-C those generated so far. Where the prompt has masks, all ids of it.

        Raises:
            Refused: the prompt or a setting is not supported.
            ValueError: transformers rejects a setting.
        """
        import torch

        from truedraft.targets.kinds import prompt_length

        inputs = {name: t.to(fast.model.device) for name, t in self._inputs(fast).items()}
        if self.seed is not None:
            torch.manual_seed(self.seed)
        out: Any
        hooks = {"on_pass": on_pass, "on_read": on_read}
        given = {**inputs, "references": list(self.references) or None, **hooks, **self.settings}
        try:
            out = fast.generate(**given)
        except KeyboardInterrupt as interrupt:
            if (out := getattr(interrupt, "output", None)) is None:
                raise
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        start, known = prompt_length(fast.config, inputs["input_ids"]), 0
        if masks := self.masks(fast):
            start, known = 0, start - masks
        lengths = [known] * len(sequences)  # shorter rows are padded
        for emission in (e for done in fast.report().passes for e in done.emitted):
            lengths[emission.row] += len(emission.tokens)
        return [row[start : start + n].tolist() for row, n in zip(sequences, lengths, strict=True)]

    def _inputs(self, fast: Accelerated) -> dict[str, Any]:
        tokenizer = fast.tokenizer
        assert tokenizer is not None
        if self.chat:
            from truedraft.text.templates import check_chat

            check_chat(tokenizer)
            encoded: Any = tokenizer.apply_chat_template(
                [{"role": "user", "content": self.prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        else:
            special = _mask(fast) is None  # those of any-subset models stand behind the text, and end it
            encoded = tokenizer(self.prompt, add_special_tokens=special, return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise Refused("PROMPT has no token in this model's tokenizer: give some text")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _mask(fast: Accelerated) -> int | None:
    """The mask token of an any-subset model; None of other models."""
    from truedraft.canvas.subset import SubsetTarget

    return fast.target.mask if isinstance(fast.target, SubsetTarget) else None


def read_prompts(prompt: str | None, file: Path | None, many: Path | None) -> Callable[[bool], Sequence[Item]]:
    """A function of whether prompts are sources, which returns the prompts: that of `read_prompt`, or those of a file.

    Raises:
        Refused: the file cannot be read or has no prompts, or a prompt was also given; or as `read_prompt`.
    """
    if many is None:
        one = [Item(read_prompt(prompt, file))]
        return lambda sources: one
    if prompt is not None or file is not None:
        raise Refused(f"--prompts and {'PROMPT' if file is None else '--file'} were both given: choose one")
    items_of(many)
    return lambda sources: [item for _, item in items_of(many, sources)]


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input; the last two lose a byte order mark and a final newline.

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
            text = sys.stdin.read().removeprefix(BOM).removesuffix("\n")
        except UnicodeDecodeError as e:
            raise Refused("PROMPT on standard input is not UTF-8 text") from e
    if not text:
        raise Refused("PROMPT is empty: give some text as an argument, with --file, or on standard input")
    return text


def check_seed(seed: int | None, sample: bool) -> None:
    """Raises Refused for a seed without sampling, or outside of torch's range."""
    if seed is not None:
        check_seeds([seed])
        if not sample:
            raise Refused(f"--seed {seed} needs --sample: greedy text is the same under every seed")


def of_canvas(block_length: int | None, steps: int | None) -> dict[str, int]:
    """Settings that only diffusion models have.

    Raises:
        Refused: a number is below 1.
    """
    given = {"block_length": block_length, "steps": steps}
    for name, value in given.items():
        if value is not None and value < 1:
            raise Refused(f"--{name.replace('_', '-')} {value} must be at least 1")
    return {name: value for name, value in given.items() if value is not None}


def read_settings(fields: Mapping[str, Any], more: Sequence[str], shortest: int = 1) -> dict[str, Any]:
    """Fields of GenerationConfig from the options that were given (not None) and from `more`, each `key=value`.

    shortest: least value of `max_new_tokens`.

    Raises:
        Refused: an invalid value or combination, or an unknown field; the message names the option.
    """
    least, most = fields["min_new_tokens"], fields["max_new_tokens"]
    if most < shortest:
        raise Refused(f"--max-new-tokens {most} must be at least {shortest}")
    _check(fields)
    if least is not None and least > most:
        raise Refused(f"--min-new-tokens {least} is above --max-new-tokens {most}: change one of them")
    if "" in (fields["stop_strings"] or ()):
        raise Refused("--stop '' is empty: give the text to end after")
    for token in fields["eos_token_id"] or ():
        if token < 0:
            raise Refused(f"--eos {token} must be a token id, at least 0")
    settings = {name: value for name, value in fields.items() if value is not None}
    return settings | dict(_setting(text, fields) for text in more)


def check_tokens(settings: Mapping[str, Any], vocabulary: int) -> None:
    """Raises Refused for a token id in the settings that a model of this vocabulary does not have."""
    for name, value in settings.items():
        for token in _tokens(value) if _has_tokens(name) else ():
            if token >= vocabulary:
                option = FIELD_OPTIONS.get(name, f"--set {name}")
                raise Refused(f"{option} {token}: this model has {vocabulary:,} tokens, 0 to {vocabulary - 1}")


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
            shown = f"{value:g}" if isinstance(value, float) else value
            raise Refused(f"{_option(name)} {shown} must be {words}")


def _setting(text: str, fields: Mapping[str, Any]) -> tuple[str, Any]:
    key, eq, value = text.partition("=")
    if not eq:
        raise Refused(f"--set {text!r}: write key=value")
    if key in fields or key in LENGTHS:
        raise Refused(f"--set {key}: use {_option(LENGTHS.get(key, key))}")
    with waiting("loading transformers"):
        from transformers import GenerationConfig

    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise Refused(f"--set {key}: GenerationConfig has no such field{hint}")
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        parsed = value
    if parsed is not None:
        _check_setting(key, parsed, f"--set {key}={value}", fields["do_sample"])
    return key, parsed


def _check_setting(key: str, value: Any, shown: str, sample: bool) -> None:
    from transformers import GenerationConfig

    if key in SAMPLED and not sample:
        raise Refused(f"--set {key} needs --sample")
    if key in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Refused(f"{shown}: give a number")
    if _has_tokens(key):
        listed = isinstance(value, list | tuple)
        form = "a list of token ids" if key in LISTS else "a token id" + (" or a list of them" if key in LISTED else "")
        valid = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in _tokens(value))
        if not valid or not (listed if key in LISTS else key in LISTED or not listed):
            raise Refused(f"{shown}: give {form}")
    try:
        GenerationConfig(**{key: value, "do_sample": sample})
    except (TypeError, ValueError, AttributeError) as e:
        raise Refused(f"{shown}: {why(e)}") from e


def _has_tokens(field: str) -> bool:
    return field in LISTS or field.endswith("_token_id")


def _tokens(value: Any) -> Sequence[Any]:
    """The token ids of a field that has one, several or none."""
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _option(field: str) -> str:
    return FIELD_OPTIONS.get(field) or "--" + field.replace("_", "-")
