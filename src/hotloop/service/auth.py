"""Who may ask what: API keys with roles, the rules of a service without keys, and the gateway's own token.

Owns: `Guard`, which judges one request by its headers.
Promises: keys are compared in constant time, all of them; without keys only loopback names are answered and a POST must
be JSON, so that a web page in a browser cannot move weights.
Does not do: reading secrets (secrets.py) or TLS (a proxy in front does).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hotloop.errors import InputError, ServiceError
from hotloop.service.secrets import Secret, parse_secret_object

Role = Literal["infer", "admin"]
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key and what it allows; admin includes infer."""

    key: bytes = field(repr=False)
    roles: frozenset[str]


def parse_keys(secret: Secret) -> tuple[ApiKey, ...]:
    """Read `{"keys":[{"key":"...","roles":["infer"]}]}`.

    Raises:
        InputError: `secret_malformed`.
    """
    found: list[ApiKey] = []
    rows = parse_secret_object(secret).get("keys")
    for row in rows if isinstance(rows, list) else []:
        roles = row.get("roles") if isinstance(row, dict) else None
        text = row.get("key") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text or not isinstance(roles, list) or not set(roles) <= {"infer", "admin"}:
            found = []
            break
        found.append(ApiKey(text.encode(), frozenset(roles)))
    if not found:
        raise InputError(
            "secret_malformed",
            f'{secret.name} must be {{"keys":[{{"key":"...","roles":["infer"]}}]}} with roles infer or admin',
            do="See docs/guides/serve.md.",
        )
    return tuple(found)


def is_loopback_host(host_header: str) -> bool:
    """Say whether a Host header names this machine itself."""
    host = host_header.rsplit(":", 1)[0] if not host_header.endswith("]") else host_header
    host = host.strip("[]").lower()
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Guard:
    """Judges requests of one deployment."""

    keys: tuple[ApiKey, ...] = ()

    def check(self, headers: Mapping[str, str], method: str, role: Role) -> None:
        """Let a request pass or say why not.

        Raises:
            ServiceError: `unauthorized`, `forbidden`, or `invalid_field` for a keyless POST that is not JSON.
        """
        if not self.keys:
            self._check_keyless(headers, method)
            return
        roles = self._roles_of(headers.get("authorization", ""))
        if roles is None:
            raise ServiceError(
                "unauthorized",
                "the API key is missing or not known",
                do='Send the header "Authorization: Bearer <key>".',
            )
        if role not in roles and "admin" not in roles:
            raise ServiceError("forbidden", f"this key has no role {role}", do=f"Use a key with the role {role}.")

    def _roles_of(self, authorization: str) -> frozenset[str] | None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() not in {"bearer", "api-key"}:
            return None
        found = None
        for candidate in self.keys:  # every key is compared, so that time does not tell which one came close
            if hmac.compare_digest(candidate.key, given.strip().encode()):
                found = candidate.roles
        return found

    def _check_keyless(self, headers: Mapping[str, str], method: str) -> None:
        if not is_loopback_host(headers.get("host", "")):
            raise ServiceError(
                "forbidden",
                "a service without API keys answers only to loopback names",
                where=f"Host {headers.get('host', '')!r}",
                do="Call it as 127.0.0.1 or localhost, or configure keys.",
            )
        origin = headers.get("origin", "")
        if origin and not is_loopback_host(origin.split("://", 1)[-1]):
            raise ServiceError(
                "forbidden", "a page of another site may not call this service", where=f"Origin {origin!r}"
            )
        content_type = headers.get("content-type", "").split(";")[0].strip().lower()
        if method == "POST" and content_type != "application/json":
            raise ServiceError(
                "invalid_field",
                f"a POST to a service without API keys must be application/json, not {content_type or 'nothing'}",
                do='Send the header "Content-Type: application/json".',
                details={"param": "content-type"},
            )


def check_bind(host: str, keys: tuple[ApiKey, ...]) -> None:
    """Refuse to listen beyond loopback without keys.

    Raises:
        InputError: `bind_without_keys`.
    """
    if not keys and not is_loopback_host(host if ":" not in host else f"[{host}]"):
        raise InputError(
            "bind_without_keys",
            f"host {host} is reachable from outside and no API keys are configured",
            where="host",
            do="Configure keys, or bind to 127.0.0.1.",
        )


def check_replica_token(headers: Mapping[str, str], token: str) -> None:
    """A replica answers its gateway and nobody else.

    Raises:
        ServiceError: `unauthorized`.
    """
    if not hmac.compare_digest(headers.get("x-hotloop-replica-token", "").encode(), token.encode()):
        raise ServiceError("unauthorized", "only the gateway may call a replica", do="Call the deployment's address.")
