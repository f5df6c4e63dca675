"""Asking a deployment to go back to an older snapshot, over its hot-load API.

Owns: `post_rollback`, and what every client of a deployment needs: which addresses are usable, which exit code an HTTP
error means.
Does not do: deciding whether it may; the deployment checks the identity and the key.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from hotloop.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, InputError, ServiceError
from hotloop.snapshots.layout import check_identity

HOT_LOAD_PATH = "/hot_load/v1/models/hot_load"
_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 1024**2


def post_rollback(url: str, identity: str, *, api_key: str = "") -> dict[str, Any]:
    """POST the identity with `allow_rewind: true`.

    Args:
        url: address of the deployment, with or without a path such as `/deployment/ID/sync`.
        api_key: sent as a bearer token; never part of a message.

    Returns: the deployment's answer.

    Raises: SnapshotError `invalid_identity`; InputError `invalid_url`; ServiceError with the deployment's own code, or
        `deployment_unreachable`.
    """
    check_identity(identity)
    check_deployment_url(url)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    body = json.dumps({"identity": identity, "allow_rewind": True}).encode()
    request = Request(url.rstrip("/") + HOT_LOAD_PATH, data=body, headers=headers, method="POST")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return _parse(response.read(_MAX_ANSWER_BYTES))
    except HTTPError as error:
        with error:
            answer = _parse(error.read(_MAX_ANSWER_BYTES)).get("error")
        found = answer if isinstance(answer, dict) else {}
        code = str(found.get("code") or "deployment_refused")
        message = str(found.get("message") or f"the deployment answered {error.code}")
        where = f"rollback to {identity}"
        refusal = ServiceError(code, message, where=where, exit_code=choose_exit_code(error.code))
        if f"[{code}]" in message:  # a deployment of ours sends a whole message
            refusal.args = (f"{where}: {message}",)
        raise refusal from None
    except (URLError, OSError) as error:
        raise ServiceError(
            "deployment_unreachable",
            f"no answer ({getattr(error, 'reason', error)})",
            where=url,
            do="Check the address and that the deployment runs.",
            retryable=True,
            exit_code=3,
        ) from None


def check_deployment_url(url: str) -> None:
    """Refuse what cannot be a deployment's address. The message does not repeat it: it may hold credentials.

    Raises: InputError `invalid_url`.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 host that is none
        is_usable = False
    if not is_usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise InputError(
            "invalid_url",
            "must be http:// or https:// with a host and without credentials, query or fragment",
            where="--url",
            do="Give the address that hotloop serve prints.",
        )


def choose_exit_code(status: int) -> int:
    """Return what a command exits with after an HTTP error: the request's fault, or the deployment's."""
    return EXIT_BAD_INPUT if 400 <= status < 500 else EXIT_ENVIRONMENT


def _parse(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
