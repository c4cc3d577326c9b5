"""What the library and the schema refuse, as errors of the API: about parameters of requests, by their names there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from truedraft.errors import Broken, NoRoom, Refused
from truedraft.serve.errors import ApiError
from truedraft.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

SHOWN = 80  # characters of a value in a message
ARGUMENTS = {
    "attention_mask": "prompt",
    "bad_words_ids": "bad_words",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "input_ids": "prompt",
    "logits_processor": "structured_outputs",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "pad_token_id": "stop_token_ids",
    "sequence": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
    "stopping_criteria": "stop",
    "template_kwargs": "chat_template_kwargs",
}  # arguments of the library, as its sentences name them -> the parameter of a request that sets them
WORDS = {"sequence", "eos_token_id", "pad_token_id"}  # other meanings too: only with a value, as in sequence=1
PARAMETERS = {name for body in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}
PATH = re.compile(r"([a-z][a-z_]*)((?:\[\d+\]|\.[a-z_]+)*)(?=[= :]|$)")  # of a parameter at the start of a sentence
EXPECTED = "input should be "


def of_refusal(error: Refused, param: str | None = None) -> ApiError:
    """The API's error for what the library refuses; where no setting of the request is at fault, one of the server.

    param: the parameter that is refused; by default the one that the sentence begins with.
    """
    message = str(error)
    for name, parameter in ARGUMENTS.items():
        end = "(?==)" if name in WORDS else r"(?!\w)"
        message = re.sub(rf"(?<![\w.-]){name}{end}", parameter, message)
    if isinstance(error, Broken | NoRoom):
        return ApiError(500 if isinstance(error, Broken) else 503, message)
    begins = PATH.match(message)
    if param is None and begins is not None and begins[1] in PARAMETERS:
        param = begins[0]
    return ApiError(400, message, param, "invalid_value")


def of_validation(error: ValidationError, given: Any) -> ApiError:
    """The API's error for a body that does not fit the schema: its clearest fault, with its path.

    given: the body, by which names and places in a fault's path are told from the names of types.
    """
    faults = [(_path(fault, given), fault) for fault in error.errors(include_url=False)]
    path, fault = max(faults, key=_fit)
    name = _written(path)
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is no parameter {_hint(name)}", name, "unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"{name} is missing: it is required", name, "missing_required_parameter")
    reason = _joined([_reason(other) for at, other in faults if at == path])
    if fault["type"] == "value_error":
        return ApiError(400, f"{name}: {reason}" if name else reason, name or None, "invalid_value")
    return ApiError(400, f"{name}={_short(fault['input'])}: {reason}", name, "invalid_value")


def _fit(faulty: tuple[tuple[str | int, ...], Any]) -> tuple[int, list[int]]:
    """How far a member of a union fits, by the path to its fault: lists are read up to their first one."""
    path, _ = faulty
    return len(path), [part for part in path if isinstance(part, int)]


def _hint(name: str) -> str:
    """The end of the sentence about an unknown parameter."""
    if name in PARAMETERS:
        return "of this endpoint, but of another: leave it out"
    near = [] if "." in name else get_close_matches(name, sorted(PARAMETERS), n=1)
    return f"here: did you mean {near[0]}?" if near else "here: leave it out"


def _reason(fault: Any) -> str:
    reason = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    return reason[:1].lower() + reason[1:]


def _joined(reasons: Sequence[str]) -> str:
    """One reason from those of all members of a union."""
    reasons = list(dict.fromkeys(reasons))
    if all(reason.startswith(EXPECTED) for reason in reasons):
        return EXPECTED + ", or ".join(reason.removeprefix(EXPECTED) for reason in reasons)
    return reasons[0]


def _path(fault: Any, given: Any) -> tuple[str | int, ...]:
    """The names and places that lead to a fault, and the name that is missing there."""
    path: list[str | int] = []
    for at, part in enumerate(fault["loc"]):
        inside = part in given if isinstance(given, dict) else isinstance(given, list) and part in range(len(given))
        if inside or (fault["type"] == "missing" and at == len(fault["loc"]) - 1):
            path.append(part)
        given = given[part] if inside else given
    return tuple(path)


def _written(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
