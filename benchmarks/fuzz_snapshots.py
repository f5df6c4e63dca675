"""Mutate shards, frames, indexes and manifests, and check that each ends well: decoded and equal, or refused by name.

Owns: mutations drawn from a seed, and the verdict on one mutated input. A verdict is "same" (the mutation did not
matter: the decoded tensors are right), "collision" (other bytes with the Adler-32 that the file states, which no reader
of this format can find without the manifest's SHA-256), or the reason code of a `SnapshotError`. Anything else is a
finding, printed with its seed: another exception, bytes that do not fit their checksum, a changed base, a case that
does not end, or a shard that is decoded to changes and rebuilt as whole tensors with different outcomes.

Targets: `header` (length and JSON of a delta shard), `frame` (payload bytes), `overwrite` (payload of that encoding),
`index` (a slime index), `plain_index` (that of a bucket directory) and `manifest` (`snapshot.json`). Reproduce one
case with --target, --seed and --count 1.

Run: python benchmarks/fuzz_snapshots.py [--count 1000000] [--seed 0] [--target header] [--kernel numpy] [--atheris]
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hotloop.errors import SnapshotError
from hotloop.snapshots.codecs import arc_v2, xor_zstd
from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, DeltaFormats, TensorBytes
from hotloop.snapshots.codecs.kernel import list_kernels, name_kernel, use_kernel
from hotloop.snapshots.index import parse_index
from hotloop.snapshots.manifest import parse_manifest
from hotloop.snapshots.shard import LENGTH_BYTES, Shard, parse_header, parse_header_length

MEMORY_LIMIT_BYTES = 512 << 20
HANG_S = 120.0
"""For a thousand cases, which take about a second."""
INTERESTING = (0, 1, 2, 7, 8, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64)
TOKENS = (
    b"null",
    b"true",
    b"-1",
    b"1e9",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b'"U8"',
    b'"BF16"',
    b"\\u0000",
    b"NaN",
    b"..",
    b"/",
)
REASONS = frozenset(
    {
        "malformed_shard",
        "tensor_set_mismatch",
        "checksum_missing",
        "checksum_malformed",
        "checksum_mismatch",
        "decode_failed",
        "size_mismatch",
        "invalid_index",
        "unsupported_format",
        "unsupported_checksum",
        "manifest_invalid",
    }
)
OVERWRITE = DeltaFormats("zstd", "adler32", "overwrite")


class Finding(Exception):
    """A mutated input that did not end well."""


@dataclass(frozen=True)
class Corpus:
    """What is mutated: a base, the step that was taken, and its files."""

    base: dict[str, TensorBytes]
    new: dict[str, bytes]
    delta: bytes
    """An arc_v2 shard."""
    overwrite: bytes
    """A slime shard with `overwrite` payloads."""
    index: bytes
    manifest: bytes


def make_corpus() -> Corpus:
    """Return a small step: sparse, dense, unchanged, empty and 0-d tensors."""
    rng = random.Random(7)
    old = {
        "sparse": bytes(rng.randbytes(6000)),
        "dense": bytes(rng.randbytes(300)),
        "same": bytes(rng.randbytes(2000)),
        "empty": b"",
        "scalar": b"\1\2\3\4",
    }
    new = dict(old)
    changed = bytearray(old["sparse"])
    for at in rng.sample(range(6000), 60):
        changed[at] ^= rng.choice((1, 2, 3, 7, 128))
    new["sparse"] = bytes(changed)
    new["dense"] = bytes(rng.randbytes(300))
    new["scalar"] = b"\1\2\3\5"
    shapes = {"scalar": ("F32", ()), "empty": ("BF16", (0, 3))}
    base, target = (
        {
            name: TensorBytes(*shapes.get(name, ("U8", (len(data),))), memoryview(data), "model.safetensors")
            for name, data in side.items()
        }
        for side in (old, new)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        done = arc_v2.encode_shard(base, target, path, workers=1)
        delta = path.read_bytes()
        xor_zstd.encode_shard(list(new), base, target, path, formats=OVERWRITE, workers=1)
        overwrite = path.read_bytes()
    index = xor_zstd.render_index(
        {"sparse": "model-00000-of-00001.safetensors"}, version="2", base_version="1", formats=OVERWRITE
    )
    manifest = {
        "schema": 1,
        "identity": "step2",
        "kind": "delta",
        "parent": "step1",
        "anchor": "step1",
        "chain_length": 1,
        "policy_version": 2,
        "created_at": "2026-09-30T12:00:00Z",
        "producer": {"name": "hotloop", "version": "0.1.0"},
        "formats": {"compression_format": "arc_v2", "checksum_format": "alder32", "delta_encoding": "xor"},
        "model": {"config_sha256": "0" * 64},
        "files": {"model.safetensors": {"size": len(delta), "sha256": "0" * 64, "role": "weights"}},
        "tensors": {
            found.name: {
                "file": "model.safetensors",
                "dtype": base[found.name].dtype,
                "shape": list(base[found.name].shape),
                "nbytes": found.nbytes,
                "adler32": found.adler32,
                "changed": found.changed,
            }
            for found in done.tensors
        },
        "totals": {"tensors": 5, "changed": 3, "full_bytes": 8304, "stored_bytes": len(delta)},
    }
    return Corpus(base, new, delta, overwrite, json.dumps(index).encode(), json.dumps(manifest).encode())


def mutate(data: bytes, rng: random.Random, begin: int, end: int) -> bytes:
    """Return a copy with one to four changes between two positions."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = min(max(end, begin + 1), len(changed))
        at = rng.randrange(begin, end) if end > begin else begin
        kind = rng.randrange(8)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 3, 8, 64)))
        elif kind == 3:
            del changed[at : at + rng.choice((1, 2, 4, 16, 200))]
        elif kind == 4:
            del changed[at:]
        elif kind == 5:
            value = rng.choice(INTERESTING)
            text = value.to_bytes(9, "little")[: rng.choice((1, 2, 4, 8))] if rng.random() < 0.5 else b"%d" % value
            changed[at : at + len(text)] = text
        elif kind == 6:
            changed[at : at + rng.choice((0, 1, 4))] = rng.choice(TOKENS)
        else:
            size = rng.choice((1, 4, 16, 100))
            source = rng.randrange(max(1, len(changed) - size + 1))
            changed[at : at + size] = changed[source : source + size]
    return bytes(changed)


Decoder = Callable[[], Iterator[str]]


def _try_decoder(decode: Decoder) -> tuple[list[str], SnapshotError | None]:
    """Return the names of the tensors that were verified, and what refused the next one."""
    seen: list[str] = []
    try:
        seen.extend(decode())
    except SnapshotError as error:
        return seen, error
    return seen, None


def _decode_changes(delta: Shard, corpus: Corpus, formats: DeltaFormats, made: dict[str, bytearray]) -> Iterator[str]:
    codec = arc_v2 if formats.is_arc_v2 else xor_zstd
    for change in codec.decode_shard(delta, corpus.base, formats=formats, workers=1):
        change.write_into(made[change.name])
        yield change.name


def _rebuild(delta: Shard, corpus: Corpus, formats: DeltaFormats, made: dict[str, bytearray]) -> Iterator[str]:
    codec = arc_v2 if formats.is_arc_v2 else xor_zstd

    def write(name: str, position: int, data: memoryview) -> None:
        if position + len(data) > len(made[name]):
            raise Finding(f"{name!r} has {len(made[name])} bytes; {len(data)} were written at {position}")
        made[name][position : position + len(data)] = data

    for tensor in codec.rebuild_shard(delta, corpus.base, write, formats=formats, workers=1):
        yield tensor.name


def decode_shard_bytes(data: bytes, corpus: Corpus, formats: DeltaFormats) -> str:
    """Decode a shard that lies in memory, in both ways; return "same" when the result is right, else see above."""
    view = memoryview(data)
    length = parse_header_length(view[:LENGTH_BYTES], len(data), where="fuzz")
    header = parse_header(view[LENGTH_BYTES : LENGTH_BYTES + length], len(data), where="fuzz")
    delta = Shard(Path("fuzz.safetensors"), header, view)
    made = {name: bytearray(tensor.data) for name, tensor in corpus.base.items()}
    seen, refusal = _try_decoder(partial(_decode_changes, delta, corpus, formats, made))
    whole = {name: bytearray(tensor.nbytes) for name, tensor in corpus.base.items()}
    rebuilt, other_refusal = _try_decoder(partial(_rebuild, delta, corpus, formats, whole))
    if (seen, str(refusal)) != (rebuilt, str(other_refusal)):
        raise Finding(f"decoding ended in {refusal} after {seen}, rebuilding in {other_refusal} after {rebuilt}")
    if refusal is not None:
        raise refusal
    if any(made[name] != whole[name] for name in seen):
        raise Finding("decoding and rebuilding made different bytes")
    verdict = "same"
    for name in seen:
        if bytes(made[name]) == corpus.new[name]:
            continue
        # zlib's own Adler-32 is the judge of whether the codec verified what it yielded.
        stated = header.metadata[name]
        actual = zlib.adler32(made[name])
        if actual != int(stated, 16 if formats.checksum_format == "adler32" else 10):
            raise Finding(f"{name!r} decoded to bytes that its checksum does not fit")
        verdict = "collision"
    return verdict


def _header_bytes(shard: bytes) -> int:
    return LENGTH_BYTES + int.from_bytes(shard[:LENGTH_BYTES], "little")


def try_header(corpus: Corpus, rng: random.Random) -> str:
    """Mutate the header of an arc_v2 shard; its length field is put right half of the time."""
    end = _header_bytes(corpus.delta)
    text = mutate(corpus.delta[:end], rng, 0 if rng.random() < 0.2 else LENGTH_BYTES, end)
    if rng.random() < 0.5 and len(text) >= LENGTH_BYTES:
        text = (len(text) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text[LENGTH_BYTES:]
    return decode_shard_bytes(text + corpus.delta[end:], corpus, ARC_V2_FORMATS)


def _mutate_payloads(shard: bytes, rng: random.Random) -> bytes:
    """Mutate payload bytes and keep the size, so that the header still fits."""
    begin = _header_bytes(shard)
    mutated = mutate(shard, rng, begin, len(shard))[: len(shard)]
    return mutated + rng.randbytes(len(shard) - len(mutated))


def try_frame(corpus: Corpus, rng: random.Random) -> str:
    """Mutate the payloads of an arc_v2 shard."""
    return decode_shard_bytes(_mutate_payloads(corpus.delta, rng), corpus, ARC_V2_FORMATS)


def try_overwrite(corpus: Corpus, rng: random.Random) -> str:
    """Mutate the payloads of an overwrite shard."""
    return decode_shard_bytes(_mutate_payloads(corpus.overwrite, rng), corpus, OVERWRITE)


def _load(data: bytes, code: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(code, "not JSON") from error


def try_index(corpus: Corpus, rng: random.Random) -> str:
    """Mutate a slime index."""
    parsed = _load(mutate(corpus.index, rng, 0, len(corpus.index)), "invalid_index")
    if not isinstance(parsed, dict):
        return "invalid_index"
    xor_zstd.is_delta_index(parsed)
    xor_zstd.parse_index(parsed, where="fuzz")
    return "same"


def try_plain_index(corpus: Corpus, rng: random.Random) -> str:
    """Mutate the index of a bucket directory."""
    parse_index(mutate(corpus.index, rng, 0, len(corpus.index)), where="fuzz")
    return "same"


def try_manifest(corpus: Corpus, rng: random.Random) -> str:
    """Mutate a manifest."""
    parse_manifest(mutate(corpus.manifest, rng, 0, len(corpus.manifest)), identity="step2")
    return "same"


TARGETS: dict[str, Callable[[Corpus, random.Random], str]] = {
    "header": try_header,
    "frame": try_frame,
    "overwrite": try_overwrite,
    "index": try_index,
    "plain_index": try_plain_index,
    "manifest": try_manifest,
}


@contextmanager
def _alarm() -> Iterator[None]:
    """Turn a case that does not end into a finding."""

    def ring(*_: object) -> None:
        raise Finding(f"still running after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(corpus: Corpus, target: str, seed: int) -> str:
    """Return the verdict on one mutated input.

    Raises:
        Finding: when it did not end well.
    """
    try:
        verdict = TARGETS[target](corpus, random.Random(seed))
    except SnapshotError as error:
        if error.code not in REASONS:
            raise Finding(f"{target} seed {seed}: the reason {error.code!r} is not expected: {error}") from error
        return error.code
    except Exception as error:
        raise Finding(f"{target} seed {seed}: {type(error).__name__}: {error}") from error
    return verdict


def run_cases(corpus: Corpus, target: str, first_seed: int, count: int) -> Counter[str]:
    """Run many cases and count the verdicts; the base must be what it was.

    Raises:
        Finding: the first one.
    """
    before = {name: bytes(tensor.data) for name, tensor in corpus.base.items()}
    verdicts: Counter[str] = Counter()
    batch = 1000
    for begin in range(first_seed, first_seed + count, batch):
        with _alarm():
            for seed in range(begin, min(begin + batch, first_seed + count)):
                verdicts[run_case(corpus, target, seed)] += 1
    if before != {name: bytes(tensor.data) for name, tensor in corpus.base.items()}:
        raise Finding(f"{target}: the base was changed")
    return verdicts


def instrument(wrap: Callable[[object], object]) -> None:
    """Replace the functions of the modules under test by instrumented ones, wherever they were imported to."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hotloop.snapshots")]
    modules.append(sys.modules[__name__])
    wrapped: dict[int, object] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value.__module__.startswith("hotloop.snapshots"):
                setattr(module, name, wrapped.setdefault(id(value), wrap(value)))


def run_atheris(corpus: Corpus, target: str, count: int) -> None:
    """Let atheris choose the bytes, guided by the branches that they reach."""
    import atheris

    instrument(atheris.instrument_func)

    def one(data: bytes) -> None:
        try:
            if target in ("header", "frame"):
                decode_shard_bytes(data, corpus, ARC_V2_FORMATS)
            elif target == "overwrite":
                decode_shard_bytes(data, corpus, OVERWRITE)
            elif target == "manifest":
                parse_manifest(data, identity="step2")
            elif target == "plain_index":
                parse_index(data, where="fuzz")
            else:
                parsed = _load(data, "invalid_index")
                if isinstance(parsed, dict):
                    xor_zstd.parse_index(parsed, where="fuzz")
        except SnapshotError as error:
            if error.code not in REASONS:
                raise

    seeds = {"overwrite": corpus.overwrite, "index": corpus.index, "plain_index": corpus.index}
    seeds["manifest"] = corpus.manifest
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "seed").write_bytes(seeds.get(target, corpus.delta))
        atheris.Setup([sys.argv[0], f"-runs={count}", "-max_len=20000", folder], one)
        atheris.Fuzz()


def main() -> int:
    """Run, print, and return 1 on a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="mutated inputs over all targets")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case of each target")
    parser.add_argument("--target", choices=list(TARGETS), default=None, help="only this one")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; needs atheris and --target")
    parser.add_argument("--kernel", choices=list_kernels(), default=name_kernel(), help="inner loops to use")
    arguments = parser.parse_args()
    use_kernel(arguments.kernel)
    corpus = make_corpus()
    if arguments.atheris:
        run_atheris(corpus, arguments.target or "header", arguments.count)
        return 0
    limit_memory()
    print(f"{name_kernel()} kernel", flush=True)
    targets = [arguments.target] if arguments.target else list(TARGETS)
    for target in targets:
        count = -(-arguments.count // len(targets))
        began = time.perf_counter()
        try:
            verdicts = run_cases(corpus, target, arguments.seed, count)
        except Finding as finding:
            print(f"FOUND {finding}")
            return 1
        seconds = time.perf_counter() - began
        print(f"{target}: {count} cases in {seconds:.0f} s: {dict(verdicts.most_common())}", flush=True)
    print(f"no finding; peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return 0


def limit_memory() -> None:
    """Let this process grow by no more than `MEMORY_LIMIT_BYTES`; an input that needs more is a MemoryError."""
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    raise SystemExit(main())
