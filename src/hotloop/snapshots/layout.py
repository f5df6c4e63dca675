"""Names in a bucket: which object means what, and which names are allowed. Pure; no I/O.

    <prefix>/STARTUP_SNAPSHOT                     text: the identity that new replicas load
    <prefix>/<identity>/model-*.safetensors       weights or delta shards, index, config, tokenizer
    <prefix>/<identity>/snapshot.json             uploaded last: the snapshot exists when this does
    <prefix>/_hotloop/probe                       what the access probe writes

Promises: a checked identity or file name is one path segment, so that no key built here leaves its prefix.

Does not do: reading or writing (bucket.py), what a manifest says (manifest.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hotloop.errors import SnapshotError

MANIFEST_NAME = "snapshot.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
STARTUP_NAME = "STARTUP_SNAPSHOT"
PROBE_KEY = "_hotloop/probe"

_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED_IDENTITIES = frozenset({"startup_snapshot", "initial", "latest", "current"})
MAX_FILE_NAME_BYTES = 255
"""The longest name a common file system holds; a bucket would take more, a cache could not store it."""
MAX_STARTUP_BYTES = 1024
"""An identity has at most 128 characters; the rest is white space that readers trim."""
_TRAILING_DIGITS = re.compile(r"(\d+)\D*\Z", re.ASCII)
MAX_POLICY_VERSION = 2**63 - 1

SCHEMES = ("file", "s3", "gs", "memory")


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A bucket and a prefix in it, as parsed from `scheme://bucket/prefix`."""

    scheme: str
    bucket: str
    """Bucket name; empty for `file`."""
    prefix: str
    """Key prefix without slashes at its ends; for `file` the absolute directory."""

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_bucket_url(text: str) -> BucketUrl:
    """Parse `s3://bucket/run`, `gs://bucket/run`, `file:///dir` or `memory://name/run`.

    A trailing slash is removed. A path without a scheme is refused rather than guessed, except an absolute one or one
    that starts with a dot, which is a directory on this machine.

    Raises: SnapshotError `invalid_bucket_url`.
    """

    def refuse(why: str) -> SnapshotError:
        return SnapshotError(
            "invalid_bucket_url",
            why,
            where=f"bucket {_without_user_info(text)!r}",
            do="Give s3://bucket/run, gs://bucket/run or file:///absolute/dir.",
            exit_code=2,
        )

    text = text.strip()
    if text.startswith(("/", "./", "../", "~/")):
        return BucketUrl("file", "", str(Path(text).expanduser().resolve()))
    try:
        parts = urlsplit(text)
    except ValueError:
        raise refuse("is not a URL") from None
    if parts.scheme not in SCHEMES:
        raise refuse(f"its scheme must be one of {', '.join(SCHEMES)}")
    if parts.username or parts.password or "@" in parts.netloc:
        raise refuse("must not hold credentials, because it is written into logs")
    if parts.query or parts.fragment:
        raise refuse("must not have a query or a fragment")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise refuse("a file bucket needs an absolute path, such as file:///data/run")
        return BucketUrl("file", "", str(Path(unquote(parts.path)).resolve()))
    if not parts.netloc:
        raise refuse("names no bucket")
    prefix = parts.path.strip("/")
    if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
        raise refuse("its prefix holds an empty, '.' or '..' segment")
    return BucketUrl(parts.scheme, parts.netloc, prefix)


def _without_user_info(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", text)


def is_identity(text: str) -> bool:
    """Say whether a text may name a snapshot."""
    return _IDENTITY.fullmatch(text) is not None and ".." not in text and text.lower() not in RESERVED_IDENTITIES


def check_identity(text: str) -> str:
    """Return the identity, or refuse it before any storage call.

    Raises: SnapshotError `invalid_identity`.
    """
    if not isinstance(text, str) or not is_identity(text):
        raise SnapshotError(
            "invalid_identity",
            "must be 1 to 128 letters, digits, '.', '_' or '-', start with a letter or digit, hold no '..', and not be"
            f" one of {', '.join(sorted(RESERVED_IDENTITIES))}",
            where=f"identity {str(text)[:160]!r}",
            do="Name it like step000042.",
            exit_code=2,
        )
    return text


def is_file_name(name: str) -> bool:
    """Say whether a name is one safe path segment under an identity."""
    return (
        bool(name)
        and name not in (".", "..")
        and not any(char in name for char in "/\\\0")
        and name.isprintable()
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_FILE_NAME_BYTES
    )


def check_file_name(name: str, *, where: str) -> str:
    """Return a file name that an index or manifest gives, or refuse it before the key is fetched.

    Raises: SnapshotError `invalid_index`.
    """
    if not isinstance(name, str) or not is_file_name(name):
        raise SnapshotError(
            "invalid_index",
            f"names the file {str(name)[:160]!r}, which is not one plain name in the snapshot's own directory",
            where=where,
            do="Publish it again with file names such as model-00001-of-00002.safetensors.",
            details={"file": str(name)[:160]},
        )
    return name


def snapshot_key(identity: str, name: str) -> str:
    """Build the key of a file of a snapshot, relative to the bucket's prefix."""
    return f"{check_identity(identity)}/{check_file_name(name, where=f'snapshot {identity}')}"


def parse_startup(data: bytes) -> str:
    """Read the identity out of `STARTUP_SNAPSHOT`; white space around it is trimmed.

    Raises: SnapshotError `startup_missing` when it is empty or is not one identity.
    """
    text = data[: MAX_STARTUP_BYTES + 1].decode("utf-8", "replace").strip()
    if len(data) > MAX_STARTUP_BYTES or not is_identity(text):
        raise SnapshotError(
            "startup_missing",
            "must hold one identity and nothing else" if text else "is empty",
            where=f"{STARTUP_NAME} {text[:160]!r}",
            do='Write it with "hotloop publish startup --identity IDENTITY".',
            retryable=True,
        )
    return text


def parse_trailing_version(identity: str) -> int | None:
    """Read the last digits of an identity as a policy version (`step000042` is 42); None without digits."""
    match = _TRAILING_DIGITS.search(identity)
    if match is None or int(match[1]) > MAX_POLICY_VERSION:
        return None
    return int(match[1])


def file_role(name: str) -> str:
    """Name the role of a file: `weights`, `index`, `config` or `other`."""
    if name == INDEX_NAME:
        return "index"
    if name == CONFIG_NAME:
        return "config"
    return "weights" if name.endswith(".safetensors") else "other"
