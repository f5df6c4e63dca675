"""Who may talk to the lab, and what every answer says about content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hotloop.experiment.provenance import BuildInfo
from hotloop.lab.guard import is_local_host, is_local_origin
from hotloop.lab.runs import RunShelf
from hotloop.lab.server import create_app

TOKEN = "a-token-of-this-start"
PORT = 8421
HERE = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html><title>page</title>")
    (static / "assets" / "index-abc.js").write_text("export {};")
    (tmp_path / "secret.txt").write_text("secret")
    app = create_app(
        token=TOKEN, port=PORT, shelf=RunShelf(tmp_path / "runs"), build=BuildInfo("c" * 40, False), static=static
    )
    with TestClient(app, base_url=HERE, follow_redirects=False) as made:
        yield made


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8421", True),
        ("localhost:8421", True),
        ("127.0.0.1:80", False),
        ("127.0.0.1", False),
        ("evil.example:8421", False),
        ("127.0.0.1.evil.example:8421", False),
        ("", False),
    ],
)
def test_only_a_loopback_host_with_our_port_is_ours(host: str, is_ours: bool) -> None:
    assert is_local_host(host, PORT) is is_ours


@pytest.mark.parametrize(
    ("origin", "is_ours"),
    [(HERE, True), ("http://localhost:8421", True), ("https://127.0.0.1:8421", False), ("null", False)],
)
def test_only_this_page_is_an_origin_of_ours(origin: str, is_ours: bool) -> None:
    assert is_local_origin(origin, PORT) is is_ours


def test_the_opened_address_moves_its_token_into_a_cookie_that_scripts_cannot_read(client: TestClient) -> None:
    answer = client.get(f"/?token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/understand").status_code == 200


def test_a_wrong_token_opens_nothing(client: TestClient) -> None:
    assert "set-cookie" not in client.get("/?token=guess").headers
    assert client.get("/api/understand").status_code == 401
    refused = client.get("/api/understand", headers=bearer("guess"))
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "token_refused"


def test_another_host_name_is_refused_even_with_the_token(client: TestClient) -> None:
    answer = client.get("/api/understand", headers={**bearer(), "host": f"rebound.example:{PORT}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_refused")


def test_a_request_from_another_page_is_refused_even_with_the_token(client: TestClient) -> None:
    answer = client.post("/api/runs", headers={**bearer(), "origin": "http://evil.example"}, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")


@pytest.mark.parametrize("path", ["/", "/api/understand", "/nothing", "/api/nothing"])
def test_every_answer_forbids_inline_script_and_other_hosts(client: TestClient, path: str) -> None:
    policy = client.get(path, headers=bearer()).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe-inline" not in policy


@pytest.mark.parametrize("path", ["/../secret.txt", "/%2e%2e/secret.txt", "/assets/../../secret.txt"])
def test_nothing_outside_the_static_folder_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_hashed_files_are_kept_for_long_and_the_page_is_asked_for_again(client: TestClient) -> None:
    assert "immutable" in client.get("/assets/index-abc.js").headers["cache-control"]
    assert client.get("/").headers["cache-control"] == "no-cache"


def test_without_built_files_the_page_names_the_commands_that_build_it(tmp_path: Path) -> None:
    app = create_app(
        token=TOKEN,
        port=PORT,
        shelf=RunShelf(tmp_path / "runs"),
        build=BuildInfo("", True),
        static=tmp_path / "absent",
    )
    with TestClient(app, base_url=HERE) as client:
        answer = client.get("/")
    assert answer.status_code == 503
    assert "npm ci" in answer.text
    assert "npm run build" in answer.text


def test_a_body_that_is_too_large_or_no_object_is_an_error_with_a_code(client: TestClient) -> None:
    assert client.post("/api/plan", headers=bearer(), content=b"[1]").json()["error"]["code"] == "body_not_json"
    assert client.post("/api/plan", headers=bearer(), content=b"{").json()["error"]["code"] == "body_not_json"
    large = client.post("/api/plan", headers=bearer(), content=b" " * (3 << 20))
    assert large.json()["error"]["code"] == "body_too_large"
