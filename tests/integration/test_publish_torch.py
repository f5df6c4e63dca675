"""A trainer's own tensors, published as they are: bf16, tied, strided, scalar and empty ones."""

from __future__ import annotations

import torch

from hotloop.snapshots.materialize import rebuild
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_a_torch_state_dictionary_is_published_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(64, 16, generator=generator).to(torch.bfloat16)
    state = {
        "embed.weight": embedding,
        "head.weight": embedding,
        "transposed.weight": torch.randn(8, 12, generator=generator).t(),
        "half.weight": torch.randn(5, generator=generator).to(torch.float16),
        "fp8.weight": torch.randn(6, 4, generator=generator).to(torch.float8_e4m3fn),
        "scale": torch.tensor(2.5, requires_grad=True),
        "count": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }
    bucket = FakeBucket()
    publisher = Publisher(bucket)
    publisher.publish(state, "step000001", 1)
    with torch.no_grad():
        embedding[3, 5] += 1
    published = publisher.publish(state, "step000002", 2)
    assert published.kind == "delta"
    # The tied pair changed in one element.
    assert published.num_changed == 2
    built = rebuild("step000002", SnapshotReader(bucket))
    assert {name: bytes(tensor.data) for name, tensor in built.tensors.items()} == {
        name: as_bytes(tensor) for name, tensor in state.items()
    }
    assert built.tensors["embed.weight"].dtype == "BF16"
    assert built.tensors["transposed.weight"].shape == (12, 8)
    assert built.tensors["scale"].shape == ()
