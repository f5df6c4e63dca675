"""Both directions with the package fireworks-delta-compression: it reads ours, we read its."""

from __future__ import annotations

import concurrent.futures
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import list_tensors
from hotloop.snapshots.shard import open_shard

torch = pytest.importorskip("torch")
reference: Any = pytest.importorskip("fireworks_delta_compression")
save_file = pytest.importorskip("safetensors.torch").save_file
load_file = pytest.importorskip("safetensors.torch").load_file

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
shapes = st.one_of(st.just(()), st.just((0,)), st.just((3, 0)), st.lists(st.integers(1, 50), max_size=3).map(tuple))


@st.composite
def tensor_pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 5))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
        count = int(np.prod(shape))
        width = torch.empty((), dtype=dtype).element_size()
        high = 2 if dtype is torch.bool else 256
        before = rng.integers(0, high, count * width, dtype=np.uint8)
        after = before.copy()
        after[rng.random(before.size) < draw(st.sampled_from([0.0, 0.02, 1.0]))] ^= 1
        for side, data in ((old, before), (new, after)):
            side[f"layer.{number}.weight"] = (
                torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
            )
    if draw(st.booleans()):  # a tied tensor, stored twice, as some trainers write it
        old["tied.weight"], new["tied.weight"] = old["layer.0.weight"].clone(), new["layer.0.weight"].clone()
    return old, new


def to_bytes(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}


@settings(max_examples=40, deadline=None)
@given(pair=tensor_pairs())
def test_the_reference_package_decodes_what_we_encode(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(old, folder / "old.safetensors")
        save_file(new, folder / "new.safetensors")
        base = open_shard(folder / "old.safetensors")
        arc_v2.encode_shard(
            list_tensors([base]), list_tensors([open_shard(folder / "new.safetensors")]), folder / "delta.safetensors"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that the package's buffers are read-only
            decoded = reference.delta_decompress_dict_from_file(
                src=load_file(folder / "old.safetensors"),
                diff_file=str(folder / "delta.safetensors"),
                compression_format="arc_v2",
            )
        assert to_bytes(decoded) == to_bytes(new)
        if all(value.numel() for value in old.values()):  # its in-place decoder cannot take empty tensors
            reference.delta_decompress_inplace(
                base_path=str(folder / "old.safetensors"),
                diff_path=str(folder / "delta.safetensors"),
                compression_format="arc_v2",
            )
            assert to_bytes(load_file(folder / "old.safetensors")) == to_bytes(new)


@settings(max_examples=40, deadline=None)
@given(pair=tensor_pairs())
def test_we_decode_what_the_reference_package_encodes(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        save_file(old, folder / "old.safetensors")
        reference.delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=str(folder / "delta.safetensors"), compression_format="arc_v2", executor=pool
        )
        base = list_tensors([open_shard(folder / "old.safetensors")])
        made = {key: bytearray(value.data) for key, value in base.items()}
        for change in arc_v2.decode_shard(open_shard(folder / "delta.safetensors"), base):
            change.write_into(made[change.name])
        assert {key: bytes(value) for key, value in made.items()} == to_bytes(new)
