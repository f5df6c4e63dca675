"""How fast deltas are encoded and decoded, as ratios taken inside one run.

Measures, on 1 GiB of bf16 tensors shaped like a small decoder, with 0.1 %, 1 % and 3.5 % of the elements moved by one
step of bf16: `arc_v2` against the package fireworks-delta-compression with the best of several thread counts, against
a plain XOR pass and against memcpy; the size of the delta; and the peak of extra memory.

Two levels, each like for like, and both must reach the wanted ratios where 1 % or less changed:

- files: two checkpoint files to a delta file (`delta_compress_files_to_file` against `encode_directory`), and a base
  file and a delta file to a file with the new weights (`decompress_delta_into_source` against `apply_directory`).
- tensors: the same with all tensors in memory. Encode: `delta_compress_dicts` against `encode_shard`, ours still
  writing its delta to a file. Rebuild: base tensors and a delta file to new tensors, `delta_decompress_dict_from_file`
  against `rebuild_shard`. Decode: the same against `decode_shard`, which yields what a replica wants, the verified
  ranges that changed and their new bytes. The line "zstd alone" is the library's share of decoding: expanding the
  delta's frames and nothing else.

Ratios of wall time suffer when the machine does other work; `cpu` is the same ratio of CPU seconds over all threads.
The package's in-place decoder is left out: it writes over the base before it has verified anything.

Run: python benchmarks/codec.py [--gib 1] [--rounds 1] [--kernel numpy] [--json FILE]
Needs torch and fireworks-delta-compression.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.snapshots.checksum import ADLER32_PACKAGE
from hotloop.snapshots.codecs import arc_v2
from hotloop.snapshots.codecs.base import TensorBytes
from hotloop.snapshots.codecs.difference import PIECE_BYTES
from hotloop.snapshots.codecs.kernel import list_kernels, name_kernel, use_kernel
from hotloop.snapshots.codecs.parallel import choose_workers, map_in_order
from hotloop.snapshots.codecs.zstd_frame import PayloadReader
from hotloop.snapshots.offline import apply_directory, encode_directory
from hotloop.snapshots.shard import open_shard

Weights = dict[str, npt.NDArray[np.uint16]]
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 2048, 5632, 512, 40960
FILE = "model.safetensors"
REFERENCE_THREADS = (2, 4)
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


@dataclass(frozen=True)
class Timing:
    """The best of some calls, wall and CPU each for itself."""

    wall_s: float
    cpu_s: float


def measure(function: Callable[[], object]) -> Timing:
    """Return the wall seconds and the CPU seconds of all threads of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


class Timings:
    """The best timing of each step by name."""

    def __init__(self) -> None:
        self._best: dict[str, Timing] = {}

    def run(self, name: str, function: Callable[[], object], before: Callable[[], object] | None = None) -> None:
        """Time two calls in a row, each after an untimed preparation.

        In a virtual machine the first one may also pay for memory that the host has taken back since such pages
        were last in use: 0.7 s for 1 GiB of large pages on the machine where this was written. The second one shows
        the work alone, for either package.
        """
        for _ in range(2):
            if before is not None:
                before()
                os.sync()
            now = measure(function)
            old = self._best.get(name, now)
            self._best[name] = Timing(min(old.wall_s, now.wall_s), min(old.cpu_s, now.cpu_s))

    def best(self, prefix: str) -> tuple[str, Timing]:
        """Return the name with the least wall time among those that start with `prefix`, and its timing."""
        name = min((name for name in self._best if name.startswith(prefix)), key=lambda each: self._best[each].wall_s)
        return name, self._best[name]


def measure_peak(function: Callable[[], object]) -> int:
    """Return how far the process's own memory (RssAnon) rose during one call, in bytes, sampled every 2 ms."""
    # Memory that earlier calls freed but the allocator kept would hide what this one needs.
    ctypes.CDLL(None).malloc_trim(0)
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
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of the package's own making
        self._old, self._new = as_torch(old), as_torch(new)
        self._folder = folder
        self._delta, self._source = str(folder / "reference.safetensors"), folder / "source.safetensors"

    def encode(self, threads: int) -> None:
        """Encode tensors into memory."""
        from fireworks_delta_compression import delta_compress_dicts

        with open_pool(threads) as pool:
            delta_compress_dicts(self._old, self._new, "arc_v2", executor=pool)

    def encode_files(self, threads: int) -> None:
        """Encode two files into one."""
        from fireworks_delta_compression import delta_compress_files_to_file

        with open_pool(threads) as pool:
            delta_compress_files_to_file(
                src=str(self._folder / "old" / FILE),
                dst=str(self._folder / "new" / FILE),
                diff_file=self._delta,
                compression_format="arc_v2",
                executor=pool,
            )

    def count_delta_bytes(self) -> int:
        """Return the size of the delta file that `encode_files` made."""
        return os.path.getsize(self._delta)

    def decode(self, threads: int) -> None:
        """Decode the delta file into new tensors, the base being in memory."""
        from fireworks_delta_compression import delta_decompress_dict_from_file

        with open_pool(threads) as pool:
            delta_decompress_dict_from_file(
                src=dict(self._old), diff_file=self._delta, compression_format="arc_v2", executor=pool
            )

    def prepare_source(self) -> None:
        """Put a copy of the base where `decode_files` will write over it."""
        shutil.copyfile(self._folder / "old" / FILE, self._source)

    def decode_files(self, threads: int) -> None:
        """Decode the delta file and write the new file over the copy of the base."""
        from fireworks_delta_compression import decompress_delta_into_source

        with open_pool(threads) as pool:
            decompress_delta_into_source(self._delta, str(self._source), "arc_v2", pool)


@contextmanager
def open_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool."""
    with ThreadPoolExecutor(threads) as pool:
        yield pool


def as_torch(weights: Weights) -> dict[str, Any]:
    """Return the reference's view of some weights."""
    import torch

    return {name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) for name, value in weights.items()}


class Ours:
    """The codec of this repository, on the same bytes."""

    def __init__(self, old: Weights, new: Weights, folder: Path, level: int, workers: int) -> None:
        self._old, self._new = as_tensors(old), as_tensors(new)
        self._level, self._workers, self._folder = level, workers, folder
        self._file = folder / "tensors.safetensors"

    def encode(self) -> None:
        """Encode tensors into a file."""
        arc_v2.encode_shard(self._old, self._new, self._file, level=self._level, workers=self._workers)

    def decode(self) -> int:
        """Decode the file into verified changes, and return the bytes of ranges and values."""
        total = 0
        with open_shard(self._file) as delta:
            for change in arc_v2.decode_shard(delta, self._old, workers=self._workers, scratch=self._folder):
                total += change.ranges.nbytes + len(change.data)
        return total

    def expand(self) -> None:
        """Expand the file's frames with the zstd library and do nothing else: no decoder that uses it is faster."""

        def expand_one(payload: memoryview) -> None:
            piece = np.empty(PIECE_BYTES, np.uint8)
            reader = PayloadReader(payload)
            while reader.fill(piece.data):
                pass

        with open_shard(self._file) as delta:
            payloads = [delta.read(name) for name in delta.tensors]
            for _ in map_in_order(expand_one, payloads, workers=self._workers, weigh=len):
                pass

    def rebuild(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Decode the file into new tensors, in memory that is allocated here."""
        arena = np.empty(sum(tensor.nbytes for tensor in self._old.values()), np.uint8)
        ends = accumulate(tensor.nbytes for tensor in self._old.values())
        made = {
            name: arena[end - tensor.nbytes : end] for (name, tensor), end in zip(self._old.items(), ends, strict=True)
        }
        targets = {name: whole.data for name, whole in made.items()}
        with open_shard(self._file) as delta:
            for _ in arc_v2.rebuild_shard(delta, self._old, targets, workers=self._workers, scratch=self._folder):
                pass
        return made

    def clear(self) -> None:
        """Remove what the directory functions made."""
        shutil.rmtree(self._folder / "delta", ignore_errors=True)

    def encode_files(self) -> int:
        """Encode two directories into one and return the bytes of its weight files."""
        report = encode_directory(
            self._folder / "old",
            self._folder / "new",
            self._folder / "delta",
            level=self._level,
            workers=self._workers,
        )
        return report.stored_bytes

    def clear_applied(self) -> None:
        """Remove what `apply` made."""
        shutil.rmtree(self._folder / "applied", ignore_errors=True)

    def apply(self) -> None:
        """Write the new directory."""
        apply_directory(self._folder / "old", self._folder / "delta", self._folder / "applied", workers=self._workers)

    def check(self) -> None:
        """Check that `apply` and `rebuild` made the new tensors, byte for byte."""
        for name, tensor in self.rebuild().items():
            if tensor.data != self._new[name].data:
                raise AssertionError(f"{name} differs in memory")
        with open_shard(self._folder / "applied" / FILE) as made:
            for name, tensor in self._new.items():
                if made.read(name) != tensor.data:
                    raise AssertionError(f"{name} differs")


def measure_machine(old: Weights, new: Weights) -> dict[str, float]:
    """Return bytes per second of a plain XOR pass and of memcpy, one thread, into memory that is already there."""
    total = sum(value.nbytes for value in old.values())
    targets = {name: np.zeros_like(value) for name, value in old.items()}
    xor = measure(lambda: [np.bitwise_xor(old[name], new[name], out=targets[name]) for name in old])
    copy = measure(lambda: [np.copyto(targets[name], old[name]) for name in old])
    return {"xor_mb_per_s": total / xor.wall_s / 1e6, "memcpy_mb_per_s": total / copy.wall_s / 1e6}


# What is compared: name, our step, the reference's step, the ratio that is wanted where 1 % or less changed.
COMPARISONS: tuple[tuple[str, str, str, float | None], ...] = (
    ("files encode", "encode_files", "reference_encode_files", WANTED_ENCODE),
    ("files apply", "apply", "reference_decode_files", WANTED_DECODE),
    ("tensors encode", "encode", "reference_encode", WANTED_ENCODE),
    ("tensors rebuild", "rebuild", "reference_decode", WANTED_DECODE),
    ("tensors decode", "decode", "reference_decode", WANTED_DECODE),
    ("zstd alone", "expand", "reference_decode", None),
)


def run_tensor_round(timings: Timings, ours: Ours, reference: Reference) -> None:
    """Run every step in memory of ours once for each thread count of the reference, taking turns with it."""
    for threads in REFERENCE_THREADS:
        timings.run(f"reference_encode {threads}", partial(reference.encode, threads))
        timings.run("encode ", ours.encode)
        timings.run(f"reference_decode {threads}", partial(reference.decode, threads))
        timings.run("rebuild ", ours.rebuild)
        timings.run("decode ", ours.decode)
        timings.run("expand ", ours.expand)


def run_file_round(timings: Timings, ours: Ours, reference: Reference) -> None:
    """Run every step on files of ours once for each thread count of the reference, taking turns with it."""
    for threads in REFERENCE_THREADS:
        timings.run(f"reference_encode_files {threads}", partial(reference.encode_files, threads))
        timings.run("encode_files ", ours.encode_files, ours.clear)
        timings.run(
            f"reference_decode_files {threads}", partial(reference.decode_files, threads), reference.prepare_source
        )
        timings.run("apply ", ours.apply, ours.clear_applied)


def measure_fraction(old: Weights, fraction: float, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of one fraction; rounds of both packages take turns, the best round counts."""
    from safetensors.torch import save_file

    total = sum(value.nbytes for value in old.values())
    new = move_weights(old, fraction)
    for name, weights in (("old", old), ("new", new)):
        (folder / name).mkdir(exist_ok=True)
        save_file(as_torch(weights), folder / name / FILE)
    ours = Ours(old, new, folder, arguments.level, arguments.workers)
    reference = Reference(old, new, folder)
    timings = Timings()
    ours.clear()
    delta_bytes = ours.encode_files()
    reference.encode_files(REFERENCE_THREADS[0])
    # In memory first: files of a gigabyte that are still being written back slow down whoever allocates memory.
    os.sync()
    for _ in range(arguments.rounds):
        run_tensor_round(timings, ours, reference)
    for _ in range(arguments.rounds):
        run_file_round(timings, ours, reference)
    ours.check()
    ours.clear_applied()
    row: dict[str, Any] = {
        "fraction": fraction,
        "tensor_bytes": total,
        "delta_bytes": delta_bytes,
        "size_ratio": delta_bytes / reference.count_delta_bytes(),
        "changes_frac": ours.decode() / total,
        "encode_peak_frac": measure_peak(ours.encode) / total,
        "decode_peak_frac": measure_peak(ours.decode) / total,
        "apply_peak_frac": measure_peak(ours.apply) / total,
        "speed": {},
        **measure_machine(old, new),
    }
    for name, step, reference_step, _ in COMPARISONS:
        (_, mine), (chosen, theirs) = timings.best(step + " "), timings.best(reference_step + " ")
        row["speed"][name] = {
            "mb_per_s": total / mine.wall_s / 1e6,
            "reference_mb_per_s": total / theirs.wall_s / 1e6,
            "reference_threads": int(chosen.split()[-1]),
            "ratio": theirs.wall_s / mine.wall_s,
            "cpu_ratio": theirs.cpu_s / mine.cpu_s,
        }
    return row


def print_row(row: dict[str, Any]) -> None:
    """Print one fraction for a person."""
    print(
        f"{100 * row['fraction']:.1f} % of elements changed: "
        f"delta {100 * row['delta_bytes'] / row['tensor_bytes']:.3f} % of the tensors, "
        f"{row['size_ratio']:.3f} of the reference's; peak memory {100 * row['encode_peak_frac']:.1f} % to encode, "
        f"{100 * row['decode_peak_frac']:.1f} % to decode, {100 * row['apply_peak_frac']:.1f} % to apply; "
        f"XOR pass {row['xor_mb_per_s']:.0f} MB/s, memcpy {row['memcpy_mb_per_s']:.0f} MB/s"
    )
    for name, speed in row["speed"].items():
        print(
            f"  {name:<15} {speed['mb_per_s']:6.0f} MB/s = {speed['ratio']:.2f} x reference "
            f"({speed['reference_mb_per_s']:.0f} with {speed['reference_threads']} threads), "
            f"cpu {speed['cpu_ratio']:.2f} x, {speed['mb_per_s'] / row['xor_mb_per_s']:.2f} of XOR, "
            f"{speed['mb_per_s'] / row['memcpy_mb_per_s']:.2f} of memcpy",
            flush=True,
        )


def find_misses(rows: list[dict[str, Any]]) -> list[str]:
    """Return which wanted figures were not met."""
    misses = []
    for row in rows:
        checks = [
            ("delta size", row["size_ratio"] <= WANTED_SIZE),
            ("encode memory", row["encode_peak_frac"] < WANTED_MEMORY),
            ("decode memory", row["decode_peak_frac"] < WANTED_MEMORY),
            ("apply memory", row["apply_peak_frac"] < WANTED_MEMORY),
        ]
        if row["fraction"] <= 0.01:
            checks += [
                (f"{name} speed", row["speed"][name]["ratio"] >= wanted)
                for name, _, _, wanted in COMPARISONS
                if wanted is not None
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
    parser.add_argument("--kernel", choices=list_kernels(), default=name_kernel(), help="inner loops to use")
    arguments = parser.parse_args()
    use_kernel(arguments.kernel)
    old = make_weights(int(arguments.gib * (1 << 30)))
    total = sum(value.nbytes for value in old.values())
    print(
        f"{total / (1 << 30):.2f} GiB of bf16 in {len(old)} tensors, {arguments.workers} workers, "
        f"level {arguments.level}, {name_kernel()} kernel, Adler-32 of {ADLER32_PACKAGE}",
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
