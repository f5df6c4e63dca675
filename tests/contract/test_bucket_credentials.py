"""Whose keys sign a request: environment, profile, reader secret, GCS; looked at on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bucket_servers
import pytest
from bucket_servers import BUCKET, FaultProxy

from hotloop.errors import InputError, SnapshotError
from hotloop.snapshots.bucket_access import StaticKeys, open_bucket, parse_reader_secret
from hotloop.snapshots.storage_errors import translate

SECRET = '{"aws_access_key_id": "READERID", "aws_secret_access_key": "reader-secret", "aws_region": "eu-west-1"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bucket_servers.run_localbucket(tmp_path_factory.mktemp("localbucket")) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    with bucket_servers.run_fault_proxy(server) as proxy:
        yield proxy


def test_a_publisher_signs_with_the_environment_and_its_session_token(proxy: FaultProxy) -> None:
    environ = {**bucket_servers.writer_environ(proxy.endpoint), "AWS_SESSION_TOKEN": "the-token"}
    open_bucket(f"s3://{BUCKET}/run", environ=environ).list_directories()
    assert proxy.signers == [(bucket_servers.WRITER[0], "the-token")]


def test_a_publisher_without_keys_signs_with_a_profile(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        "[training]\naws_access_key_id = PROFILEID\naws_secret_access_key = profile-secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "training")
    open_bucket(f"s3://{BUCKET}/run", environ={"AWS_ENDPOINT_URL": proxy.endpoint}).list_directories()
    assert proxy.signers == [("PROFILEID", "")]


def test_without_any_credentials_the_refusal_says_what_to_set(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SnapshotError) as caught:
        open_bucket(f"s3://{BUCKET}/run", environ={"AWS_ENDPOINT_URL": proxy.endpoint})
    assert (caught.value.code, caught.value.details["cause"], caught.value.exit_code) == ("storage_access", "denied", 3)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)


def test_a_reader_uses_its_secret_and_nothing_of_the_environment(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "LEFTOVER")
    keys = parse_reader_secret(SECRET)
    assert keys.region == "eu-west-1"
    reader = StaticKeys(keys.access_key_id, keys.secret_access_key, keys.region, proxy.endpoint)
    open_bucket(f"s3://{BUCKET}/run", keys=reader).list_directories()
    assert proxy.signers == [("READERID", "")]


def test_f25_gcs_is_never_sent_a_left_over_session_token(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "LEFTOVER")
    environ = {**bucket_servers.writer_environ(proxy.endpoint), "AWS_SESSION_TOKEN": "LEFTOVER"}
    with pytest.warns(UserWarning, match="AWS_SESSION_TOKEN"):
        bucket = open_bucket(f"gs://{BUCKET}/run", environ=environ)
    bucket.list_directories()
    assert proxy.signers == [(bucket_servers.WRITER[0], "")]


def test_gcs_keeps_whole_and_create_only_puts_through_its_s3_endpoint(proxy: FaultProxy) -> None:
    bucket = open_bucket(f"gs://{BUCKET}/gcs", environ=bucket_servers.writer_environ(proxy.endpoint))
    bucket.put("step1/a", b"data", create_only=True)
    assert bucket.get("step1/a", max_bytes=10) == b"data"
    bucket.delete(["step1/a"])
    assert bucket.list_objects("step1") == []


def test_a_secret_is_in_no_representation() -> None:
    keys = parse_reader_secret(SECRET)
    assert "reader-secret" not in repr(keys)
    assert "READERID" not in repr(keys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        "[]",
        "{}",
        '{"aws_access_key_id": "hunter2"}',
        '{"aws_access_key_id": "a", "aws_secret_access_key": 7}',
        '{"aws_access_key_id": "", "aws_secret_access_key": "hunter2"}',
    ],
)
def test_a_wrong_reader_secret_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_reader_secret(text)
    assert caught.value.code == "invalid_secret"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("403 Forbidden: <Error><Code>ExpiredToken</Code></Error>", "storage_access", "expired"),
        ("301: <Error><Code>PermanentRedirect</Code></Error>", "storage_access", "region"),
        ("400: <Error><Code>AuthorizationHeaderMalformed</Code></Error>", "storage_access", "region"),
        ("404: <Error><Code>NoSuchBucket</Code></Error>", "storage_access", "no_bucket"),
        ("403: <Error><Code>AccessDenied</Code></Error>", "storage_access", "denied"),
        ("403: <Error><Code>SignatureDoesNotMatch</Code></Error>", "storage_access", "denied"),
        ("503: <Error><Code>SlowDown</Code></Error>", "storage_unavailable", None),
        ("error sending request for url", "storage_unavailable", None),
        ("No space left on device (os error 28)", "no_space", None),
    ],
)
def test_f23_and_f24_a_fault_of_the_store_gets_its_cause_and_loses_its_text(
    text: str, code: str, cause: str | None
) -> None:
    leak = "<AWSAccessKeyId>LEAKEDKEYID</AWSAccessKeyId> https://x/?X-Amz-Signature=abcdef"
    error = translate(RuntimeError(text + leak), action="get", url="s3://bucket/run", key="step1/a")
    assert isinstance(error, SnapshotError)
    assert (error.code, error.details.get("cause"), error.exit_code) == (code, cause, 3)
    for secret in ("LEAKEDKEYID", "abcdef"):
        assert secret not in f"{error} {error.details}"
