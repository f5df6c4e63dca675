"""Publish an anchor and a chain of deltas of a 135M-parameter bf16 checkpoint, and verify every tensor of all of them.

    python benchmarks/verify_deep.py [--deltas 30] [--changed 0.01] [--vocab 49152] [--layers 30]

The checkpoint has the shapes of a Llama-style model (hidden 576, 9 heads, 3 key-value heads, feed-forward 1536). Each
step changes a random share of the elements by their lowest mantissa bit, as a small optimizer step does. Prints the
bytes and the time of each part; exits with 1 if a snapshot does not verify.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time

import numpy as np

from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publish_job import PublishSettings
from hotloop.snapshots.publisher import Publisher
from hotloop.snapshots.reader import SnapshotReader
from hotloop.snapshots.verify import verify_bucket
from hotloop.units import format_bytes, format_count

HIDDEN, FEED_FORWARD, KEY_VALUE = 576, 1536, 192
State = dict[str, np.ndarray]


def make_state(rng: np.random.Generator, vocab: int, layers: int) -> State:
    """Draw weights as bf16 bit patterns (the upper half of float32)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_VALUE, HIDDEN),
            "self_attn.v_proj": (KEY_VALUE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"{start}.{name}.weight"] = shape
    scale = np.float32(0.02)
    return {
        name: ((rng.standard_normal(shape, dtype=np.float32) * scale).view(np.uint32) >> 16).astype(np.uint16)
        for name, shape in shapes.items()
    }


def step(rng: np.random.Generator, state: State, changed_frac: float) -> None:
    """Change a random share of each tensor in place."""
    for array in state.values():
        flat = array.reshape(-1)
        picked = rng.integers(0, flat.size, max(1, int(flat.size * changed_frac)))
        flat[picked] ^= 1


def as_records(state: State) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    """Label the bit patterns as BF16, which numpy does not know."""
    return {name: ("BF16", array.shape, array.reshape(-1).view(np.uint8).data) for name, array in state.items()}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--deltas", type=int, default=30)
    parser.add_argument("--changed", type=float, default=0.01, help="share of elements changed in each step")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    state = make_state(rng, options.vocab, options.layers)
    num_params = sum(array.size for array in state.values())
    print(
        f"{format_count(num_params)} parameters, {len(state)} tensors, {options.deltas} deltas of {options.changed:.2%}"
    )
    print(f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="verify-deep-") as folder:
        bucket = open_bucket(f"file://{folder}/bucket")
        publisher = Publisher(bucket, PublishSettings(full_every=0, max_shard_bytes=128 * 1024**2))
        seconds: list[float] = []
        stored: list[int] = []
        for version in range(options.deltas + 1):
            if version:
                step(rng, state, options.changed)
            published = publisher.publish(as_records(state), f"step{version:06d}", version)
            seconds.append(published.seconds)
            stored.append(published.stored_bytes)
        full_bytes = 2 * num_params
        print(f"anchor   {format_bytes(stored[0]):>9}  {seconds[0]:6.2f} s  {full_bytes / seconds[0] / 1e6:7.0f} MB/s")
        mean_s, mean_bytes = sum(seconds[1:]) / options.deltas, sum(stored[1:]) // options.deltas
        print(f"delta    {format_bytes(mean_bytes):>9}  {mean_s:6.2f} s  {full_bytes / mean_s / 1e6:7.0f} MB/s  (mean)")
        began = time.perf_counter()
        reports = verify_bucket(SnapshotReader(bucket), is_deep=True)
        elapsed = time.perf_counter() - began
        checked = full_bytes * (options.deltas + 1)
        print(
            f"verify --deep  {elapsed:6.2f} s for {len(reports)} snapshots  {checked / elapsed / 1e6:7.0f} MB/s tensors"
        )
        bad = [report.render() for report in reports if not report.is_sound]
        print("\n".join(bad) if bad else f"all {len(reports)} snapshots verify")
        return 1 if bad or len(reports) != options.deltas + 1 else 0


if __name__ == "__main__":
    sys.exit(main())
