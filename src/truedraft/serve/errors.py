"""Errors of the API, in the shape that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The error about the same parameters, by the names that a request gives them.

        names: parameters as the server names them -> their names there.
        """
        message, param = self.message, self.param
        for name, other in names.items():
            if re.search(rf"(?<![\w.]){re.escape(other)}(?!\w)", self.message):
                continue  # it has that name already
            whole = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w])")
            message, param = whole.sub(other, message), whole.sub(other, param) if param else param
        return ApiError(self.status, message, param, self.code, self.headers)
