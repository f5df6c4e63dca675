"""Keys, roles, and the rules of a service without keys."""

from __future__ import annotations

import pytest

from hotloop.errors import InputError, ServiceError
from hotloop.service.auth import Guard, check_bind, is_loopback_host, parse_keys
from hotloop.service.secrets import Secret

TEXT = '{"keys":[{"key":"reader-key","roles":["infer"]},{"key":"owner-key","roles":["admin"]}]}'
KEYED = Guard(parse_keys(Secret("hotloop_api_keys", TEXT)))


def code_of(guard: Guard, headers: dict[str, str], method: str, role: str) -> str:
    try:
        guard.check(headers, method, role)  # type: ignore[arg-type]  # roles come from the table
    except ServiceError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("authorization", "role", "code"),
    [
        ("", "infer", "unauthorized"),
        ("Bearer wrong", "infer", "unauthorized"),
        ("Basic reader-key", "infer", "unauthorized"),
        ("Bearer reader-key", "infer", ""),
        ("Api-Key reader-key", "infer", ""),
        ("bearer reader-key", "infer", ""),
        ("Bearer reader-key", "admin", "forbidden"),
        ("Bearer owner-key", "admin", ""),
        ("Bearer owner-key", "infer", ""),
        ("Bearer reader-key extra", "infer", "unauthorized"),
    ],
)
def test_keys_and_roles(authorization: str, role: str, code: str) -> None:
    assert code_of(KEYED, {"authorization": authorization}, "GET", role) == code


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "method", "code"),
    [
        ({"host": "127.0.0.1:8800"}, "GET", ""),
        ({"host": "localhost:8800"}, "GET", ""),
        ({"host": "[::1]:8800"}, "GET", ""),
        ({"host": "evil.example"}, "GET", "forbidden"),
        ({"host": "127.0.0.1.evil.example"}, "GET", "forbidden"),
        ({}, "GET", "forbidden"),
        ({"host": "localhost", **JSON}, "POST", ""),
        ({"host": "localhost", "content-type": "application/json; charset=utf-8"}, "POST", ""),
        ({"host": "localhost", "content-type": "text/plain"}, "POST", "invalid_field"),
        ({"host": "localhost"}, "POST", "invalid_field"),
        ({"host": "localhost", "origin": "https://evil.example", **JSON}, "POST", "forbidden"),
        ({"host": "localhost", "origin": "http://localhost:3000", **JSON}, "POST", ""),
    ],
)
def test_without_keys_only_this_machine_is_answered(headers: dict[str, str], method: str, code: str) -> None:
    assert code_of(Guard(), headers, method, "admin") == code


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_bind(host, ())


def test_binding_outward_needs_keys() -> None:
    with pytest.raises(InputError, match="bind_without_keys"):
        check_bind("0.0.0.0", ())
    check_bind("0.0.0.0", KEYED.keys)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys":[]}', '{"keys":[{"key":"","roles":["infer"]}]}', '{"keys":[{"key":"k","roles":["x"]}]}'],
)
def test_a_malformed_secret_is_refused_without_its_text(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_keys(Secret("hotloop_api_keys", text))
    assert error.value.code == "secret_malformed"


def test_a_secret_does_not_print_itself() -> None:
    assert "owner-key" not in repr(Secret("name", "owner-key")) and "owner-key" not in repr(KEYED)


@pytest.mark.parametrize(("host", "expected"), [("localhost", True), ("[::1]", True), ("10.0.0.1", False), ("", False)])
def test_loopback_names(host: str, expected: bool) -> None:
    assert is_loopback_host(host) is expected
