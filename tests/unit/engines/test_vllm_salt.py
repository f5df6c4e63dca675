"""The salt of vLLM's prefix cache: what vLLM 0.32 accepts, and apart wherever version or namespace differ."""

from __future__ import annotations

import pytest

from hotloop.engines.vllm import make_salt


@pytest.mark.parametrize("namespace", ["", "a/b", "user@host", "x" * 500, "null\0", "back\\slash", "\u00e9"])
def test_a_real_server_accepts_the_salt_of_every_namespace(namespace: str) -> None:
    salt = make_salt(3, namespace)
    assert 0 < len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


def test_versions_and_namespaces_have_salts_of_their_own() -> None:
    salts = {make_salt(version, namespace) for version in (0, 1, 11) for namespace in ("", "1", "1/", "a")}
    assert len(salts) == 12
