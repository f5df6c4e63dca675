"""How an error reads over HTTP: one table from code to status, one body.

Owns: the status of every code of the rollout service, the OpenAI-style error object and its headers.
Promises: every answer that is not a success has the one error body; a failure that nothing foresaw answers 500
`internal_error`, without its message.
Does not do: raising (the parts do) or routing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hotloop.errors import HotloopError, ServiceError
from hotloop.service.json_body import JsonResponse

logger = logging.getLogger(__name__)

_BY_STATUS: dict[int, tuple[str, ...]] = {
    400: (
        "invalid_json",
        "missing_identity",
        "invalid_identity",
        "unknown_field",
        "unsupported_format",
        "unsupported_checksum",
        "missing_format",
        "missing_parent",
        "invalid_field",
        "manifest_invalid",
        "invalid_index",
        "prompt_too_long",
        "empty_prompt",
        "token_out_of_vocabulary",
        "too_many_completions",
        "sampling_params",
        "routes_unsupported",
        "not_offered_by_engine",
        "no_tokenizer",
        "no_chat_template",
        "chat_template",
        "not_in_vocabulary",
        "tokenizer_not_found",
    ),
    401: ("unauthorized",),
    403: ("forbidden",),
    404: ("not_found", "model_not_found"),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    409: (
        "identity_conflict",
        "metadata_conflict",
        "parent_unknown",
        "parent_mismatch",
        "chain_broken",
        "chain_too_long",
        "snapshot_incomplete",
        "unsupported_snapshot",
        "incompatible_config",
        "layout_changed",
        "rewind_rejected",
        "anchor_required",
        "not_cancellable",
        "weight_version_not_ready",
        "weight_version_gone",
        "snapshot_not_served",
    ),
    413: ("request_too_large",),
    425: ("too_early",),
    429: ("queue_full",),
    502: ("replica_lost", "engine_error", "engine_closed"),
    500: ("internal_error",),
    503: (
        "storage_unavailable",
        "storage_access",
        "no_replicas",
        "startup_missing",
        "ledger_uncertain",
        "shutting_down",
        "engine_closed",
    ),
}
STATUS_OF_CODE = {code: status for status, codes in _BY_STATUS.items() for code in codes}

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    425: "overloaded_error",
    429: "overloaded_error",
    503: "overloaded_error",
}

RETRY_AFTER_CODES = frozenset(
    {"weight_version_not_ready", "too_early", "queue_full", "no_replicas", "storage_unavailable", "shutting_down"}
)


def status_of(error: HotloopError) -> int:
    """Return the HTTP status of an error; 500 for a code outside the table."""
    return STATUS_OF_CODE.get(error.code, 500)


def error_body(error: HotloopError) -> dict[str, Any]:
    """Return the error object that OpenAI clients read, with our code, identity and details beside it."""
    if error.code not in STATUS_OF_CODE:
        logger.error("no HTTP status is known for %s", error.code, exc_info=error)
        error = internal_error(error)
    status = status_of(error)
    details = dict(error.details)
    identity = details.pop("identity", None)
    body: dict[str, Any] = {
        "type": _TYPE_OF_STATUS.get(status, "api_error"),
        "code": error.code,
        "message": str(error),
        "param": details.pop("param", None),
        "identity": identity,
        "details": details,
        "retryable": error.retryable,
    }
    return {"error": body}


def error_response(error: HotloopError, more_headers: Mapping[str, str] | None = None) -> Response:
    """Answer with the error's status, its body, and `Retry-After` where waiting helps."""
    headers = dict(more_headers or {})
    wait_s = error.details.get("retry_after_s")
    if wait_s is not None or (error.code in RETRY_AFTER_CODES and error.retryable):
        headers["retry-after"] = str(int(wait_s or 1))
    return JsonResponse(error_body(error), status_code=status_of(error), headers=headers)


async def handle_hotloop_error(request: Request, error: Exception) -> Response:
    """Starlette handler for every error of ours."""
    assert isinstance(error, HotloopError)
    return error_response(error)


def internal_error(error: Exception) -> ServiceError:
    """Stand for a failure that nothing foresaw; its message may hold anything and stays in the log."""
    return ServiceError(
        "internal_error", f"the service failed ({type(error).__name__})", do="See the deployment's log, and report it."
    )


async def handle_any_error(request: Request, error: Exception) -> Response:
    """Starlette handler for what nothing foresaw; Starlette raises it again for the log."""
    return error_response(internal_error(error))


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for addresses and methods that do not exist."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return method_not_allowed(request.method, request.url.path, (error.headers or {}).get("Allow", ""))
    return error_response(not_found(request.url.path))


def method_not_allowed(method: str, path: str, allowed: str) -> Response:
    """Answer a method that an address does not know."""
    error = ServiceError("method_not_allowed", f"{method} is not allowed here", where=path, do=f"Use {allowed}.")
    return error_response(error, {"allow": allowed})


def not_found(path: str) -> ServiceError:
    """Say that no such address exists."""
    return ServiceError("not_found", "there is nothing here", where=path, do="See docs/reference/http.md.")


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """Starlette handler for a client that went away before its body was whole; nobody reads the answer."""
    return Response(status_code=400)


HANDLERS = {
    HotloopError: handle_hotloop_error,
    HTTPException: handle_http_error,
    ClientDisconnect: handle_disconnect,
    Exception: handle_any_error,
}
