"""Opening a bucket: which credentials, which endpoint, and a probe that names what is missing.

    publisher   usual chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; else profiles and roles through boto3
    reader      the static keys of the secret `rl_checkpoint_reader`, and nothing from the environment
    gs://       the S3-compatible endpoint with HMAC keys; the native one with GOOGLE_APPLICATION_CREDENTIALS

Promises: no key is ever part of a message, a representation or an address; a left-over AWS_SESSION_TOKEN is never sent
with static reader keys or to GCS.

Does not do: the storage calls (bucket.py).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.store import GCSStore, MemoryStore, S3Store

from hotloop.errors import InputError, MissingExtra, SnapshotError
from hotloop.snapshots.bucket import AlreadyThere, Bucket, DirectoryToRead, ObstoreBucket, open_local_store
from hotloop.snapshots.layout import PROBE_KEY, STARTUP_NAME, BucketUrl, parse_bucket_url
from hotloop.snapshots.retry import RetryPolicy, call_with_retries

GCS_S3_ENDPOINT = "https://storage.googleapis.com"
_DEFAULT_REGION = "us-east-1"
_PROBE_TEXT = b"written by hotloop to learn what this store can do\n"
_memory_stores: dict[str, MemoryStore] = {}


@dataclass(frozen=True, slots=True)
class StaticKeys:
    """Keys of a reader, as in the secret `rl_checkpoint_reader`."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str = _DEFAULT_REGION
    endpoint_url: str = ""

    def __repr__(self) -> str:
        return f"StaticKeys(region={self.region!r}, endpoint_url={self.endpoint_url!r})"


def parse_reader_secret(text: str) -> StaticKeys:
    """Parse the JSON of `rl_checkpoint_reader`.

    Raises: InputError `invalid_secret`; the message never repeats the text.
    """

    def refuse(why: str) -> InputError:
        return InputError(
            "invalid_secret",
            why,
            where="secret rl_checkpoint_reader",
            do='Give {"aws_access_key_id": "...", "aws_secret_access_key": "...", "aws_region": "..."}.',
        )

    try:
        document = json.loads(text)
    except ValueError:
        raise refuse("is not JSON") from None
    if not isinstance(document, dict):
        raise refuse("is not a JSON object")
    values: dict[str, str] = {}
    for name in ("aws_access_key_id", "aws_secret_access_key", "aws_region", "endpoint_url"):
        value = document.get(name, "")
        if not isinstance(value, str):
            raise refuse(f"{name} must be a text")
        values[name] = value.strip()
    if not values["aws_access_key_id"] or not values["aws_secret_access_key"]:
        raise refuse("aws_access_key_id and aws_secret_access_key must both be set")
    return StaticKeys(
        values["aws_access_key_id"],
        values["aws_secret_access_key"],
        values["aws_region"] or _DEFAULT_REGION,
        values["endpoint_url"],
    )


def open_bucket_to_read(url: str, *, keys: StaticKeys | None = None, environ: Mapping[str, str] = os.environ) -> Bucket:
    """Open a bucket as `open_bucket` does, but never make the directory of `file://`.

    A reader may start before the writer, so a missing directory is told by each call (`storage_access`, `no_bucket`)
    and not here, just as with a store that has no such bucket.

    Raises: as `open_bucket`.
    """
    parsed = parse_bucket_url(url)
    if parsed.scheme == "file":
        return DirectoryToRead(str(parsed), parsed.prefix)
    return open_bucket(url, keys=keys, environ=environ)


def open_bucket_to_rehearse(url: str, *, environ: Mapping[str, str] = os.environ) -> Bucket:
    """Open a bucket for a publish that writes nothing; a directory of `file://` that is not there counts as empty.

    Raises: as `open_bucket`.
    """
    parsed = parse_bucket_url(url)
    if parsed.scheme == "file" and not Path(parsed.prefix).is_dir():
        return ObstoreBucket(MemoryStore(), str(parsed))
    return open_bucket(url, environ=environ)


def open_bucket(url: str, *, keys: StaticKeys | None = None, environ: Mapping[str, str] = os.environ) -> Bucket:
    """Open the bucket at `s3://`, `gs://`, `file://` or `memory://`, to write; the directory of `file://` is made.

    Args:
        keys: a reader's static keys; without them the publisher's credential chain is used.
        environ: where the chain looks.

    Raises: SnapshotError `invalid_bucket_url`, `storage_access`; MissingExtra when the chain needs boto3.
    """
    parsed = parse_bucket_url(url)
    if parsed.scheme == "file":
        return _make_directory(parsed)
    if parsed.scheme == "memory":
        # One store per full address: the library's memory store has no prefix of its own.
        return ObstoreBucket(_memory_stores.setdefault(str(parsed), MemoryStore()), str(parsed))
    if parsed.scheme == "gs" and keys is None and not environ.get("AWS_ACCESS_KEY_ID"):
        gcs = GCSStore(
            parsed.bucket, prefix=parsed.prefix or None, client_options=_client_options(""), retry_config=_RETRY
        )
        return ObstoreBucket(gcs, str(parsed))
    return _open_s3(parsed, keys, environ)


def _make_directory(parsed: BucketUrl) -> Bucket:
    root = Path(parsed.prefix)
    if not root.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(
                "storage_access",
                f"the directory cannot be made ({error.strerror})",
                where=str(parsed),
                do="Make it, or give a directory that this user may write.",
                details={"cause": "no_bucket"},
                exit_code=3,
            ) from None
    return ObstoreBucket(open_local_store(str(root)), str(parsed), local_root=str(root), has_user_metadata=False)


_RETRY: Any = {
    # Retries belong to retry.py, whose clock can be injected; one quick retry only hides a stale pooled connection.
    "max_retries": 1,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=200), "base": 2},
}


def _client_options(endpoint: str) -> Any:
    # `timeout` bounds a whole request, body included, so a large part on a slow link needs minutes; a stalled
    # connection is noticed by `read_timeout`.
    return {
        "timeout": timedelta(minutes=10),
        "read_timeout": timedelta(seconds=60),
        "connect_timeout": timedelta(seconds=10),
        "allow_http": endpoint.startswith("http://"),
    }


def _open_s3(parsed: BucketUrl, keys: StaticKeys | None, environ: Mapping[str, str]) -> Bucket:
    is_gcs = parsed.scheme == "gs"
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    provider: Any
    if keys is not None:
        region, endpoint = keys.region, keys.endpoint_url
        provider = _static_provider(keys.access_key_id, keys.secret_access_key, None)
    elif environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
        token = environ.get("AWS_SESSION_TOKEN") or None
        if is_gcs and token:
            warnings.warn("AWS_SESSION_TOKEN is set and is not sent to GCS, whose HMAC keys have none", stacklevel=3)
            token = None
        provider = _static_provider(environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], token)
    else:
        provider = _boto3_provider(str(parsed))
        region = region or provider.config.get("region", "")
    if is_gcs:
        endpoint = endpoint or GCS_S3_ENDPOINT
    # Bulk deletion is missing in GCS's S3-compatible endpoint and in small servers; prune deletes one by one.
    options: dict[str, Any] = {"region": region or _DEFAULT_REGION, "disable_bulk_delete": True}
    if endpoint:
        options["endpoint"] = endpoint
        options["virtual_hosted_style_request"] = False
    store = S3Store(
        parsed.bucket,
        prefix=parsed.prefix or None,
        client_options=_client_options(endpoint),
        retry_config=_RETRY,
        credential_provider=provider,
        **options,
    )
    return ObstoreBucket(store, str(parsed))


def _static_provider(access_key_id: str, secret_access_key: str, token: str | None) -> Any:
    # A provider, not plain options: with plain options the library would add AWS_SESSION_TOKEN from the environment.
    def provide() -> dict[str, Any]:
        return {
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "token": token,
            "expires_at": None,
        }

    return provide


def _boto3_provider(url: str) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise MissingExtra(f"{url} without AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "boto3", "s3") from None
    try:
        return Boto3CredentialProvider(boto3.Session())
    except Exception as error:
        raise SnapshotError(
            "storage_access",
            f"no credentials were found ({type(error).__name__})",
            where=url,
            do="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role.",
            details={"cause": "denied"},
            exit_code=3,
        ) from None


@dataclass(frozen=True, slots=True)
class Access:
    """What the probe found."""

    can_write: bool
    honours_create_only: bool
    """Whether a create-only put of an existing key is refused; three of six S3-compatible servers ignore it."""


def probe_access(bucket: Bucket, *, wants_write: bool, retry: RetryPolicy | None = None) -> Access:
    """Try each right once: list and get, and for a publisher put, with and without an object in the way.

    The probe object has a fixed key, so that a publisher without the right to delete leaves one small object, not many.

    Args:
        retry: for passing faults; None tries each call once.

    Raises: SnapshotError `storage_access`, whose message names the missing right; `storage_unavailable`.
    """
    retry = retry or RetryPolicy(budget_s=0.0)
    call_with_retries(retry, bucket.list_directories)
    try:
        call_with_retries(retry, lambda: bucket.head(STARTUP_NAME))
    except SnapshotError as error:
        if error.code != "missing_object":
            raise
    if not wants_write:
        return Access(can_write=False, honours_create_only=False)
    for _ in range(2):
        try:
            call_with_retries(retry, lambda: bucket.put(PROBE_KEY, _PROBE_TEXT, create_only=True))
        except AlreadyThere:
            return Access(can_write=True, honours_create_only=True)
    return Access(can_write=True, honours_create_only=False)
