"""Names in a bucket: identities, file names, addresses and STARTUP_SNAPSHOT."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.layout import (
    check_identity,
    file_role,
    is_file_name,
    is_identity,
    parse_bucket_url,
    parse_startup,
    parse_trailing_version,
    snapshot_key,
)


@pytest.mark.parametrize("text", ["a", "step000042", "weight_v000001", "A.b-c_d", "9", "x" * 128])
def test_an_identity_is_one_plain_segment(text: str) -> None:
    assert check_identity(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "_hidden",
        "-x",
        ".x",
        "a/b",
        "a\\b",
        "a b",
        "a\0",
        "a..b",
        "step\n",
        "ä",
        "x" * 129,
        "STARTUP_SNAPSHOT",
        "startup_snapshot",
        "Latest",
        "CURRENT",
        "initial",
    ],
)
def test_anything_else_is_refused_with_exit_code_2(text: str) -> None:
    assert not is_identity(text)
    with pytest.raises(SnapshotError) as caught:
        check_identity(text)
    assert (caught.value.code, caught.value.exit_code) == ("invalid_identity", 2)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0b", "a\nb", "x" * 256])
def test_a_file_name_cannot_leave_its_directory(name: str) -> None:
    assert not is_file_name(name)
    with pytest.raises(SnapshotError) as caught:
        snapshot_key("step1", name)
    assert caught.value.code == "invalid_index"


def test_a_key_is_identity_and_name() -> None:
    assert snapshot_key("step1", "model-00001-of-00002.safetensors") == "step1/model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/a/b", "gs://bucket/a/b"),
        ("memory://x/run", "memory://x/run"),
        ("file:///data/run/", "file:///data/run"),
        ("/data/run", "file:///data/run"),
        ("file:///data/with%20space", "file:///data/with space"),
    ],
)
def test_an_address_is_parsed_and_loses_its_trailing_slash(text: str, shown: str) -> None:
    assert str(parse_bucket_url(text)) == shown


def test_a_path_that_starts_with_a_dot_is_a_directory_here() -> None:
    assert parse_bucket_url("./run").prefix == str(Path("run").resolve())


@pytest.mark.parametrize(
    "text",
    [
        "bucket/run",
        "http://bucket/run",
        "s3://",
        "s3://key:secret@bucket/run",
        "s3://bucket/run?versionId=1",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "file://host/dir",
        "file:relative",
    ],
)
def test_a_wrong_address_is_refused_without_repeating_credentials(text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_bucket_url(text)
    assert (caught.value.code, caught.value.exit_code) == ("invalid_bucket_url", 2)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("data", [b"step000001", b"  step000001\n", b"\tstep000001\r\n\n"])
def test_white_space_around_the_startup_identity_is_trimmed(data: bytes) -> None:
    assert parse_startup(data) == "step000001"


@pytest.mark.parametrize("data", [b"", b" \n", b"a b", b"step1\nstep2", b"../x", b"latest", b"\xff\xfe", b"x" * 2000])
def test_anything_but_one_identity_is_startup_missing(data: bytes) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_startup(data)
    assert (caught.value.code, caught.value.retryable) == ("startup_missing", True)


@pytest.mark.parametrize(
    ("identity", "version"),
    [
        ("step000042", 42),
        ("weight_v000007", 7),
        ("run3-step12-final", 12),
        ("final", None),
        ("9" * 30, None),
    ],
)
def test_the_last_digits_of_an_identity_are_its_version(identity: str, version: int | None) -> None:
    assert parse_trailing_version(identity) == version


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.safetensors.index.json", "index"),
        ("config.json", "config"),
        ("model-00001-of-00001.safetensors", "weights"),
        ("tokenizer.json", "other"),
    ],
)
def test_a_file_has_a_role(name: str, role: str) -> None:
    assert file_role(name) == role
