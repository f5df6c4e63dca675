"""Who may talk to the lab: the checks that stand in front of every request.

Owns: `Guard`, an ASGI middleware, and the security headers of every answer.

Promises: a request passes only if its Host is this loopback address, its Origin (when there is one) is this page,
and, under `/api`, it carries the token of this start, as a cookie or as `Authorization: Bearer`. The address that
`hotloop lab` prints carries the token once; the answer moves it into a cookie that scripts cannot read and drops it
from the address. The content policy allows this server's own files and nothing else: no inline script, no other host.

Does not do: routes (server.py).
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


def refusal(status: int, code: str, why: str, do: str = "") -> Response:
    """Build the one error shape of the lab's API: `{"error": {"code", "message", "do"}}`."""
    body = {"error": {"code": code, "message": why, "do": do}}
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def is_local_host(host: str, port: int) -> bool:
    """Tell whether a Host header names this server: a loopback name with its port."""
    return host in {f"{name}:{port}" for name in LOOPBACK_NAMES}


def is_local_origin(origin: str, port: int) -> bool:
    """Tell whether an Origin header is this page's own."""
    return origin in {f"http://{name}:{port}" for name in LOOPBACK_NAMES}


class Guard:
    """ASGI middleware: refuse what does not come from the opened page, and add the security headers."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._port = port
        self._cookie = f"hotloop_lab_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._answer_at_once(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _answer_at_once(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not is_local_host(headers.get("host", ""), self._port):
            return refusal(403, "host_refused", "the lab answers only to its own loopback address")
        origin = headers.get("origin")
        if origin is not None and not is_local_origin(origin, self._port):
            return refusal(403, "origin_refused", "the request comes from another page")
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            moved = RedirectResponse("/", status_code=303)
            moved.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return moved
        if scope["path"].startswith("/api/") and not self._is_token(self._token_of(headers)):
            return refusal(
                401, "token_refused", "the request carries no valid token", "Open the address that hotloop lab printed."
            )
        return None

    def _token_of(self, headers: Headers) -> str:
        authorization = headers.get("authorization", "")
        if authorization.startswith("Bearer "):
            return authorization.removeprefix("Bearer ")
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel else ""

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
        await send(message)

    return wrapped
