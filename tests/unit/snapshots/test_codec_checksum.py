"""Checksums: values, text forms, and packages that are not there."""

from __future__ import annotations

import random
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import SnapshotError
from hotloop.snapshots import checksum

DATA = b"Wikipedia"
# Adler-32 of "Wikipedia" is the worked example of its Wikipedia article: 0x11E60398 = 300286872.
WORKED = {
    "alder32": "300286872",
    "adler32": "11e60398",
}


@pytest.mark.parametrize("name", WORKED)
def test_the_format_name_decides_the_text_form(name: str) -> None:
    hasher = checksum.make_hasher(name)
    hasher.update(memoryview(DATA)[:4])
    hasher.update(memoryview(DATA)[4:])
    assert hasher.hexdigest() == WORKED[name]


def test_empty_inputs_have_the_published_values() -> None:
    # XXH3-128 and BLAKE3 of no input, from the projects' own test vectors.
    assert checksum.make_hasher("alder32").hexdigest() == "1"
    assert checksum.make_hasher("adler32").hexdigest() == "00000001"
    assert checksum.make_hasher("xxh3-128").hexdigest() == "99aa06d3014798d86001c324468d497f"
    assert (
        checksum.make_hasher("blake3").hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )


def test_the_chosen_adler32_equals_zlib_across_its_overflow_lengths() -> None:
    for size in (0, 1, 15, 16, 5551, 5552, 5553, 70_000):
        data = b"\xff" * size
        assert checksum.adler32(data, 1) == zlib.adler32(data)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("alder32", "0x1"),
        ("alder32", "-1"),
        ("alder32", "01"),
        ("alder32", "4294967296"),
        ("alder32", "\u0661"),
        ("alder32", ""),
        ("alder32", "11e60398"),
        ("alder32", "1\n"),
        ("adler32", "300286872"),
        ("adler32", "11E60398"),
        ("adler32", "11e60398\n"),
        ("xxh3-128", "11e60398"),
        ("blake3", "99aa06d3014798d86001c324468d497f"),
    ],
)
def test_text_of_another_form_is_malformed(name: str, text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        checksum.check_text(text, name, tensor="t", where="f")
    assert caught.value.code == "checksum_malformed"
    assert caught.value.details["tensor"] == "t"


def test_no_text_is_missing() -> None:
    with pytest.raises(SnapshotError) as caught:
        checksum.check_text(None, "alder32", tensor="t", where="f")
    assert caught.value.code == "checksum_missing"


def test_decimal_text_that_looks_like_hex_is_decimal_where_the_name_says_so() -> None:
    assert checksum.check_text("12345678", "alder32", tensor="t", where="f") == "12345678"
    assert checksum.check_text("12345678", "adler32", tensor="t", where="f") == "12345678"


@pytest.mark.parametrize(("name", "package"), [("xxh3-128", "xxhash"), ("blake3", "blake3")])
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SnapshotError) as caught:
        checksum.check_available(name)
    assert caught.value.code == "checksum_unavailable"
    assert package in str(caught.value)
    checksum.check_available("alder32")


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=1, max_size=3000), seed=st.integers(0, 999))
def test_adler32_of_changed_bytes_follows_from_the_old_ones(data: bytes, seed: int) -> None:
    right = bytearray(data)
    low = high = 0
    for at in random.Random(seed).sample(range(len(data)), min(len(data), 20)):
        right[at] ^= 0x95
        low += right[at] - data[at]
        high += (right[at] - data[at]) * (len(data) - at)
    hasher = checksum.AdlerHasher(decimal=True)
    hasher.update(memoryview(b"before"))
    hasher.update(memoryview(data))
    hasher.shift(low, high)
    assert hasher.hexdigest() == str(zlib.adler32(right, zlib.adler32(b"before")))
