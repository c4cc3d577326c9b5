"""A request as the rows that the engine runs for it: arguments of `generate`, checked against the server's bounds."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from truedraft.serve.constraints import Kind
from truedraft.serve.errors import ApiError
from truedraft.serve.job import Job
from truedraft.serve.model import ServedModel
from truedraft.serve.processors import OutputPenalties
from truedraft.serve.protocol import (
    ChatBody,
    CompletionBody,
    FileReference,
    GenerationBody,
    Reference,
    ResponseReference,
    TextReference,
)

COLDEST = 1e-6  # temperature: below, the logits of many models overflow
DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API reference
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": None}


@dataclass(frozen=True)
class Plan:
    """The rows of a request.

    jobs: one per prompt and choice, those of a prompt together.
    choices: rows per prompt.
    prompts: token ids of each prompt.
    stop: stop strings. keep_stop: whether they stay at the end of the text.
    seed: the seed of all rows; the i-th choice of a prompt has the noise of row i of `generate(seed=seed)`.
    predicted: token ids of `prediction`; None without one.
    logprobs: likeliest tokens to return for each token; None for no log-probabilities at all.
    kept: special tokens, as text, that are shown even so.
    """

    jobs: Sequence[Job]
    choices: int
    prompts: Sequence[Sequence[int]]
    stop: Sequence[str]
    keep_stop: bool
    seed: int
    predicted: Sequence[int] | None
    logprobs: int | None
    skip_special_tokens: bool
    kept: Collection[str]


def planned(
    model: ServedModel,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    namespace: str,
    id: str,
    forced: str | None = None,
    kept: Collection[str] = (),
) -> Plan:
    """The rows of a request. It may compile a grammar: then call it outside of the event loop.

    Args:
        forced: a grammar for the text besides those that the body may give, in Lark.
        kept: special tokens, as text, that a parser of the text has to see.

    Raises:
        ApiError: a parameter is out of the server's bounds, or cannot be honoured.
    """
    n = body.n or 1
    check_bounds(model, body, len(prompts))
    model.check(body)
    stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    predicted = None if body.prediction is None else model.encoded(body.prediction.text, False)
    references = ([predicted] if predicted else []) + [
        documents_of(model, reference, namespace, i) for i, reference in enumerate(body.references or ())
    ]
    _check_copied(model, references)
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    logprobs = _logprobs(model, body)
    constraint = constraint_of(body, forced)
    skip = body.skip_special_tokens is not False
    shared = _sampling(model, body) | _ends(model, body) | {
        "draft": model.drafter(body.draft, bool(references), constraint is not None),
        "references": references or None,
        "seed": seed,
        "logprobs": logprobs,
    }  # fmt: skip
    deadline = min(filter(None, (body.deadline, model.config.deadline)), default=None)
    jobs: list[Job] = []
    changed = asyncio.Event()
    for ids in prompts:
        most = max_tokens(model, body, len(ids))
        for choice in range(n):
            criteria = [model.stops(ids, stop, skip, kept)] if stop else []
            settings = shared | {
                "sequence": choice,
                "logits_processor": _processors(model, body, len(ids), constraint),
                "stopping_criteria": StoppingCriteriaList(criteria),
            }
            jobs.append(Job(ids, settings, most, namespace, deadline, id, changed))
    return Plan(
        jobs, n, prompts, stop, bool(body.include_stop_str_in_output), seed, predicted, logprobs,
        skip, kept,
    )  # fmt: skip


def check_bounds(model: ServedModel, body: GenerationBody, prompts: int) -> None:
    """Raises ApiError where a list or text in a request is longer than the server's settings allow."""
    config = model.config
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for param, size, most in (
        ("prompt", prompts, config.max_prompts),
        ("stop", len(stop), config.max_stop),
        ("stop_token_ids", len(body.stop_token_ids or ()), config.max_stop),
        ("logit_bias", len(body.logit_bias or ()), config.max_logit_bias),
        ("references", len(body.references or ()), config.max_references),
    ):
        if size > most:
            raise ApiError(400, f"{param} has {size} entries, this server allows {most}", param)
    if (body.n or 1) > config.max_n:
        raise ApiError(400, f"n={body.n}: this server allows {config.max_n}", "n")
    for i, string in enumerate(stop):
        if not string:
            raise ApiError(400, f"stop[{i}] is empty: give at least one character", "stop")
    if (length := sum(map(len, stop))) > config.max_stop_chars:
        raise ApiError(400, f"stop has {length} characters, this server allows {config.max_stop_chars}", "stop")
    if (name := body.model) is not None and name != model.name:
        raise ApiError(404, f"model={name!r} is not served here: use {model.name!r}", "model", "model_not_found")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")


def _check_copied(model: ServedModel, references: Sequence[Sequence[int]]) -> None:
    """Raises ApiError where references are longer than what may be indexed in the engine's thread at once."""
    count, most = sum(map(len, references)), model.config.max_reference_tokens
    if count > most:
        raise ApiError(
            400, f"references and prediction have {count} tokens, this server allows {most}: shorten them", "references"
        )


def max_tokens(model: ServedModel, body: GenerationBody, prompt: int) -> int:
    """Most tokens that a row emits; by default, in a chat, all for which there is room.

    Raises:
        ApiError: they do not fit in the context behind the prompt, or cross the length at which its rotary embeddings
            change.
    """
    room = model.max_model_len - prompt
    switch = model.before_switch(prompt)
    near = room if switch is None else min(room, switch[0])
    longer = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    name = "max_completion_tokens" if longer else "max_tokens"
    if isinstance(body, CompletionBody):
        given = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        most = min(given, max(near, 1)) if body.max_tokens is None else given
    else:
        assert isinstance(body, ChatBody)
        chosen = getattr(body, name)
        most = max(near, 1) if chosen is None else chosen
    if prompt < 1:
        raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
    if most > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{prompt + most} tokens ({prompt} in the prompt, {most} for the completion): shorten the prompt or lower "
            f"{name}",
            name, "context_length_exceeded",
        )  # fmt: skip
    if switch is not None and most > switch[0]:
        remedy = f"set {name} to at most {switch[0]}" if switch[0] > 0 else "shorten the prompt"
        text = f"{name}={most}: a prompt of {prompt} tokens and {most} new ones reach {switch[1]}: {remedy}"
        raise ApiError(400, text, name, "context_length_exceeded")
    if (body.min_tokens or 0) > most:
        raise ApiError(400, f"min_tokens={body.min_tokens} is more than {name}={most}", "min_tokens")
    return most


def _sampling(model: ServedModel, body: GenerationBody) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: value if (value := getattr(body, name)) is not None else model.defaults.get(name, neutral)
        for name, neutral in NEUTRAL.items()
    }
    bias = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and int(key) < model.fast.target.vocabulary):
            raise ApiError(400, f"logit_bias has the key {key[:20]!r}: give token ids of this model", "logit_bias")
        bias[(int(key),)] = float(value)
    given: dict[str, Any] = {
        "repetition_penalty": values["repetition_penalty"],
        "sequence_bias": bias or None,
        "do_sample": values["temperature"] > 0,
    }
    if values["temperature"] == 0:
        return given
    if values["temperature"] < COLDEST:
        raise ApiError(400, f"temperature={values['temperature']}: give 0, or at least {COLDEST}", "temperature")
    given |= {name: values[name] for name in ("temperature", "top_p", "min_p")}
    return given | {"top_k": max(values["top_k"] or 0, 0)}


def _ends(model: ServedModel, body: GenerationBody) -> dict[str, Any]:
    ends = [*(() if body.ignore_eos else model.end_ids), *(body.stop_token_ids or ())]
    for token in body.stop_token_ids or ():
        if token >= model.fast.target.vocabulary:
            raise ApiError(400, f"stop_token_ids has {token}: give token ids of this model", "stop_token_ids")
    return {
        "eos_token_id": ends or None,
        "pad_token_id": model.tokenizer.pad_token_id or 0,
        "min_new_tokens": body.min_tokens or None,
        "num_beams": 1,
    }


def constraint_of(body: GenerationBody, forced: str | None) -> tuple[Kind, Any] | None:
    """The constraint of a request, for `Constraints.processor`.

    Raises:
        ApiError: there are two.
    """
    found: list[tuple[Kind, Any]] = [] if forced is None else [("grammar", forced)]
    if (form := body.response_format) is not None and form.type != "text":
        schema = None if form.json_schema is None else form.json_schema.schema_
        found.append(("json_object", None) if schema in (None, True) else ("json_schema", schema))
    if (given := body.structured_outputs) is not None:
        kinds: dict[Kind, Any] = {
            "json_schema": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar
        }  # fmt: skip
        found += [(kind, value) for kind, value in kinds.items() if value is not None]
    if len(found) > 1:
        names = "response_format, structured_outputs and tool_choice"
        raise ApiError(400, f"{names} all constrain the text: give one of them", "response_format")
    if found and body.ignore_eos:
        raise ApiError(400, "ignore_eos=true with a constraint, which ends with the text: leave one out", "ignore_eos")
    return found[0] if found else None


def _processors(
    model: ServedModel, body: GenerationBody, prompt: int, constraint: tuple[Kind, Any] | None
) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if body.frequency_penalty or body.presence_penalty:
        processors.append(OutputPenalties(body.frequency_penalty or 0.0, body.presence_penalty or 0.0, prompt))
    if constraint is not None:
        processors.append(model.constraints.processor(*constraint, prompt))
    return processors


def _logprobs(model: ServedModel, body: GenerationBody) -> int | None:
    """Likeliest tokens to return with each token; None where no log-probabilities are asked for."""
    if isinstance(body, ChatBody):
        name, most = "top_logprobs", (body.top_logprobs or 0) if body.logprobs else None
    else:
        assert isinstance(body, CompletionBody)
        name, most = "logprobs", body.logprobs
    if most is not None and most > model.config.max_logprobs:
        raise ApiError(400, f"{name}={most}: this server allows {model.config.max_logprobs}", name)
    return most


def documents_of(model: ServedModel, reference: Reference, namespace: str, index: int) -> list[int]:
    """The token ids of a reference.

    Raises:
        ApiError: there is no such file or response.
    """
    match reference:
        case FileReference(name=name):
            if name not in model.files:
                raise ApiError(
                    404, f"references[{index}]: this server was started without a file {name!r}", "references"
                )
            return model.files[name]
        case ResponseReference(id=id):
            if (tokens := model.response(namespace, id)) is None:
                raise ApiError(404, f"references[{index}]: there is no response {id!r} any more", "references")
            return tokens
        case TextReference(text=text):
            return model.encoded(text, False)
    return model.encoded(reference, False)
