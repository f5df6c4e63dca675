"""`hotloop publish`: what it prints and how it exits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from snapshot_cases import DATA

from hotloop.cli.publish import command
from hotloop.errors import HotloopError

OLD, NEW = str(DATA / "step000001"), str(DATA / "step000002_full")


class Shell:
    """Runs `hotloop publish` on a folder bucket; an error gives the exit code that the program would end with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str) -> tuple[int, str]:
        runner = CliRunner()
        result: Result = runner.invoke(command, list(arguments), env={"ROLLOUT_BUCKET": f"file://{self.folder}"})
        if isinstance(result.exception, HotloopError):
            return result.exception.exit_code, str(result.exception)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output


@pytest.fixture
def publish(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "bucket")


def test_a_story_of_anchor_delta_startup_list_and_verify(publish: Shell) -> None:
    publish.folder.mkdir()
    assert publish("list") == (0, "no snapshots\n")
    code, output = publish("full", "--dir", OLD, "--identity", "step000001", "--policy-version", "1", "--startup")
    assert code == 0
    assert output.splitlines()[0] == "published anchor step000001 policy_version=1"
    assert output.splitlines()[-1] == "STARTUP_SNAPSHOT names step000001"
    code, output = publish("delta", "--dir", NEW, "--identity", "step000002", "--policy-version", "2")
    assert code == 0
    assert output.splitlines()[0] == "published delta step000002 policy_version=2"
    assert "parent step000001, 13 of 15 tensors changed" in output
    assert publish("startup", "--identity", "step000002") == (0, "STARTUP_SNAPSHOT names step000002\n")

    code, output = publish("list", "--json")
    document = json.loads(output)
    assert document["startup"] == "step000002"
    rows = [(row["identity"], row["kind"], row["chain_length"], row["complete"]) for row in document["snapshots"]]
    assert rows == [("step000001", "anchor", 0, True), ("step000002", "delta", 1, True)]
    assert "step000002 *" in publish("list")[1]
    for arguments in (["verify"], ["verify", "--deep"], ["verify", "--deep", "--identity", "step000002"]):
        code, output = publish(*arguments)
        assert code == 0
        assert "ok   step000002  delta of step000001" in output


def test_publishing_again_says_found(publish: Shell) -> None:
    arguments = ("full", "--dir", OLD, "--identity", "step000001", "--policy-version", "1")
    publish(*arguments)
    code, output = publish(*arguments)
    assert (code, output.splitlines()[0]) == (0, "found anchor step000001 policy_version=1")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_dry_run_leaves_the_bucket_empty_and_makes_none(publish: Shell, is_there: bool) -> None:
    if is_there:
        publish.folder.mkdir()
    code, output = publish("full", "--dir", OLD, "--identity", "a", "--policy-version", "1", "--startup", "--dry-run")
    assert code == 0
    assert output.splitlines()[0] == "would publish anchor a policy_version=1"
    assert output.splitlines()[-1] == "would let STARTUP_SNAPSHOT name a"
    assert publish.folder.exists() == is_there
    assert not is_there or list(publish.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["full", "--dir", NEW, "--identity", "step000001", "--policy-version", "1"], "identity_conflict"),
        (["full", "--dir", NEW, "--identity", "step000002", "--policy-version", "1"], "policy_version_taken"),
        (["full", "--dir", NEW, "--identity", "latest", "--policy-version", "2"], "invalid_identity"),
        (["full", "--dir", "nowhere", "--identity", "step000002", "--policy-version", "2"], "checkpoint_unreadable"),
        (["delta", "--dir", NEW, "--identity", "step000000", "--policy-version", "0"], "metadata_conflict"),
        (["delta", "--dir", NEW, "--identity", "x", "--policy-version", "2", "--parent", "no"], "parent_unknown"),
        (["delta", "--dir", NEW, "--identity", "x", "--policy-version", "2", "--base-dir", OLD], "parent_required"),
        (
            [
                "delta",
                "--dir",
                NEW,
                "--identity",
                "x",
                "--policy-version",
                "2",
                "--parent",
                "step000001",
                "--base-dir",
                NEW,
            ],
            "parent_mismatch",
        ),
        (["startup", "--identity", "step000009"], "snapshot_incomplete"),
        (["prune", "--keep-anchors", "0"], "prune_refused"),
        (["list", "--bucket", "s3://key:secret@bucket/run"], "invalid_bucket_url"),
        (["rollback", "--url", "ftp://x", "--identity", "step000001"], "invalid_url"),
    ],
)
def test_a_refusal_exits_with_2_and_names_its_code(publish: Shell, arguments: list[str], code: str) -> None:
    publish("full", "--dir", OLD, "--identity", "step000001", "--policy-version", "1")
    exit_code, message = publish(*arguments)
    assert exit_code == 2
    assert f"[{code}]" in message
    assert "secret" not in message


def test_storage_that_cannot_be_reached_exits_with_3(publish: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "SOMEKEYID"),
        ("AWS_SECRET_ACCESS_KEY", "some-secret"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hotloop.cli.publish.STORAGE_BUDGET_S", 0.0)
    exit_code, message = publish("list", "--bucket", "s3://bucket/run")
    assert exit_code == 3
    assert "[storage_unavailable]" in message
    assert "some-secret" not in message
    assert "SOMEKEYID" not in message


def test_a_damaged_snapshot_makes_verify_exit_with_4(publish: Shell) -> None:
    publish("full", "--dir", OLD, "--identity", "step000001", "--policy-version", "1")
    shard = publish.folder / "step000001" / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert publish("verify")[0] == 0, "a plain check compares sizes only where the store keeps no digest"
    code, output = publish("verify", "--deep")
    assert code == 4
    assert output.startswith("BAD  step000001")
    assert "[object_corrupt]" in output
    os.truncate(shard, 10)
    assert publish("verify")[0] == 4


def test_prune_shows_a_plan_and_deletes_only_with_yes(publish: Shell) -> None:
    for version, folder in enumerate((OLD, NEW, OLD), start=1):
        publish("full", "--dir", folder, "--identity", f"step{version:06d}", "--policy-version", str(version))
    code, output = publish("prune", "--keep-anchors", "1", "--protect", "step000001")
    assert code == 0
    assert "delete  step000002" in output
    assert "nothing was deleted" in output
    assert (publish.folder / "step000002" / "snapshot.json").exists()
    code, output = publish("prune", "--keep-anchors", "1", "--protect", "step000001", "--yes")
    assert "deleted 1 snapshots, 5 objects" in output
    rows = json.loads(publish("list", "--json")[1])["snapshots"]
    assert [row["identity"] for row in rows] == ["step000001", "step000003"]


class Deployment(BaseHTTPRequestHandler):
    """Answers one rollback, or refuses it."""

    seen: list[tuple[str, str, dict[str, object]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, self.headers.get("Authorization", ""), body))
        refused = body["identity"] == "step000009"
        answer: dict[str, object] = {"accepted": True, "identity": body["identity"], "policy_version": 1}
        if refused:
            message = "step000009: not there [snapshot_incomplete]."
            answer = {"error": {"code": "snapshot_incomplete", "message": message}}
        data = json.dumps(answer).encode()
        self.send_response(409 if refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def deployment() -> Iterator[str]:
    Deployment.seen = []
    server = HTTPServer(("127.0.0.1", 0), Deployment)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_rollback_asks_for_a_rewind_with_the_key(
    publish: Shell, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_API_KEY", "the-key")
    code, output = publish("rollback", "--url", f"{deployment}/sync/", "--identity", "step000001")
    assert (code, output) == (0, "accepted step000001 policy_version=1\n")
    assert Deployment.seen == [
        (
            "/sync/hot_load/v1/models/hot_load",
            "Bearer the-key",
            {"identity": "step000001", "allow_rewind": True},
        )
    ]


def test_a_refused_rollback_has_the_deployments_own_code(publish: Shell, deployment: str) -> None:
    code, message = publish("rollback", "--url", deployment, "--identity", "step000009")
    assert (code, message) == (2, "rollback to step000009: step000009: not there [snapshot_incomplete].")


@pytest.mark.parametrize("url", ["foo", "http://", "http://h:99999", "http://key@h", "http://h/#x"])
def test_a_rollback_needs_an_address(publish: Shell, url: str) -> None:
    code, message = publish("rollback", "--url", url, "--identity", "step000009")
    assert code == 2
    assert "[invalid_url]" in message and "key" not in message


def test_publishing_needs_no_torch(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from hotloop.cli.main import main\n"
        f"main(['publish', 'full', '--dir', {str(tmp_path / 'old')!r}, '--bucket', 'file://{tmp_path}/bucket',"
        " '--identity', 'a', '--policy-version', '1'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("published anchor a policy_version=1")


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("model-00002-of-00002.safetensors", b"\xff" * 64, "malformed_shard"),
        ("model.safetensors.index.json", b"{", "invalid_index"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "checkpoint_unreadable"),
    ],
)
def test_a_damaged_checkpoint_folder_is_bad_input(
    publish: Shell, tmp_path: Path, name: str, content: bytes, code: str
) -> None:
    shutil.copytree(OLD, tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes(content)
    exit_code, message = publish(
        "full", "--dir", str(tmp_path / "damaged"), "--identity", "step000001", "--policy-version", "1"
    )
    assert exit_code == 2
    assert f"[{code}]" in message


def test_a_checkpoint_without_tensors_is_not_published(publish: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    exit_code, message = publish("full", "--dir", str(folder), "--identity", "step000001", "--policy-version", "1")
    assert exit_code == 2
    assert f"{folder}: holds no tensor [checkpoint_unreadable]" in message


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "--json"], ["verify"], ["prune", "--keep-anchors", "1"], ["startup", "--identity", "a"]],
)
def test_a_command_that_reads_does_not_make_the_bucket(publish: Shell, arguments: list[str]) -> None:
    exit_code, message = publish(*arguments)
    assert exit_code == 3
    assert f"{publish.folder}" in message
    assert "there is no such directory [storage_access]" in message
    assert not publish.folder.exists()
