"""`hotloop hot-load`: exit code 2 for what was asked wrongly, 3 for a deployment that is not there or not able."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from hotloop.cli.hot_load import command
from hotloop.errors import HotloopError


def call(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(command, list(arguments), env={"HOTLOOP_URL": ""})
    if isinstance(outcome.exception, HotloopError):
        return outcome.exception.exit_code, str(outcome.exception)
    return outcome.exit_code, outcome.output


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status and code that its path's first segment names."""

    def do_GET(self) -> None:
        _, status, code, _ = self.path.split("/", 3)
        data = json.dumps(
            {"error": {"code": code, "message": f"said so [{code}]. Do it.", "retryable": False}}
        ).encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "url",
    ["foo", "localhost:8800", "ftp://h", "http://", "http://k@h", "http://h:99999", "http://h:x", "http://h/?a=1"],
)
def test_an_address_that_is_none_is_bad_input(url: str) -> None:
    code, message = call("status", "--url", url)
    assert code == 2
    assert "[invalid_url]" in message


def test_no_address_is_bad_input() -> None:
    code, message = call("status")
    assert (code, "[no_address]" in message) == (2, True)


def test_a_bad_identity_is_bad_input_and_is_not_sent(closed_port: str) -> None:
    code, message = call("load", "../x", "--url", closed_port)
    assert (code, "[invalid_identity]" in message) == (2, True)


@pytest.mark.parametrize("arguments", [["status"], ["load", "a"], ["load", "a", "--wait"], ["ledger"], ["cancel"]])
def test_a_deployment_that_is_not_there_is_the_environment(arguments: list[str], closed_port: str) -> None:
    code, message = call(*arguments, "--url", closed_port)
    assert (code, "[unreachable]" in message) == (3, True)


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [(400, "invalid_identity", 2), (401, "unauthorized", 2), (409, "load_refused", 2), (500, "engine_error", 3)],
)
def test_a_refusal_says_whose_fault_it_is(refusing: str, status: int, reason: str, expected: int) -> None:
    code, message = call("load", "a", "--url", f"{refusing}/{status}/{reason}")
    assert (code, message) == (expected, f"said so [{reason}]. Do it.")


@pytest.mark.parametrize("seconds", ["-5", "nan", "inf", "1e300"])
def test_a_wait_without_a_sensible_end_is_refused(seconds: str) -> None:
    code, output = call("load", "a", "--wait", "--timeout", seconds)
    assert code == 2
    assert "--timeout" in output
