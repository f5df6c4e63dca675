"""What strangers may do to a deployment: nothing. Keys, roles, hostile bodies, slow clients, web pages, leaks."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from deployment_harness import HOT_LOAD, Answer, Deployment, Trainer, make_tensors, served_version, write_checkpoint
from test_f15_f28_requests import publish_s3, replica_pids

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
from bucket_servers import BUCKET, Fault, run_fault_proxy, run_localbucket

Deploy = Callable[..., Deployment]
KEYS = {"infer": "infer-key-5b1c", "admin": "admin-key-9e44"}
KEYS_SECRET = json.dumps({"keys": [{"key": key, "roles": [role]} for role, key in KEYS.items()]})
MAX_BODY = 8192
RECEIVE_TIMEOUT_S = 1.0
LIMITS = {"max_body_bytes": MAX_BODY, "receive_timeout_s": RECEIVE_TIMEOUT_S}

ROLES = {
    ("GET", HOT_LOAD): "infer",
    ("POST", HOT_LOAD): "admin",
    ("DELETE", HOT_LOAD): "admin",
    ("POST", HOT_LOAD + "/hint"): "admin",
    ("GET", HOT_LOAD + "/ledger"): "infer",
    ("DELETE", HOT_LOAD + "/ledger"): "admin",
    ("POST", "/v1/chat/completions"): "infer",
    ("POST", "/v1/completions"): "infer",
    ("GET", "/v1/models"): "infer",
    ("GET", "/metrics"): "infer",
    ("GET", "/health"): "none",
    ("GET", "/ready"): "none",
    ("GET", "/openapi.json"): "infer",
}
PATHS = sorted({path for _, path in ROLES})
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
BODIES = {
    HOT_LOAD: {"identity": "step000001"},
    HOT_LOAD + "/hint": {"identity": "step000001"},
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [], "nvext": {"token_data": [1]}, "max_tokens": 1},
}


def start(root: Path, **options: Any) -> Deployment:
    trainer = Trainer(root, root / "bucket")
    identity = trainer.anchor()
    deployment = Deployment(root / "deployment", trainer.url, **options).start()
    deployment.wait_ready(identity)
    return deployment


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment with one key of each role; its own calls use the admin key."""
    deployment = start(
        tmp_path_factory.mktemp("keyed"),
        config={"keys": "hotloop_api_keys", "limits": LIMITS},
        environ={"HOTLOOP_API_KEYS": KEYS_SECRET},
        token=KEYS["admin"],
    )
    yield deployment
    deployment.stop()


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment without keys, as on a laptop."""
    deployment = start(tmp_path_factory.mktemp("keyless"), config={"limits": LIMITS})
    yield deployment
    deployment.stop()


def ask(
    deployment: Deployment, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request with exactly these headers, redirects not followed."""
    place = urlsplit(deployment.url)
    with closing(http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)) as connection:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        raw = answer.read()
    try:
        parsed: Any = json.loads(raw)
    except ValueError:
        parsed = raw.decode("utf-8", "replace")
    return Answer(answer.status, parsed, {name.lower(): value for name, value in answer.getheaders()})


def connect(deployment: Deployment) -> socket.socket:
    place = urlsplit(deployment.url)
    return socket.create_connection((place.hostname, place.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def exchange(deployment: Deployment, data: bytes) -> bytes:
    """Send raw bytes and read until the deployment closes the connection."""
    with connect(deployment) as connection:
        connection.sendall(data)
        return read_all(connection)


def assert_serves(deployment: Deployment) -> None:
    answer = deployment.complete()
    assert answer.status == 200, answer.body
    assert served_version(answer) == 1


# ---- keys and roles -------------------------------------------------------------------------------------------------

CALLERS = {
    "nobody": {},
    "wrong key": {"authorization": "Bearer nonsense"},
    "empty key": {"authorization": "Bearer "},
    "prefix of a key": {"authorization": f"Bearer {KEYS['admin'][:-1]}"},
    "other scheme": {"authorization": f"Basic {KEYS['admin']}"},
    "key as cookie": {"cookie": f"authorization=Bearer {KEYS['admin']}"},
    "infer": {"authorization": f"Bearer {KEYS['infer']}"},
    "admin": {"authorization": f"Api-Key {KEYS['admin']}"},
}


def expected_refusal(role: str, caller: str) -> int | None:
    """401 or 403 by the table of the contract; None where the request passes."""
    if role == "none":
        return None
    if caller not in KEYS:
        return 401
    return 403 if role == "admin" and caller == "infer" else None


@pytest.mark.parametrize("prefix", ["", "/sync", "/deployment/any-1/sync"])
@pytest.mark.parametrize("caller", CALLERS)
def test_every_address_lets_in_whom_its_role_allows_and_nobody_else(
    keyed: Deployment, caller: str, prefix: str
) -> None:
    headers = {"content-type": "application/json", **CALLERS[caller]}
    found, expected = {}, {}
    for (method, path), role in ROLES.items():
        if caller == "admin" and method == "DELETE":
            continue  # it would pass; what it does is tested elsewhere
        answer = ask(keyed, method, prefix + path, BODIES.get(path) if method == "POST" else None, headers)
        found[method, path] = answer.status if answer.status in (401, 403) else None
        expected[method, path] = expected_refusal(role, caller)
        assert answer.status < 500, (method, path, answer.body)
        if answer.status in (401, 403):
            code = "unauthorized" if answer.status == 401 else "forbidden"
            assert answer.body["error"]["code"] == code
    assert found == expected


def test_methods_that_an_address_does_not_know_are_refused_with_those_that_it_does(keyed: Deployment) -> None:
    headers = {"authorization": f"Bearer {KEYS['admin']}"}
    for path in PATHS:
        known = {method for method, place in ROLES if place == path}
        for method in METHODS:
            if method in known or (method == "HEAD" and "GET" in known):
                continue
            answer = ask(keyed, method, path, headers=headers)
            assert answer.status == 405, (method, path, answer.status)
            assert known <= {name.strip() for name in answer.headers["allow"].split(",")}


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/models/", "/hot_load", HOT_LOAD + "/", "/internal/target", "/v1/../metrics", "//metrics"]
)
def test_other_paths_are_not_found_and_never_redirected(keyed: Deployment, path: str) -> None:
    answer = ask(keyed, "GET", path, headers={"authorization": f"Bearer {KEYS['admin']}"})
    assert (answer.status, answer.body["error"]["code"]) == (404, "not_found")
    assert "location" not in answer.headers


# ---- paths, bodies, numbers -----------------------------------------------------------------------------------------

TRAVERSALS = [
    "../x",
    "..",
    ".",
    "/etc/passwd",
    "a/../../b",
    "a\\b",
    "%2e%2e%2f",
    "a\u0000b",
    "~root",
    "a\r\nb",
    "\uff41",
]


@pytest.mark.parametrize("identity", TRAVERSALS)
def test_an_identity_that_is_a_path_is_refused_everywhere(keyed: Deployment, identity: str) -> None:
    for path in (HOT_LOAD, HOT_LOAD + "/hint"):
        answer = keyed.call("POST", path, {"identity": identity})
        assert (answer.status, answer.code) == (400, "invalid_identity")
    parent = {"previous_snapshot_identity": identity}
    answer = keyed.call("POST", HOT_LOAD, {"identity": "step9", "incremental_snapshot_metadata": parent})
    assert (answer.status, answer.code) == (400, "invalid_identity")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/b.safetensors", "..", "a\\b", "a\u0000", 7, None])
def test_a_file_that_is_a_path_is_refused_by_a_hint(keyed: Deployment, name: object) -> None:
    answer = keyed.call("POST", HOT_LOAD + "/hint", {"identity": "step000001", "files": [name]})
    assert (answer.status, answer.code) == (400, "invalid_index")


HOSTILE_BODIES = {
    "nothing": b"",
    "not JSON": b"{",
    "not an object": b"[1]",
    "a bare null": b"null",
    "not UTF-8": b'{"identity": "\xff\xfe"}',
    "a lone surrogate": b'{"identity": "\\ud800"}',
    "NaN": b'{"policy_version": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "nested a thousand times": b'{"a": ' * 1100 + b"1" + b"}" * 1100,
    "NUL bytes": b"\0" * 64,
    "two objects": b'{"identity": "a"}{"identity": "b"}',
}


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_a_body_that_is_not_a_json_object_is_refused(keyed: Deployment, path: str, name: str) -> None:
    answer = keyed.call("POST", path, raw=HOSTILE_BODIES[name])
    assert (answer.status, answer.code) == (400, "invalid_json")


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_body_above_the_limit_is_refused_before_it_has_come(keyed: Deployment, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['admin']}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n"
    declared = exchange(keyed, (head + f"content-length: {10**12}\r\n\r\n{{").encode())
    assert declared.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in declared
    piece = f"{MAX_BODY:x}\r\n".encode() + b" " * MAX_BODY + b"\r\n"
    chunked = exchange(keyed, (head + "transfer-encoding: chunked\r\n\r\n").encode() + piece * 2)
    assert chunked.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in chunked
    assert_serves(keyed)


def test_a_body_that_is_cut_short_harms_nobody(keyed: Deployment) -> None:
    for path in sorted(BODIES):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['admin']}\r\n"
        with connect(keyed) as connection:
            connection.sendall((head + 'content-length: 100\r\n\r\n{"identity').encode())
    assert_serves(keyed)
    assert "Traceback" not in keyed.log_text()


WEIRD = [1e300, -1e300, 1e-320, -1, 2**31, 2**63, 2**64, 10**30, 1.5, "7", True, [], {}, -0.0]
NUMERIC_FIELDS = [
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "logprobs",
    "top_logprobs",
    "echo_last",
    "stop_token_ids",
    "logit_bias",
    "weight_version",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "best_of",
]


@pytest.mark.parametrize("field", NUMERIC_FIELDS)
def test_no_number_breaks_the_service(keyed: Deployment, field: str) -> None:
    bodies: list[dict[str, Any]] = [{field: value} for value in WEIRD]
    if field == "weight_version":
        bodies += [{field: {"min_version": value}} for value in WEIRD]
    if field == "logit_bias":
        bodies += [{field: {key: 1}} for key in ("-1", "²", "9" * 5000, "32", "99999999999", "1e3", "٣", "")]
        bodies += [{field: {"1": value}} for value in WEIRD]
    if field == "stop_token_ids":
        bodies += [{field: [value]} for value in WEIRD]
    for body in bodies:
        answer = keyed.complete(**body)
        assert answer.status in (200, 400, 409), (body, answer.body)
        if answer.status == 200:
            ids = answer.body["nvext"]["engine_data"]["completion_token_ids"]
            assert ids and all(0 <= token < 32 for token in ids)
        elif answer.status == 400:
            assert answer.code in ("invalid_field", "sampling_params", "too_many_completions"), (body, answer.body)


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [32], [2**31], [2**64], [1.0], [True], "", ["a", 1], [[1]] * 1025])
def test_no_prompt_breaks_the_service(keyed: Deployment, prompt: object) -> None:
    answer = keyed.complete(prompt=prompt)
    assert answer.status == 400, answer.body
    assert_serves(keyed)


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, 2**63, 1e300, 10**30, [], {}])
def test_no_policy_version_breaks_a_load(keyed: Deployment, value: object) -> None:
    answer = keyed.call("POST", HOT_LOAD, {"identity": "step000001", "policy_version": value})
    assert (answer.status, answer.code) == (400, "invalid_field")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "", "1;2", "0x10", "9" * 400])
def test_no_waiting_limit_breaks_a_request(keyed: Deployment, text: str) -> None:
    for path in (HOT_LOAD, "/v1/completions"):
        answer = keyed.call("POST", path, BODIES[path], {"x-hot-load-drain-timeout": text})
        assert (answer.status, answer.code) == (400, "invalid_field"), answer.body


# ---- slow clients and headers ---------------------------------------------------------------------------------------


def test_slow_headers_end_the_connection_and_hold_nobody_up(keyed: Deployment) -> None:
    slow = [connect(keyed) for _ in range(20)]
    for connection in slow[::2]:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: local")
    assert_serves(keyed)
    for connection in slow:  # none sends more, so only the deployment can end them
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        connection.close()


def test_a_slow_body_ends_with_an_error_and_holds_nobody_up(keyed: Deployment) -> None:
    for path in sorted(BODIES):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['admin']}\r\n"
        with connect(keyed) as connection:
            connection.sendall((head + "content-length: 100\r\n\r\n{").encode())
            assert_serves(keyed)
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer, path


def test_a_stranger_cannot_keep_a_connection_by_sending_a_body_that_nobody_reads(keyed: Deployment) -> None:
    with connect(keyed) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{")
        assert read_all(connection).startswith(b"HTTP/1.1 401 ")


def test_headers_without_end_are_refused(keyed: Deployment) -> None:
    line = b"x-filler: " + b"a" * 1000 + b"\r\n"
    answer = exchange(keyed, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + line * 100)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer
    one = exchange(keyed, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-filler: " + b"a" * 100_000)
    assert one.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_name_cannot_write_headers_of_the_answer(keyed: Deployment, stream: bool) -> None:
    names = ["a\r\nx-injected: 1", "b\r\n\r\nHTTP/1.1 200 OK", "c,d", "é", "\u0000", "plain"]
    answer = keyed.complete(stream=stream, **dict.fromkeys(names, 1))
    assert answer.status == 200, answer.body
    assert "x-injected" not in answer.headers
    assert answer.headers["x-hotloop-ignored"] == "a??x-injected:?1,b????HTTP/1.1?200?OK,c?d,?,?,plain"
    assert_serves(keyed)


def test_a_thousand_ignored_fields_do_not_make_a_replica_look_broken(keyed: Deployment) -> None:
    for _ in range(4):  # three failures in a row would eject it
        answer = keyed.complete(**{f"unknown{i}": 1 for i in range(300)})
        assert answer.status == 200, answer.body
        ignored = answer.headers["x-hotloop-ignored"]
        assert len(ignored) <= 2010 and ignored.endswith(",...")


FOLDED = [b"a\r\n x-injected: 1", b"a\rx-injected: 1", b"a\nx-injected: 1", b"a\r\n\tb"]


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x01b", b"\xff\xfe", b"a\x7fb", "ü".encode(), b"x" * 20_000, *FOLDED])
def test_odd_header_values_that_are_passed_on_break_nothing(keyed: Deployment, value: bytes) -> None:
    body = b'{"prompt": [1], "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"authorization: Bearer {KEYS['infer']}\r\ncontent-length: {len(body)}\r\n".encode()
    for name in (b"x-multi-turn-session-id", b"x-session-affinity", b"fireworks-model"):
        answer = exchange(keyed, head + name + b": " + value + b"\r\n\r\n" + body)
        assert answer.split(b" ", 2)[1] in (b"200", b"400"), answer
        assert b"x-injected" not in answer and answer.count(b"HTTP/1.1 ") == 1
    assert_serves(keyed)


def test_two_requests_hidden_in_one_are_not_let_through(keyed: Deployment) -> None:
    smuggled = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"authorization: Bearer {KEYS['infer']}\r\n".encode()
    both = head + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
    answer = exchange(keyed, both)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"hotloop_" not in answer


# ---- web pages ------------------------------------------------------------------------------------------------------

PAGES = ["http://evil.example", "https://evil.example:443", "null", "http://127.0.0.1.evil.example", "file://"]


@pytest.mark.parametrize("origin", PAGES)
@pytest.mark.parametrize("path", [HOT_LOAD, "/v1/completions"])
def test_a_web_page_cannot_post_to_a_service_without_keys(keyless: Deployment, origin: str, path: str) -> None:
    headers = {"origin": origin, "content-type": "application/json"}
    answer = ask(keyless, "POST", path, BODIES[path], headers)
    assert (answer.status, answer.body["error"]["code"]) == (403, "forbidden")
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    answer = ask(keyless, "OPTIONS", path, headers=preflight)
    assert answer.status == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", [HOT_LOAD, HOT_LOAD + "/hint", "/v1/completions", "/v1/chat/completions"])
def test_a_form_cannot_post_to_a_service_without_keys(keyless: Deployment, kind: str, path: str) -> None:
    answer = ask(keyless, "POST", path, BODIES[path], {"content-type": kind} if kind else {})
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_field")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "localhost@evil",
    ],
)
def test_a_name_that_was_bound_to_loopback_is_not_answered_without_keys(keyless: Deployment, host: str) -> None:
    for (method, path), role in ROLES.items():
        if role != "none":
            body = BODIES.get(path) if method == "POST" else None
            answer = ask(keyless, method, path, body, {"host": host, "content-type": "application/json"})
            assert (answer.status, answer.body["error"]["code"]) == (403, "forbidden"), (method, path)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:80"])
def test_loopback_names_are_answered_without_keys(keyless: Deployment, host: str) -> None:
    answer = ask(keyless, "GET", "/v1/models", headers={"host": host})
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_without_keys_only_loopback_is_listened_on(keyless: Deployment, tmp_path: Path) -> None:
    assert keyless.process is not None
    processes = [keyless.process.pid, *replica_pids(keyless)]
    for pid in processes:
        listening = [c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"], pid
    config = tmp_path / "config.yaml"
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        config.write_text(json.dumps({"bucket": f"file://{tmp_path}", "served_model_name": "p", "host": host}))
        command = [sys.executable, "-m", "hotloop.cli.main", "serve", str(config), "--port", "0"]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert outcome.returncode == 2 and "bind_without_keys" in outcome.stderr


def test_a_stranger_on_a_replicas_port_gets_no_answer(keyed: Deployment) -> None:
    (pid,) = replica_pids(keyed)
    (port,) = [c.laddr.port for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    replica = Deployment(keyed.root, keyed.bucket, url=f"http://127.0.0.1:{port}")
    strangers: list[dict[str, str]] = [
        {},
        {"x-hotloop-replica-token": ""},
        {"x-hotloop-replica-token": "guess"},
        {"x-hotloop-replica-token": KEYS["admin"]},
        {"authorization": f"Bearer {KEYS['admin']}"},
    ]
    paths = ["/v1/completions", "/v1/chat/completions", "/internal/target", "/internal/activate", "/internal/cancel"]
    for headers in strangers:
        for method, path in [("GET", "/internal/events"), ("GET", "/nothing"), *(("POST", path) for path in paths)]:
            answer = ask(replica, method, path, {}, headers)
            assert (answer.status, answer.body["error"]["code"]) == (401, "unauthorized"), (method, path)
    assert_serves(keyed)


# ---- secrets --------------------------------------------------------------------------------------------------------


def read_command_line(pid: int) -> str:
    """The arguments of a process as any user sees them; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def read_tree(root: Path) -> str:
    """Every file below a folder that can be read, as text."""
    texts = [path.read_bytes().decode("latin-1") for path in sorted(root.rglob("*")) if path.is_file()]
    return "\n".join(texts)


def test_secrets_are_in_no_output_file_or_process_listing(deploy: Deploy, tmp_path: Path) -> None:
    secrets = {
        "storage key": "storage-secret-77aa12",
        "partition": "5e" * 31 + "c3",
        **{f"{role} key": key for role, key in KEYS.items()},
    }
    storage = {"aws_access_key_id": "READERID", "aws_secret_access_key": secrets["storage key"], "aws_region": "x"}
    with run_localbucket(tmp_path / "s3") as endpoint, run_fault_proxy(endpoint) as proxy:
        source = write_checkpoint(tmp_path / "one", make_tensors(1))
        publish_s3(proxy, source, "step000001", 1, startup=True)
        proxy.faults.append(Fault(lambda method, path: True, times=8, status=403, code="InvalidAccessKeyId"))
        deployment = deploy(
            bucket=f"s3://{BUCKET}/run",
            config={"keys": "hotloop_api_keys", "storage": "rl_checkpoint_reader", "partition": "rl_bdn_partition"},
            environ={
                "HOTLOOP_API_KEYS": KEYS_SECRET,
                "RL_CHECKPOINT_READER": json.dumps({**storage, "endpoint_url": proxy.endpoint}),
                "RL_BDN_PARTITION": secrets["partition"],
            },
            token=KEYS["admin"],
        )
        deployment.wait_ready("step000001")
        said: list[Any] = []
        for method, path in ROLES:
            if method == "GET":
                said.append(deployment.call(method, path))
        said.append(deployment.call("GET", HOT_LOAD, headers={"authorization": "Bearer nonsense"}))
        said.append(deployment.load("step000009"))
        os.kill(replica_pids(deployment)[0], signal.SIGKILL)
        deployment.wait(lambda status: not status["replicas"][0]["readiness"], "noticing the death")
        proxy.faults.append(Fault(lambda method, path: True, times=4, status=403, code="ExpiredToken"))
        said += [deployment.load("step000001"), deployment.complete(temperature="x")]
        deployment.wait_ready("step000001")
        said += [deployment.status(), deployment.call("GET", HOT_LOAD + "/ledger"), deployment.complete()]
        listing = "".join(read_command_line(pid) for pid in psutil.pids())
        replica_environ = Path(f"/proc/{replica_pids(deployment)[0]}/environ")
        assert replica_environ.stat().st_mode & 0o077 == 0
        deployment.stop()
    places = {
        "answers": repr(said),
        "logs and state": read_tree(deployment.root),
        "process listing": listing,
    }
    assert proxy.faults[0].times == 0, "the credentials were refused and named in no message"
    leaks = [(name, place) for name, text in secrets.items() for place, seen in places.items() if text in seen]
    assert not leaks


def test_state_and_cache_belong_to_their_owner_alone(keyed: Deployment) -> None:
    for folder in (keyed.root / "state", keyed.root / "cache"):
        assert folder.stat().st_mode & 0o077 == 0, folder
    assert (keyed.root / "state" / "partition").stat().st_mode & 0o077 == 0


def test_a_secret_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hotloop_api_keys").write_text(KEYS_SECRET)
    (tmp_path / "hotloop_api_keys").chmod(0o644)
    config = tmp_path / "config.yaml"
    settings = {"bucket": f"file://{tmp_path}", "served_model_name": "p", "keys": "hotloop_api_keys"}
    config.write_text(json.dumps({**settings, "secrets_dir": str(tmp_path)}))
    command = [sys.executable, "-m", "hotloop.cli.main", "serve", str(config), "--port", "0"]
    environ = {name: value for name, value in os.environ.items() if name != "HOTLOOP_API_KEYS"}
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert outcome.returncode == 2 and "secret_readable" in outcome.stderr
    assert KEYS["admin"] not in outcome.stdout + outcome.stderr


def test_after_everything_nothing_unforeseen_was_logged(keyed: Deployment) -> None:
    """Runs last: the hostile requests above left no traceback behind."""
    assert_serves(keyed)
    assert "Traceback" not in keyed.log_text()
