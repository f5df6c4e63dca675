"""What went wrong in a store, in our words: which fault it is, which right is missing, and never a secret.

Owns: turning an exception of the storage library into one `SnapshotError`.

Promises: a message holds the bucket, the key and the store's own error code, and nothing else of the store's answer,
because answers may repeat an access key or a signed address.
"""

from __future__ import annotations

import errno
import re

from obstore.exceptions import (
    AlreadyExistsError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from hotloop.errors import SnapshotError

RIGHTS = {
    "list": "list (s3:ListBucket)",
    "get": "get (s3:GetObject)",
    "head": "get (s3:GetObject)",
    "put": "put (s3:PutObject)",
    "multipart": "put (s3:PutObject, s3:AbortMultipartUpload)",
    "delete": "delete (s3:DeleteObject)",
}
_STORE_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>|\(code: ([A-Za-z0-9]{1,60})\)")
_SYSTEM_ERROR = re.compile(r"\(os error (\d{1,5})\)")
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
}
_DENIED = {"AccessDenied", "AllAccessDisabled", "Forbidden"}
_REFUSED_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"}
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"}


class AlreadyThere(Exception):
    """A create-only put found an object under its key."""


def translate(error: Exception, *, action: str, url: str, key: str) -> Exception:
    """Turn a fault of the storage library into ours.

    Args:
        action: a key of `RIGHTS`.
        url: the bucket's address, without credentials.
        key: the key relative to the bucket's prefix.

    Returns: `AlreadyThere`, or a SnapshotError `missing_object`, `storage_access` (with `details.cause` `denied`,
        `expired`, `region` or `no_bucket`), `no_space`, `invalid_index` or `storage_unavailable`.
    """
    where = f"{url}/{key}" if key else url
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return AlreadyThere(where)
    text = str(error)
    found = _STORE_CODE.search(text)
    store_code = (found[1] or found[2]) if found else ""
    system_error = _find_system_error(error, text)
    if system_error in _DISK_FULL:
        return make_no_space(where)
    if url.startswith("file://") and system_error in _NO_RIGHT:
        return _no_right_in_directory(system_error, action, where)
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if store_code == "NoSuchBucket":
        return _access("no_bucket", "the bucket does not exist", action, where, store_code)
    if store_code in _EXPIRED:
        return _access("expired", "the credentials have expired", action, where, store_code)
    if store_code in _REGION or "missing a valid region" in text or "redirect" in text.lower():
        return _access("region", "the bucket is in another region", action, where, store_code)
    if store_code in _REFUSED_KEYS:
        return _access("denied", "the store refused the keys", action, where, store_code)
    if denied or store_code in _DENIED:
        return _access("denied", f"the right to {RIGHTS[action]} is missing", action, where, store_code)
    if isinstance(error, FileNotFoundError):
        return SnapshotError(
            "missing_object",
            "is not in the bucket",
            where=where,
            do="Check the identity, or wait until its upload has ended.",
            details={"key": key},
            retryable=True,
        )
    if isinstance(error, InvalidPathError):
        return SnapshotError("invalid_index", "is not a key that the store takes", where=where, details={"key": key})
    if isinstance(error, NotSupportedError | NotImplementedError):
        return SnapshotError(
            "storage_unavailable", f"the store cannot do {action}", where=where, details={"key": key}, exit_code=3
        )
    return SnapshotError(
        "storage_unavailable",
        f"{RIGHTS[action].split()[0]} failed ({_describe(text, store_code)})",
        where=where,
        do="Check that the store can be reached; the call is tried again until its time budget is spent.",
        details={"key": key, "store_code": store_code},
        retryable=True,
        exit_code=3,
    )


def _find_system_error(error: Exception, text: str) -> int:
    """Return the operating system's number of a fault, 0 for none. The library gives it only in its text."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _SYSTEM_ERROR.search(text)
    return int(found[1]) if found else 0


def _no_right_in_directory(system_error: int, action: str, where: str) -> SnapshotError:
    verb = "read" if action in ("list", "get", "head") else "write"
    is_read_only = system_error == errno.EROFS
    return SnapshotError(
        "storage_access",
        "the disk is mounted read-only" if is_read_only else f"this user has no right to {verb} there",
        where=where,
        do="Mount it for writing, or give another directory." if is_read_only else f"Let this user {verb} there.",
        details={"cause": "denied", "right": verb, "store_code": errno.errorcode.get(system_error, "")},
        retryable=True,
        exit_code=3,
    )


def make_no_space(where: str) -> SnapshotError:
    """Build the error for a full disk."""
    return SnapshotError(
        "no_space",
        "the disk is full",
        where=where,
        do="Free space there, or give a larger disk, and try again; what was half written has been removed.",
        retryable=True,
        exit_code=3,
    )


def _access(cause: str, why: str, action: str, where: str, store_code: str) -> SnapshotError:
    grant = f"Grant it to these keys, or give keys that have it: {RIGHTS[action]}."
    keys = "Check access key id, secret and, where one is set, the session token."
    advice = {
        "denied": keys if store_code in _REFUSED_KEYS else grant,
        "expired": "Renew the credentials.",
        "region": "Set AWS_DEFAULT_REGION, or aws_region of the reader secret, to the bucket's region.",
        "no_bucket": "Create the bucket, or correct its name.",
    }
    return SnapshotError(
        "storage_access",
        f"{why}{f' ({store_code})' if store_code else ''}",
        where=where,
        do=advice[cause],
        details={"cause": cause, "right": RIGHTS[action], "store_code": store_code},
        retryable=True,
        exit_code=3,
    )


def _describe(text: str, store_code: str) -> str:
    """Name the kind of a transport fault in a few fixed words; the text itself may hold addresses and keys."""
    if store_code in _THROTTLED or "429 Too Many" in text:
        return f"throttled, {store_code}" if store_code else "throttled"
    if store_code:
        return store_code
    for needle, words in (
        ("tcp connect error", "no connection"),
        ("onnection refused", "no connection"),
        ("imed out", "timed out"),
        ("TimedOut", "timed out"),
        ("error sending request", "no connection"),
        ("error decoding response body", "cut in the middle"),
        ("status code: 5", "server error"),
    ):
        if needle in text:
            return words
    return "unknown fault"
