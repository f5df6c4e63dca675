"""Checksums of tensor bytes: Adler-32, XXH3-128 and BLAKE3, and how each is spelt in a delta.

Owns: the fastest Adler-32 that is installed, streaming hashers, and the text form of each checksum format.

Promises: the text form is decided by the format's name, never by the look of the text. `alder32` (so spelt on the
wire) is unsigned decimal without leading zeros; `adler32` is 8 lower-case hex digits; `xxh3-128` 32; `blake3` 64.
A hash whose package is missing is `checksum_unavailable` when it is asked for, before any tensor is read.

Does not do: cryptographic trust. Adler-32 finds accidents, not attackers; SHA-256 of whole files is the manifest's.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from hotloop.errors import SnapshotError

EMPTY_ADLER32 = 1
_ADLER_BASE = 65521
"""The largest prime below 2**16 (RFC 1950, section 8.2)."""
FORMATS = ("alder32", "adler32", "xxh3-128", "blake3")
_TEXT_FORMS = {
    "alder32": re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII),
    "adler32": re.compile(r"[0-9a-f]{8}"),
    "xxh3-128": re.compile(r"[0-9a-f]{32}"),
    "blake3": re.compile(r"[0-9a-f]{64}"),
}
TEXT_LENGTHS = {"alder32": 10, "adler32": 8, "xxh3-128": 32, "blake3": 64}
"""The most characters that a checksum's text has."""
_PACKAGES = {"xxh3-128": "xxhash", "blake3": "blake3"}


class Hasher(Protocol):
    """A checksum that is fed a tensor in pieces."""

    def update(self, data: memoryview, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """Return the text of what was taken so far."""


def _choose_adler32() -> tuple[Callable[..., int], str]:
    """Return the fastest installed Adler-32 and its package: SIMD ones run at about four times zlib's speed."""
    for package, module in (("zlib-ng", "zlib_ng.zlib_ng"), ("isal", "isal.isal_zlib")):
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        function: Callable[..., int] = found.adler32
        if function(b"loop", function(b"hot", EMPTY_ADLER32)) == zlib.adler32(b"hotloop"):
            return function, package
    return zlib.adler32, "zlib"


adler32, ADLER32_PACKAGE = _choose_adler32()


class AdlerHasher:
    """Adler-32 in pieces."""

    def __init__(self, *, decimal: bool) -> None:
        self.value = EMPTY_ADLER32
        self._decimal = decimal

    def update(self, data: memoryview, /) -> None:
        """Take the next bytes."""
        self.value = adler32(data, self.value)

    def shift(self, low: int, high: int) -> None:
        """Correct for bytes that were not what `update` was given.

        Args:
            low: the sum of (right byte - given byte) over the wrong bytes.
            high: the same sum, each term times the number of bytes that were given from that byte on, itself included.
        """
        self.value = ((self.value & 0xFFFF) + low) % _ADLER_BASE | ((self.value >> 16) + high) % _ADLER_BASE << 16

    def hexdigest(self) -> str:
        """Return decimal text for `alder32`, else 8 hex digits."""
        return str(self.value) if self._decimal else f"{self.value:08x}"


def check_available(checksum_format: str) -> None:
    """Check that a format's package is installed.

    Raises:
        SnapshotError: `checksum_unavailable`.
    """
    if checksum_format in _PACKAGES:
        _import(checksum_format)


def _import(checksum_format: str) -> ModuleType:
    package = _PACKAGES[checksum_format]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SnapshotError(
            "checksum_unavailable",
            f"the checksum {checksum_format} needs the package {package}, which is not installed",
            do=f"Install it with: pip install {package}",
            details={"checksum_format": checksum_format, "package": package},
        ) from error


def make_hasher(checksum_format: str) -> Hasher:
    """Return a fresh hasher.

    Raises:
        SnapshotError: `checksum_unavailable`.
    """
    if checksum_format in ("alder32", "adler32"):
        return AdlerHasher(decimal=checksum_format == "alder32")
    module = _import(checksum_format)
    hasher: Hasher = module.xxh3_128() if checksum_format == "xxh3-128" else module.blake3()
    return hasher


def check_text(text: str | None, checksum_format: str, *, tensor: str, where: str) -> str:
    """Check that a delta has a checksum for a tensor, in the right text form.

    Raises:
        SnapshotError: `checksum_missing` or `checksum_malformed`.
    """
    if text is None:
        raise SnapshotError(
            "checksum_missing",
            f"there is no checksum for tensor {tensor!r}",
            where=where,
            do="Publish the delta again with a writer that adds one checksum per tensor.",
            details={"tensor": tensor},
        )
    well_formed = _TEXT_FORMS[checksum_format].fullmatch(text) is not None
    if well_formed and checksum_format == "alder32":
        well_formed = int(text) < 1 << 32
    if not well_formed:
        raise SnapshotError(
            "checksum_malformed",
            f"the checksum {text[:80]!r} of tensor {tensor!r} is not {checksum_format} text",
            where=where,
            do="Check checksum_format: alder32 is decimal, adler32, xxh3-128 and blake3 are lower-case hex.",
            details={"tensor": tensor, "checksum_format": checksum_format},
        )
    return text
