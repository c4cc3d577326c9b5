"""A request as the rows that the engine runs for it: arguments of `generate`, checked against the server's bounds."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from truedraft.errors import Refused
from truedraft.serve.constraints import Constraint, Enforced, Kind
from truedraft.serve.errors import ApiError
from truedraft.serve.job import Job
from truedraft.serve.listing import Listing
from truedraft.serve.model import ServedModel
from truedraft.serve.processors import BadWords, OutputPenalties, spellings
from truedraft.serve.protocol import (
    UNLIMITED,
    ChatBody,
    CompletionBody,
    FileReference,
    GenerationBody,
    Reference,
    ResponseReference,
    TextReference,
)
from truedraft.serve.refusals import of_refusal
from truedraft.serve.stops import Shown
from truedraft.text.token_text import token_text

COLDEST = 1e-6  # temperature: below, the logits of many models overflow
DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API reference
Constraining = tuple[Kind, Any, str | None]  # a kind and a definition, and the grammar of the text that it stands in
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": None}


@dataclass(frozen=True)
class Plan:
    """The rows of a request.

    jobs: one per prompt and choice, those of a prompt together.
    choices: rows per prompt.
    prompts: token ids of each prompt.
    shown: how their text is shown, and where stop strings end it.
    seed: the seed of all rows; the i-th choice of a prompt has the noise of row i of `generate(seed=seed)`.
    predicted: token ids of `prediction`; None without one.
    logprobs: likeliest tokens to return for each token; None for no log-probabilities at all.
    prompt_logprobs: the same for `prompt_logprobs`, the list of those of the prompt.
    listing: how tokens are listed.
    """

    jobs: Sequence[Job]
    choices: int
    prompts: Sequence[Sequence[int]]
    shown: Shown
    seed: int
    predicted: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    listing: Listing


def planned(
    model: ServedModel,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    namespace: str,
    id: str,
    forced: str | None = None,
    kept: Collection[str] = (),
    around: str | None = None,
) -> Plan:
    """The rows of a request. It may compile a grammar: then call it outside of the event loop.

    Args:
        forced: a grammar for the text besides those that the body may give, in Lark.
        kept: special tokens, as text, that a parser of the text has to see.
        around: a grammar of the whole text, in Lark, in which `@body` is what the body's constraint is for; None if
            that constrains the whole text.

    Raises:
        ApiError: a parameter is out of the server's bounds, or cannot be honoured.
    """
    n = body.n or 1
    check_bounds(model, body, len(prompts))
    model.check(body)
    predicted = None if body.prediction is None else model.encoded(body.prediction.text, False)
    references = ([predicted] if predicted else []) + [
        documents_of(model, reference, namespace, i) for i, reference in enumerate(body.references or ())
    ]
    _check_copied(model, references)
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    logprobs, scored = _logprobs(model, body), _scored(model, body)
    constraint = constraint_of(body, forced, around)
    banned = _bad_words(model, body)
    shown = _shown(model, body, kept, constraint is not None)
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
            processors, criteria = _processors(body, len(ids), banned), StoppingCriteriaList()
            if shown.stop:
                criteria.append(model.stops(ids, shown))
            if constraint is not None:
                constrained, enforced = _constrain(model, body, constraint, ids, shown, banned)
                processors.append(constrained)
                criteria.append(enforced)
            settings = shared | {"sequence": choice, "logits_processor": processors, "stopping_criteria": criteria}
            settings |= {"prompt_logprobs": scored} if scored is not None and choice == 0 else {}
            jobs.append(Job(ids, settings, most, namespace, deadline, id, changed))
    texts = token_text(model.tokenizer)
    listing = Listing(texts, texts.left_out(shown.skip_special_tokens, kept), shown.continues)
    return Plan(jobs, n, prompts, shown, seed, predicted, logprobs, body.prompt_logprobs, listing)


def check_bounds(model: ServedModel, body: GenerationBody, prompts: int) -> None:
    """Raises ApiError where a list or text in a request is longer than the server's settings allow."""
    config = model.config
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for param, size, most in (
        ("prompt", prompts, config.max_prompts),
        ("stop", len(stop), config.max_stop),
        ("stop_token_ids", len(body.stop_token_ids or ()), config.max_stop),
        ("bad_words", len(body.bad_words or ()), config.max_logit_bias),
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
        raise ApiError(400, "stream_options needs stream=true: give it, or leave both out", "stream_options")


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
    chosen = getattr(body, name)
    if chosen is None and isinstance(body, CompletionBody):
        most = min(DEFAULT_MAX_TOKENS, max(near, 1))
    else:
        most = max(near, 1) if chosen in (None, UNLIMITED) else chosen
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
        raise ApiError(400, f"min_tokens={body.min_tokens} is more than {name}={most}: lower it", "min_tokens")
    return most


def _shown(model: ServedModel, body: GenerationBody, kept: Collection[str], constrained: bool) -> Shown:
    return Shown(
        model.tokenizer,
        tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        keep_stop=bool(body.include_stop_str_in_output),
        least=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        kept=kept,
        continues=constrained,
    )


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


def constraint_of(body: GenerationBody, forced: str | None, around: str | None) -> Constraining | None:
    """The constraint of a request, for `Constraints.processor`.

    forced, around: as in `planned`.

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
        found += [("json_object", None)] if given.json_object else []
    if len(found) > 1:
        names = "response_format, structured_outputs and tool_choice"
        raise ApiError(400, f"{names} all constrain the text: give one of them", "response_format")
    if found and body.ignore_eos:
        raise ApiError(400, "ignore_eos=true with a constraint, which ends with the text: leave one out", "ignore_eos")
    return (*found[0], None if forced else around) if found else None


def _processors(body: GenerationBody, prompt: int, banned: Sequence[Sequence[int]]) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if body.frequency_penalty or body.presence_penalty:
        processors.append(OutputPenalties(body.frequency_penalty or 0.0, body.presence_penalty or 0.0, prompt))
    if banned:
        processors.append(BadWords(banned))
    return processors


def _constrain(
    model: ServedModel,
    body: GenerationBody,
    constraint: Constraining,
    ids: Sequence[int],
    shown: Shown,
    banned: Sequence[Sequence[int]],
) -> tuple[Constraint, Enforced]:
    """The processor that constrains one row, and the criterion that fails it should that not hold.

    Raises:
        ApiError: the constraint cannot be enforced.
    """
    kind, definition, around = constraint
    param = _source(body, kind)
    if not model.end_ids:
        reason = f"{param}: this model has no end-of-text token, with which a constrained text ends: leave it out"
        raise ApiError(400, reason, param, "unsupported_parameter")
    if body.include_stop_str_in_output and (body.stop_token_ids or body.skip_special_tokens is False):
        reason = f"include_stop_str_in_output=true shows the token that ends a text, which {param} does not allow"
        raise ApiError(400, f"{reason}: leave one out", "include_stop_str_in_output")
    prompt, stops = len(ids), body.stop_token_ids or ()
    text = shown.text(ids) if shown.stop else None
    try:
        constrained = model.constraints.processor(kind, definition, prompt, around, stops)
        enforced = model.constraints.enforced(
            kind, definition, prompt, around, stops, body.min_tokens or 0, text, banned
        )
    except Refused as error:
        raise of_refusal(Refused(f"{param}: {error}"), param) from error
    return constrained, enforced


def _source(body: GenerationBody, kind: Kind) -> str:
    """The parameter that a constraint is from."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    members = {"json_schema": "json"}
    return "tools" if body.structured_outputs is None else f"structured_outputs.{members.get(kind, kind)}"


def _bad_words(model: ServedModel, body: GenerationBody) -> list[list[int]]:
    """The sequences of tokens that must not be completed.

    Raises:
        ApiError: a word has no tokens, tokens that the model lacks, or is what ends a text.
    """
    found: list[list[int]] = []
    for i, word in enumerate(body.bad_words or ()):
        ways = spellings(model.tokenizer, word)
        for ids in ways:
            if not ids or max(ids) >= model.fast.target.vocabulary:
                reason = "it has no tokens" if not ids else "it has tokens that the model lacks"
                raise ApiError(400, f"bad_words[{i}]={word!r:.80}: {reason}; leave it out", "bad_words")
            if len(ids) == 1 and ids[0] in model.end_ids:
                raise ApiError(400, f"bad_words[{i}]={word!r:.80} ends the text: use ignore_eos", "bad_words")
        found += ways
    return found


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


def _scored(model: ServedModel, body: GenerationBody) -> int | None:
    """Likeliest tokens to compute for each token of the prompts, whose log-probabilities are those of the first choice
    of each; None where none are asked for.

    Raises:
        ApiError: there are none of this model's prompts, there are fewer, or they cannot be streamed.
    """
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    counts = {name: n for name, n in (("prompt_logprobs", body.prompt_logprobs), ("echo", echoed)) if n is not None}
    for name in counts:
        if not model.scores_prompts:
            raise ApiError(
                400, f"{name} asks for log-probabilities of the prompt, which the encoder of this model reads without "
                "any: leave it out", name, "unsupported_parameter",
            )  # fmt: skip
    if (given := body.prompt_logprobs) is not None:
        if given > model.config.max_logprobs:
            raise ApiError(
                400, f"prompt_logprobs={given}: this server allows {model.config.max_logprobs}", "prompt_logprobs"
            )
        if body.stream:
            raise ApiError(
                400, "prompt_logprobs belong to a whole response, and stream=true sends none: leave one of them out",
                "prompt_logprobs",
            )  # fmt: skip
    return max(counts.values(), default=None)


def documents_of(model: ServedModel, reference: Reference, namespace: str, index: int) -> list[int]:
    """The token ids of a reference.

    Raises:
        ApiError: there is no such file or response.
    """
    match reference:
        case FileReference(name=name):
            if name not in model.files:
                raise ApiError(
                    404,
                    f"references[{index}]: this server was started without a file {name!r}: give its text",
                    "references",
                )
            return model.files[name]
        case ResponseReference(id=id):
            if (tokens := model.response(namespace, id)) is None:
                raise ApiError(
                    404, f"references[{index}]: no response {id!r} is kept here: give its text", "references"
                )
            return tokens
        case TextReference(text=text):
            return model.encoded(text, False)
    return model.encoded(reference, False)
