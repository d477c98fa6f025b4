"""Errors as OpenAI's clients expect them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from capplan.errors import InputError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """A request that is refused.

    Parameters
    ----------
    status
        Of HTTP.
    message
        One line for people.
    param
        The field of the request that is wrong.
    code
        For programs, such as ``model_not_found``.
    headers
        Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """Return the error as JSON."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", errors="replace")

    def response(self) -> Response:
        """Return the error as a response."""
        return Response(self.body(), self.status_code, self.headers, "application/json")


def bad_request(error: InputError, param: str | None = None) -> ApiError:
    """Return what a request is told whose values the engine refuses."""
    return ApiError(400, str(error), param or error.location or None)


def answer_errors(app: FastAPI) -> None:
    """Have an application answer every error in this form."""
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(Exception, _of_defect)


async def _of_http(_: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return ApiError(status, detail).response()


async def _of_validation(_: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    return _first_problem(problems[0] if problems else {}).response()


def _first_problem(problem: Mapping[str, Any]) -> ApiError:
    """Return the error that names the first thing wrong in a body."""
    kind, where = problem.get("type"), [str(part) for part in problem.get("loc", ())[1:]]
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {problem['ctx']['error']} at {where[0]}")
    if not where and kind in ("model_attributes_type", "missing"):
        return ApiError(400, "The body must be a JSON object, with Content-Type: application/json")
    param = problem.get("ctx", {}).get("param") or (where[0] if where else None)
    place = ".".join(where) or param
    message = str(problem.get("msg", "is not valid")).removeprefix("Value error, ")
    return ApiError(400, f"{place}: {message}" if place else message, param)


async def _of_defect(_: Request, __: Exception) -> Response:
    """Say nothing of the inside; the traceback goes to the log."""
    return ApiError(500, "The server made a mistake").response()


def code_of(body: bytes) -> str | None:
    """Return the code of an error's body; None where it is no such body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return None
