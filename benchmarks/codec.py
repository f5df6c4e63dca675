"""How fast deltas are encoded and decoded, as ratios taken inside one run.

Measures, on 1 GiB of bf16 tensors shaped like a small decoder, with 0.1 %, 1 % and 3.5 % of the elements moved by one
step of bf16: `arc_v2` encoding and decoding against the package fireworks-delta-compression (best of several thread
counts), against a plain XOR pass and against memcpy; the size of the delta; and the peak of extra memory.

Fair play: both get the same tensors in memory. Ours writes its delta to a file and reads it back from one, which the
reference does only when decoding. "decode" yields verified ranges and new bytes; "rebuild" also writes them over a
copy of the base, which is what the reference's decode returns.

Run: python benchmarks/codec.py [--gib 1] [--rounds 1] [--json FILE]      (needs torch and fireworks-delta-compression)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.snapshots.checksum import ADLER32_PACKAGE
from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.codecs.parallel import choose_workers
from hotloop.snapshots.shard import open_shard

Weights = dict[str, npt.NDArray[np.uint16]]
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 2048, 5632, 512, 40960
REFERENCE_THREADS = (0, 2, 4)
FRACTIONS = (0.001, 0.01, 0.035)
WANTED_ENCODE, WANTED_DECODE, WANTED_SIZE, WANTED_MEMORY = 3.0, 2.5, 1.02, 0.25
_LAYER = {
    "q_proj": HIDDEN * HIDDEN,
    "k_proj": KEY_VALUE * HIDDEN,
    "v_proj": KEY_VALUE * HIDDEN,
    "o_proj": HIDDEN * HIDDEN,
    "gate_proj": HIDDEN * INTERMEDIATE,
    "up_proj": HIDDEN * INTERMEDIATE,
    "down_proj": HIDDEN * INTERMEDIATE,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}


def make_weights(num_bytes: int, seed: int = 0) -> Weights:
    """Return bf16 tensors (as 16-bit patterns) of at least `num_bytes`, drawn from a normal of deviation 0.02."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    sizes = {"embed_tokens": VOCABULARY * HIDDEN}
    layer = 0
    while 2 * sum(sizes.values()) < num_bytes:
        sizes |= {f"layers.{layer:02d}.{name}": count for name, count in _LAYER.items()}
        layer += 1
    for name, count in sizes.items():
        values = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        weights[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return weights


def move_weights(weights: Weights, fraction: float, seed: int = 1) -> Weights:
    """Return a copy in which a random share of the elements is the next larger or smaller bf16 value."""
    rng = np.random.default_rng(seed)
    moved: Weights = {}
    for name, old in weights.items():
        new = old.copy()
        chosen = rng.choice(old.size, round(fraction * old.size), replace=False)
        new[chosen] += rng.choice(np.array([1, 0xFFFF], np.uint16), chosen.size)
        moved[name] = new
    return moved


def as_tensors(weights: Weights) -> dict[str, TensorBytes]:
    """Return the codec's view of some weights."""
    return {name: TensorBytes("BF16", (new.size,), new.view(np.uint8).data) for name, new in weights.items()}


def measure(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure_peak(function: Callable[[], object]) -> int:
    """Return how far the process's own memory (RssAnon) rose during one call, in bytes, sampled every 2 ms."""
    done = threading.Event()
    start = read_anonymous_bytes()
    peak = start

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, read_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        done.set()
        watcher.join()
    return peak - start


def read_anonymous_bytes() -> int:
    """Return RssAnon of this process; pages of mapped files are the page cache's, not counted."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise RuntimeError("this system does not report RssAnon")


class Reference:
    """fireworks-delta-compression on the same bytes."""

    def __init__(self, old: Weights, new: Weights, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self._old = {name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) for name, value in old.items()}
        self._new = {name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) for name, value in new.items()}
        self._file = str(folder / "reference.safetensors")

    def encode(self, threads: int) -> None:
        """Encode into memory."""
        from fireworks_delta_compression import delta_compress_dicts

        with _pool(threads) as pool:
            delta_compress_dicts(self._old, self._new, "arc_v2", executor=pool)

    def save(self) -> int:
        """Write the delta file and return its bytes."""
        from fireworks_delta_compression import delta_compress_dicts_to_file

        with _pool(2) as pool:
            delta_compress_dicts_to_file(
                src=self._old, dst=self._new, diff_file=self._file, compression_format="arc_v2", executor=pool
            )
        return os.path.getsize(self._file)

    def decode(self, threads: int) -> None:
        """Decode the file into new tensors."""
        from fireworks_delta_compression import delta_decompress_dict_from_file

        with _pool(threads) as pool:
            delta_decompress_dict_from_file(
                src=dict(self._old), diff_file=self._file, compression_format="arc_v2", executor=pool
            )


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a thread pool, or None for 0 threads."""
    if not threads:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool


class Ours:
    """The codec of this repository, on the same bytes."""

    def __init__(self, old: Weights, new: Weights, folder: Path, level: int, workers: int) -> None:
        self._old, self._new = as_tensors(old), as_tensors(new)
        self._level, self._workers, self._folder = level, workers, folder
        self._file = folder / "model.safetensors"
        self._target = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in self._old.items()}

    def encode(self) -> int:
        """Encode into a file and return its bytes."""
        return arc_v2.encode_shard(self._old, self._new, self._file, level=self._level, workers=self._workers).nbytes

    def decode(self) -> int:
        """Decode the file into verified changes, and return the bytes of ranges and values."""
        total = 0
        with open_shard(self._file) as delta:
            for change in arc_v2.decode_shard(delta, self._old, workers=self._workers, scratch=self._folder):
                total += change.ranges.nbytes + len(change.data)
        return total

    def rebuild(self) -> None:
        """Decode the file and make the new tensors: copy the base, write the changes over it."""
        with open_shard(self._file) as delta:
            for change in arc_v2.decode_shard(delta, self._old, workers=self._workers, scratch=self._folder):
                target = self._target[change.name]
                np.copyto(target, np.frombuffer(self._old[change.name].data, np.uint8))
                change.write_into(target)

    def check(self) -> None:
        """Check that `rebuild` made the new tensors, byte for byte."""
        for name, target in self._target.items():
            if target.data != self._new[name].data:
                raise AssertionError(f"{name} differs")


def measure_machine(old: Weights, new: Weights) -> dict[str, float]:
    """Return bytes per second of a plain XOR pass and of memcpy, one thread, into memory that is already there."""
    total = sum(value.nbytes for value in old.values())
    targets = {name: np.zeros_like(value) for name, value in old.items()}
    xor = measure(lambda: [np.bitwise_xor(old[name], new[name], out=targets[name]) for name in old])
    copy = measure(lambda: [np.copyto(targets[name], old[name]) for name in old])
    return {"xor_bytes_per_s": total / xor, "memcpy_bytes_per_s": total / copy}


def measure_fraction(old: Weights, fraction: float, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of one fraction; rounds of both packages take turns, the best round counts."""
    total = sum(value.nbytes for value in old.values())
    new = move_weights(old, fraction)
    ours = Ours(old, new, folder, arguments.level, arguments.workers)
    reference = Reference(old, new, folder)
    ours_bytes, reference_bytes = ours.encode(), reference.save()
    kept = ours.decode()
    ours.rebuild()
    ours.check()
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    machine: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for threads in REFERENCE_THREADS:
            note(f"reference_encode_{threads}", measure(lambda threads=threads: reference.encode(threads)))
            note("encode", measure(ours.encode))
            note(f"reference_decode_{threads}", measure(lambda threads=threads: reference.decode(threads)))
            note("decode", measure(ours.decode))
            note("rebuild", measure(ours.rebuild))
        for name, value in measure_machine(old, new).items():
            machine[name] = max(machine.get(name, 0.0), value)
    encode_threads, decode_threads = (
        min(REFERENCE_THREADS, key=lambda threads: best[f"reference_{step}_{threads}"]) for step in ("encode", "decode")
    )
    reference_encode, reference_decode = (
        best[f"reference_encode_{encode_threads}"],
        best[f"reference_decode_{decode_threads}"],
    )
    return {
        "fraction": fraction,
        "tensor_bytes": total,
        "delta_bytes": ours_bytes,
        "size_ratio": ours_bytes / reference_bytes,
        "changes_frac": kept / total,
        "encode_mb_per_s": total / best["encode"] / 1e6,
        "decode_mb_per_s": total / best["decode"] / 1e6,
        "rebuild_mb_per_s": total / best["rebuild"] / 1e6,
        "reference_encode_mb_per_s": total / reference_encode / 1e6,
        "reference_decode_mb_per_s": total / reference_decode / 1e6,
        "reference_encode_threads": encode_threads,
        "reference_decode_threads": decode_threads,
        "encode_ratio": reference_encode / best["encode"],
        "decode_ratio": reference_decode / best["decode"],
        "rebuild_ratio": reference_decode / best["rebuild"],
        "encode_of_xor": total / best["encode"] / machine["xor_bytes_per_s"],
        "decode_of_memcpy": total / best["decode"] / machine["memcpy_bytes_per_s"],
        "encode_peak_frac": measure_peak(ours.encode) / total,
        "decode_peak_frac": measure_peak(ours.decode) / total,
        **machine,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one fraction for a person."""
    print(
        f"{100 * row['fraction']:.1f} % changed, delta {100 * row['delta_bytes'] / row['tensor_bytes']:.2f} % of the "
        f"tensors, {row['size_ratio']:.3f} of the reference's size\n"
        f"  encode  {row['encode_mb_per_s']:7.0f} MB/s = {row['encode_ratio']:.2f} x reference "
        f"({row['reference_encode_mb_per_s']:.0f} with {row['reference_encode_threads']} threads), "
        f"{row['encode_of_xor']:.2f} of an XOR pass, peak {100 * row['encode_peak_frac']:.1f} % of the tensors\n"
        f"  decode  {row['decode_mb_per_s']:7.0f} MB/s = {row['decode_ratio']:.2f} x reference "
        f"({row['reference_decode_mb_per_s']:.0f} with {row['reference_decode_threads']} threads), "
        f"{row['decode_of_memcpy']:.2f} of memcpy, peak {100 * row['decode_peak_frac']:.1f} %\n"
        f"  rebuild {row['rebuild_mb_per_s']:7.0f} MB/s = {row['rebuild_ratio']:.2f} x reference",
        flush=True,
    )


def find_misses(rows: list[dict[str, Any]]) -> list[str]:
    """Return which wanted figures were not met; speed is asked for where 1 % or less changed."""
    misses = []
    for row in rows:
        checks = [
            ("delta size", row["size_ratio"] <= WANTED_SIZE),
            ("encode memory", row["encode_peak_frac"] < WANTED_MEMORY),
            ("decode memory", row["decode_peak_frac"] < WANTED_MEMORY),
        ]
        if row["fraction"] <= 0.01:
            checks += [
                ("encode speed", row["encode_ratio"] >= WANTED_ENCODE),
                ("decode speed", row["decode_ratio"] >= WANTED_DECODE),
            ]
        misses += [f"{name} at {100 * row['fraction']:.1f} %" for name, is_met in checks if not is_met]
    return misses


def main() -> int:
    """Run, print, and return 1 when a wanted figure was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the tensors")
    parser.add_argument("--rounds", type=int, default=1, help="each round runs ours once per reference setting")
    parser.add_argument("--level", type=int, default=arc_v2.DEFAULT_LEVEL)
    parser.add_argument("--workers", type=int, default=choose_workers(None))
    parser.add_argument("--fractions", type=float, nargs="+", default=list(FRACTIONS))
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    arguments = parser.parse_args()
    old = make_weights(int(arguments.gib * (1 << 30)))
    total = sum(value.nbytes for value in old.values())
    print(
        f"{total / (1 << 30):.2f} GiB of bf16 in {len(old)} tensors, {arguments.workers} workers, "
        f"level {arguments.level}, Adler-32 of {ADLER32_PACKAGE}",
        flush=True,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for fraction in arguments.fractions:
            rows.append(measure_fraction(old, fraction, Path(folder), arguments))
            print_row(rows[-1])
    misses = find_misses(rows)
    print(f"missed: {', '.join(misses)}" if misses else "all wanted figures met")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "misses": misses}, indent=1) + "\n")
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
