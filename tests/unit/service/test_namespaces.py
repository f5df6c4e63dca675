"""Whose prefixes a request may reuse after a swap."""

from __future__ import annotations

from hotloop.service.namespaces import Namespaces


def test_all_starts_a_new_namespace_for_everyone() -> None:
    spaces = Namespaces()
    known, anonymous = spaces.namespace_of("s", ""), spaces.namespace_of("", "")
    spaces.on_swap("all", is_rewind=False)
    assert spaces.namespace_of("s", "") != known
    assert spaces.namespace_of("", "") != anonymous


def test_new_session_lets_known_sessions_keep_theirs() -> None:
    spaces = Namespaces()
    known, anonymous = spaces.namespace_of("s", ""), spaces.namespace_of("", "")
    spaces.on_swap("new_session", is_rewind=False)
    assert spaces.namespace_of("s", "") == known
    assert spaces.namespace_of("t", "") != known
    assert spaces.namespace_of("", "") != anonymous


def test_none_keeps_one_namespace() -> None:
    spaces = Namespaces()
    before = spaces.namespace_of("", "")
    spaces.on_swap("none", is_rewind=False)
    assert spaces.namespace_of("", "") == before


def test_a_rewind_always_starts_a_new_one() -> None:
    spaces = Namespaces()
    before = spaces.namespace_of("s", "")
    spaces.on_swap("none", is_rewind=True)
    assert spaces.namespace_of("s", "") != before


def test_a_salt_divides_a_namespace() -> None:
    spaces = Namespaces()
    assert spaces.namespace_of("", "a") != spaces.namespace_of("", "b")
