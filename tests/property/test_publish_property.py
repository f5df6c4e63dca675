"""Any history of any tensors, published and rebuilt, gives equal bytes; no damaged text escapes without a code."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import SnapshotError
from hotloop.snapshots.chain import Held
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, SLIME_FORMATS, DeltaFormats
from hotloop.snapshots.fetch import MemoryFetcher
from hotloop.snapshots.index import parse_index
from hotloop.snapshots.manifest import parse_manifest
from hotloop.snapshots.materialize import rebuild, stage
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader

Records = dict[str, tuple[str, tuple[int, ...], bytes]]
BYTES_OF = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "BOOL": 1, "U8": 1}
FORMATS = [ARC_V2_FORMATS, SLIME_FORMATS, DeltaFormats("zstd", "adler32", "overwrite")]


@st.composite
def histories(draw: st.DrawFn) -> list[Records]:
    """One to five versions of a few small tensors, scalars and empty ones among them."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    first: Records = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(BYTES_OF)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        first[f"t{number}"] = (dtype, shape, rng.bytes(BYTES_OF[dtype] * int(np.prod(shape, dtype=int))))
    versions = [first]
    for _ in range(draw(st.integers(0, 4))):
        new = dict(versions[-1])
        for name in draw(st.sets(st.sampled_from(sorted(first)))):
            dtype, shape, data = new[name]
            mask = np.frombuffer(rng.bytes(len(data)), np.uint8) * (rng.random(len(data)) < 0.2)
            new[name] = (dtype, shape, (np.frombuffer(data, np.uint8) ^ mask.astype(np.uint8)).tobytes())
        versions.append(new)
    return versions


class Rebuilt:
    """Rebuilt content, held."""

    def __init__(self, identity: str, reader: SnapshotReader) -> None:
        staged = rebuild(identity, reader)
        self.held = Held(identity, staged.digest)
        self.tensors = staged.tensors
        self.adler32: dict[str, int] = {}


@settings(max_examples=60, deadline=None)
@given(
    versions=histories(),
    formats=st.sampled_from(FORMATS),
    full_every=st.integers(0, 4),
    max_shard_bytes=st.sampled_from([40, 400, 10**6]),
    start=st.integers(0, 4),
)
def test_what_is_published_is_what_is_rebuilt_from_anywhere(
    versions: list[Records], formats: DeltaFormats, full_every: int, max_shard_bytes: int, start: int
) -> None:
    bucket = FakeBucket()
    publisher = Publisher(
        bucket,
        PublishSettings(workers=2, full_every=full_every, formats=formats, level=1, max_shard_bytes=max_shard_bytes),
    )
    for version, records in enumerate(versions):
        publisher.publish(records, f"v{version}", version)
    reader = SnapshotReader(bucket)
    for version, records in enumerate(versions):
        built = rebuild(f"v{version}", reader)
        assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in built.tensors.items()} == records
    held = Rebuilt(f"v{min(start, len(versions) - 1)}", reader)
    last = len(versions) - 1
    staged = stage(f"v{last}", reader, MemoryFetcher(bucket), held=held)
    content = {name: bytes(tensor.data) for name, tensor in held.tensors.items()}
    content.update({name: bytes(tensor.data) for name, tensor in staged.iter_full_tensors(held)})
    assert content == {name: data for name, (_, _, data) in versions[last].items()}


def make_manifest() -> bytes:
    bucket = FakeBucket()
    publisher = Publisher(bucket)
    for version in range(2):
        publisher.publish({"w": ("F32", (2,), bytes([version] * 8))}, f"v{version}", version)
    return bucket.objects["v1/snapshot.json"][0]


MANIFEST = make_manifest()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_manifest_is_taken_or_refused_with_a_code(data: st.DataObject) -> None:
    mutated = bytearray(MANIFEST)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        if data.draw(st.booleans()):
            mutated[position] = data.draw(st.integers(0, 255))
        else:
            del mutated[position : position + data.draw(st.integers(1, 30))]
        if not mutated:
            break
    try:
        parse_manifest(bytes(mutated), identity="v1")
    except SnapshotError as error:
        assert error.code in ("manifest_invalid", "invalid_index")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = ["schema", "kind", "parent", "anchor", "chain_length", "policy_version", "formats", "files", "tensors", "model"]


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(PATHS), value=JSON)
def test_a_manifest_with_any_value_in_any_place_is_taken_or_refused_with_a_code(key: str, value: object) -> None:
    document = {**json.loads(MANIFEST), key: value}
    try:
        parse_manifest(json.dumps(document).encode(), identity="v1")
    except SnapshotError as error:
        assert error.code in ("manifest_invalid", "invalid_index")


@settings(max_examples=300, deadline=None)
@given(weight_map=JSON, metadata=JSON)
def test_an_index_with_any_value_is_taken_or_refused_with_a_code(weight_map: object, metadata: object) -> None:
    try:
        parse_index(json.dumps({"weight_map": weight_map, "metadata": metadata}).encode(), where="v1")
    except SnapshotError as error:
        assert error.code == "invalid_index"
