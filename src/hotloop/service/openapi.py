"""The OpenAPI 3.1 document of a deployment, built from its routes and from the fields that its parsers honour.

    routes of the gateway + OPERATIONS (what each takes and answers) + openapi_schemas.py --> GET /openapi.json

Promises: a route without a description, or a description without a route, fails the build; the statuses listed for an
address are all that it answers with.
Does not do: the schemas (openapi_schemas.py), enforcing anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hotloop import __version__
from hotloop.service.auth import Role
from hotloop.service.openapi_schemas import build_schemas
from hotloop.service.wire_errors import STATUS_OF_CODE

_BODY_STATUSES = (400, 408, 413)
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_MAY_WAIT = (409, 425, 429, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one method of one address takes and answers."""

    summary: str
    role: Role | None
    answer: str
    """Name of the schema of a success."""
    body: str = ""
    errors: tuple[int, ...] = ()
    """Statuses beside those that every address with a role or a body has."""
    success: int = 200
    media_types: tuple[str, ...] = ("application/json",)


_ROLLOUT = ("application/json", "text/event-stream")
_ROLLOUT_ERRORS = (404, 409, 425, 429, 502, 503)
HOT_LOAD = "/hot_load/v1/models/hot_load"
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", HOT_LOAD): Operation("What every replica serves and loads", "infer", "Status"),
    ("POST", HOT_LOAD): Operation(
        "Ask for an identity; accepted is not loaded", "admin", "LoadReply", "LoadRequest", (409, 503)
    ),
    ("DELETE", HOT_LOAD): Operation("Cancel what is not being installed yet", "admin", "Canceled", "", (409,)),
    ("POST", HOT_LOAD + "/hint"): Operation(
        "Prefetch a snapshot into the node's cache", "admin", "Accepted", "HintRequest", (), 202
    ),
    ("GET", HOT_LOAD + "/ledger"): Operation("History of loads, newest first", "infer", "Ledger"),
    ("DELETE", HOT_LOAD + "/ledger"): Operation(
        "Forget the history; the next load must be an anchor", "admin", "Cleared", "", (503,)
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Rollouts of a conversation", "infer", "Completion", "ChatRequest", _ROLLOUT_ERRORS, 200, _ROLLOUT
    ),
    ("POST", "/v1/completions"): Operation(
        "Rollouts of a text or of token ids", "infer", "Completion", "TextRequest", _ROLLOUT_ERRORS, 200, _ROLLOUT
    ),
    ("GET", "/v1/models"): Operation("The served name and snapshots", "infer", "Models"),
    ("GET", "/metrics"): Operation("Prometheus exposition", "infer", "", "", (), 200, ("text/plain",)),
    ("GET", "/health"): Operation("The gateway answers", None, "Health"),
    ("GET", "/ready"): Operation("A replica serves", None, "Ready", "", (503,)),
    ("GET", "/openapi.json"): Operation("This document", "infer", "Document"),
}


def build_document(routes: Iterable[tuple[str, str]], served_model_name: str, *, has_keys: bool) -> dict[str, Any]:
    """Describe the given (method, path) pairs.

    Raises:
        AssertionError: the routes are not those that are described here; a bug of ours.
    """
    found = set(routes)
    assert found == set(OPERATIONS), sorted(found ^ set(OPERATIONS))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _render(operation, has_keys)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "api_key": {"type": "apiKey", "in": "header", "name": "Authorization", "description": "Api-Key KEY"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"hotloop rollout service: {served_model_name}",
            "version": __version__,
            "description": "Every path may have /sync or /deployment/ID/sync in front.",
        },
        "paths": paths,
        "components": {"schemas": build_schemas(), "securitySchemes": schemes if has_keys else {}},
    }


def _render(operation: Operation, has_keys: bool) -> dict[str, Any]:
    statuses = set(operation.errors)
    if operation.role is not None:
        statuses |= {401, 403} if has_keys else {403}
    if operation.body:
        statuses |= set(_BODY_STATUSES)
    answers: dict[str, Any] = {
        str(operation.success): {
            "description": "Success",
            "content": {media_type: _content(operation, media_type) for media_type in operation.media_types},
        }
    }
    for status in sorted(statuses):
        codes = sorted(code for code, its in STATUS_OF_CODE.items() if its == status)
        answers[str(status)] = {
            "description": f"Codes: {', '.join(codes)}",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        if status in _MAY_WAIT:
            answers[str(status)]["headers"] = _RETRY_AFTER
    rendered: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.role is not None:
        rendered["description"] = f"Role: {operation.role}."
        if has_keys:
            rendered["security"] = [{"bearer": []}, {"api_key": []}]
    if operation.body:
        schema = {"$ref": f"#/components/schemas/{operation.body}"}
        rendered["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return rendered


def _content(operation: Operation, media_type: str) -> dict[str, Any]:
    if media_type == "application/json":
        return {"schema": {"$ref": f"#/components/schemas/{operation.answer}"}}
    return {"schema": {"type": "string"}}
