"""snapshot.json: what is taken, what is refused, and what the digest covers."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from hotloop.errors import SnapshotError
from hotloop.snapshots.manifest import MAX_MANIFEST_BYTES, is_same_content, parse_manifest, render_manifest

SHA = "ab" * 32


def make_document(**changes: Any) -> dict[str, Any]:
    """The example of the contract, as a delta."""
    document: dict[str, Any] = {
        "schema": 1,
        "identity": "step000002",
        "kind": "delta",
        "parent": "step000001",
        "anchor": "step000001",
        "chain_length": 1,
        "policy_version": 2,
        "created_at": "2026-09-30T12:00:00Z",
        "producer": {"name": "hotloop", "version": "0.1.0"},
        "formats": {"compression_format": "arc_v2", "checksum_format": "alder32", "delta_encoding": "xor"},
        "model": {"config_sha256": SHA},
        "files": {
            "model-00001-of-00002.safetensors": {"size": 3440, "sha256": SHA, "role": "weights"},
            "model-00002-of-00002.safetensors": {"size": 55000, "sha256": SHA, "role": "weights"},
            "model.safetensors.index.json": {"size": 900, "sha256": SHA, "role": "index"},
        },
        "tensors": {
            "lm_head.weight": {
                "file": "model-00002-of-00002.safetensors",
                "dtype": "BF16",
                "shape": [512, 64],
                "nbytes": 65536,
                "adler32": 3449365633,
                "changed": True,
            },
            "empty": {
                "file": "model-00001-of-00002.safetensors",
                "dtype": "F32",
                "shape": [0, 4],
                "nbytes": 0,
                "adler32": 1,
                "changed": False,
            },
        },
        "totals": {"tensors": 2, "changed": 1, "full_bytes": 65536, "stored_bytes": 59340},
    }
    return {**document, **changes}


def encode(document: Any) -> bytes:
    return json.dumps(document).encode()


def refuse(document: Any, identity: str = "step000002") -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        parse_manifest(encode(document), identity=identity)
    return caught.value


def test_the_example_of_the_contract_is_taken() -> None:
    manifest = parse_manifest(encode(make_document()), identity="step000002")
    assert (manifest.kind, manifest.parent, manifest.chain_length, manifest.policy_version) == (
        "delta",
        "step000001",
        1,
        2,
    )
    assert manifest.tensors["lm_head.weight"].adler32 == 3449365633
    assert manifest.tensors["lm_head.weight"].shape == (512, 64)
    # 3440 + 55000 + 900, and 65536 + 0.
    assert (manifest.stored_bytes, manifest.full_bytes, manifest.num_changed) == (59340, 65536, 1)


def test_the_digest_is_of_sorted_keys_without_white_space() -> None:
    document = make_document()
    expected = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert parse_manifest(encode(document), identity="step000002").digest == expected
    spaced = json.dumps(dict(reversed(document.items())), indent=4).encode()
    assert parse_manifest(spaced, identity="step000002").digest == expected


def test_unknown_keys_are_ignored_and_stay_in_the_digest() -> None:
    plain = parse_manifest(encode(make_document()), identity="step000002")
    extended = parse_manifest(encode(make_document(note="hello")), identity="step000002")
    assert extended.digest != plain.digest
    assert is_same_content(extended, plain)


def test_a_manifest_survives_writing_and_reading() -> None:
    manifest = parse_manifest(encode(make_document()), identity="step000002")
    again = parse_manifest(render_manifest(manifest), identity="step000002")
    assert again == manifest


def test_content_is_the_same_whoever_published_it_and_when() -> None:
    manifest = parse_manifest(encode(make_document()), identity="step000002")
    later = parse_manifest(encode(make_document(created_at="2027-01-01T00:00:00Z")), identity="step000002")
    assert is_same_content(manifest, later)
    assert manifest.digest != later.digest
    other = make_document()
    other["tensors"]["lm_head.weight"]["adler32"] = 5
    assert not is_same_content(manifest, parse_manifest(encode(other), identity="step000002"))


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            document = document[key]
        if value is ...:
            del document[last]
        else:
            document[last] = value

    return apply


T = "tensors/lm_head.weight"
F = "files/model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("schema", "1"),
        ("schema", True),
        ("identity", "step000003"),
        ("kind", "full"),
        ("parent", None),
        ("parent", "step000002"),
        ("parent", "../x"),
        ("anchor", None),
        ("anchor", "step000002"),
        ("chain_length", 0),
        ("chain_length", 129),
        ("chain_length", -1),
        ("policy_version", -1),
        ("policy_version", 1.5),
        ("policy_version", True),
        ("policy_version", ...),
        ("formats/compression_format", None),
        ("formats/checksum_format", 7),
        ("files", []),
        (f"{F}/size", -1),
        (f"{F}/size", 2**64),
        (f"{F}/sha256", SHA.upper()),
        (f"{F}/sha256", "ab"),
        (f"{F}/role", "shard"),
        ("tensors", ...),
        (f"{T}/file", "absent.safetensors"),
        (f"{T}/file", "model.safetensors.index.json"),
        (f"{T}/file", ""),
        (f"{T}/shape", [512, -1]),
        (f"{T}/shape", "512"),
        (f"{T}/nbytes", 0),
        (f"{T}/adler32", 2**32),
        (f"{T}/changed", 1),
        (f"{T}/dtype", None),
        ("tensors/empty/adler32", 0),
        ("tensors/empty/nbytes", 4),
    ],
)
def test_a_broken_rule_is_manifest_invalid(path: str, value: Any) -> None:
    document = copy.deepcopy(make_document())
    change(path, value)(document)
    assert refuse(document).code == "manifest_invalid"


@pytest.mark.parametrize("name", ["../escape.safetensors", "a/b.safetensors", "a\\b", "", "..", "snapshot.json"])
def test_a_file_name_that_leaves_the_directory_is_invalid_index(name: str) -> None:
    document = make_document()
    document["files"][name] = {"size": 1, "sha256": SHA, "role": "other"}
    assert refuse(document).code == "invalid_index"


def make_anchor() -> dict[str, Any]:
    return make_document(
        kind="anchor",
        parent=None,
        anchor="step000002",
        chain_length=0,
        formats={"compression_format": None, "checksum_format": None, "delta_encoding": None},
    )


def test_an_anchor_has_no_parent_and_no_formats() -> None:
    manifest = parse_manifest(encode(make_anchor()), identity="step000002")
    assert (manifest.kind, manifest.parent, manifest.anchor, manifest.chain_length) == ("anchor", None, "step000002", 0)
    for path, value in (
        ("parent", "step000001"),
        ("chain_length", 1),
        ("anchor", "step000001"),
        ("formats/delta_encoding", "xor"),
    ):
        document = copy.deepcopy(make_anchor())
        change(path, value)(document)
        assert refuse(document).code == "manifest_invalid"


def test_a_delta_may_leave_out_an_unchanged_tensor_but_an_anchor_may_not() -> None:
    document = make_document()
    document["tensors"]["empty"]["file"] = ""
    assert parse_manifest(encode(document), identity="step000002").tensors["empty"].file == ""
    anchor = make_anchor()
    anchor["tensors"]["empty"]["file"] = ""
    assert refuse(anchor).code == "manifest_invalid"


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\xff", b'{"schema": 1', b"[" * 5000])
def test_what_is_no_json_object_is_manifest_invalid(data: bytes) -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_manifest(data, identity="step000002")
    assert caught.value.code == "manifest_invalid"


def test_a_manifest_above_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(SnapshotError) as caught:
        parse_manifest(memoryview(bytearray(MAX_MANIFEST_BYTES + 1)), identity="step000002")  # type: ignore[arg-type]
    assert caught.value.code == "manifest_invalid"
    assert str(MAX_MANIFEST_BYTES) in str(caught.value)
