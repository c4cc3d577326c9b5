"""Errors of the API, in the shape that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from truedraft.errors import Refused

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
SHOWN = 80  # characters of a value in a message


class ApiError(Exception):
    """An error that a client receives as `{"error": {"message", "type", "param", "code"}}`.

    Args:
        status: HTTP status.
        message: one sentence that names the parameter, its value and the remedy.
        param: path of the parameter, as in `messages[0].content`.
        code: a machine-readable cause.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_refusal(error: Refused, param: str | None = None) -> ApiError:
    """The API's error for a setting that the engine refuses."""
    named = re.match(r"([a-z_]+)=", str(error))
    return ApiError(400, str(error), param or (named and named[1]) or None)


def of_validation(error: ValidationError) -> ApiError:
    """The API's error for a body that does not fit the schema: the first fault, with its path."""
    fault = _clearest(error.errors(include_url=False))
    path = _path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not a parameter of this endpoint: leave it out", path, "unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"{path} is missing: it is required", path, "missing_required_parameter")
    reason = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    reason = reason[:1].lower() + reason[1:]
    if fault["type"] == "value_error":
        return ApiError(400, f"{path}: {reason}" if path else reason, path or None, "invalid_value")
    return ApiError(400, f"{path}={_short(fault['input'])}: {reason}", path, "invalid_value")


def _clearest(faults: Sequence[Any]) -> Any:
    """Of the faults of all members of a union, that of the member which fits furthest."""
    return max(faults, key=lambda fault: len(fault["loc"]))


def _path(loc: Sequence[str | int]) -> str:
    parts = [part for part in loc if isinstance(part, int) or re.fullmatch(r"[a-z_0-9]+", part)]
    types = {"str", "int", "float", "bool", "list", "dict", "none"}
    names = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part not in types]
    return "".join(names).lstrip(".")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
