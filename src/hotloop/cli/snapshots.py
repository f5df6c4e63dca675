"""`hotloop snapshots`: encode, apply and inspect deltas on plain directories, without a bucket.

Owns: flags and printing. Does not do: the work (snapshots.offline, snapshots.inspection).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotloop.snapshots.inspection import Inspection
    from hotloop.snapshots.offline import ApplyReport, EncodeReport

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_MEGABYTE = 1_000_000
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_workers_option = click.option(
    "--workers", type=click.IntRange(min=1), default=None, help="Threads. Default: one per core, at most 8."
)


@click.group("snapshots")
def command() -> None:
    """Encode, apply and inspect deltas on plain directories."""


@command.command("encode")
@click.option("--base", required=True, type=_DIRECTORY, help="The parent checkpoint.")
@click.option("--new", required=True, type=_DIRECTORY, help="The checkpoint it became.")
@click.option("--out", required=True, type=_DIRECTORY, help="Where the delta goes; must not exist, or be empty.")
@click.option(
    "--format", "form", type=click.Choice(["arc_v2", "slime"]), default="arc_v2", show_default=True, help="Delta form."
)
@click.option("--checksum", default=None, help="Default: alder32 for arc_v2, xxh3-128 for slime.")
@click.option(
    "--encoding", type=click.Choice(["xor", "overwrite"]), default="xor", show_default=True, help="Slime form only."
)
@click.option("--level", type=click.IntRange(-50, 22), default=None, help="zstd level. Default: 3, slime 1.")
@click.option("--version", default="000001", show_default=True, help="Version in the index; slime form only.")
@click.option("--base-version", default="000000", show_default=True, help="Parent in the index; slime form only.")
@_workers_option
@_json_option
def encode(
    base: Path,
    new: Path,
    out: Path,
    form: str,
    checksum: str | None,
    encoding: str,
    level: int | None,
    version: str,
    base_version: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Write the delta from one checkpoint directory to another."""
    from hotloop.snapshots import offline
    from hotloop.snapshots.codecs.base import parse_formats

    report = offline.encode_directory(
        base,
        new,
        out,
        formats=parse_formats("zstd" if form == "slime" else form, checksum, encoding, where="--format"),
        level=level,
        workers=workers,
        version=version,
        base_version=base_version,
    )
    _print(_describe_encode(report), as_json)


@command.command("apply")
@click.option("--base", required=True, type=_DIRECTORY, help="The parent checkpoint.")
@click.option("--delta", required=True, type=_DIRECTORY, help="The delta directory.")
@click.option("--out", required=True, type=_DIRECTORY, help="Where the new checkpoint goes; must not exist.")
@click.option("--checksum", default=None, help="For an arc_v2 delta that does not say. Default: alder32.")
@_workers_option
@_json_option
def apply(base: Path, delta: Path, out: Path, checksum: str | None, workers: int | None, as_json: bool) -> None:
    """Build the checkpoint that a delta leads to. The base is only read; the output appears complete or not at all."""
    from hotloop.snapshots import offline
    from hotloop.snapshots.codecs.base import parse_formats

    formats = None if checksum is None else parse_formats("arc_v2", checksum, where="--checksum")
    report = offline.apply_directory(base, delta, out, formats=formats, workers=workers)
    _print(_describe_apply(report), as_json)


@command.command("inspect")
@click.argument("directory", type=_DIRECTORY)
@_json_option
def inspect(directory: Path, as_json: bool) -> None:
    """Say what a checkpoint or delta directory holds, after checking every header and frame."""
    from hotloop.snapshots.inspection import inspect_directory

    _print(_describe_inspection(inspect_directory(directory)), as_json)


def _describe_encode(report: EncodeReport) -> dict[str, Any]:
    from hotloop.snapshots.codecs.kernel import name_kernel

    tensors = [tensor for file in report.files for tensor in file.tensors]
    return {
        "compression_format": report.formats.compression_format,
        "checksum_format": report.formats.checksum_format,
        "delta_encoding": report.formats.delta_encoding,
        "tensors": len(tensors),
        "changed_tensors": sum(tensor.changed for tensor in tensors),
        "full_bytes": report.full_bytes,
        "stored_bytes": report.stored_bytes,
        "changed_bytes": report.changed_bytes,
        "changed_frac": report.changed_frac,
        "kernel": name_kernel(),
        "seconds": report.seconds,
        "mb_per_s": _compute_rate(report.full_bytes, report.seconds),
    }


def _describe_apply(report: ApplyReport) -> dict[str, Any]:
    from hotloop.snapshots.codecs.kernel import name_kernel

    return {
        "compression_format": report.formats.compression_format,
        "checksum_format": report.formats.checksum_format,
        "delta_encoding": report.formats.delta_encoding,
        "tensors": report.tensors,
        "changed_tensors": report.changed_tensors,
        "full_bytes": report.full_bytes,
        "changed_bytes": report.changed_bytes,
        "kernel": name_kernel(),
        "seconds": report.seconds,
        "mb_per_s": _compute_rate(report.full_bytes, report.seconds),
    }


def _describe_inspection(found: Inspection) -> dict[str, Any]:
    formats = found.formats
    return {
        "kind": found.kind,
        "compression_format": formats and formats.compression_format,
        "checksum_format": formats and formats.checksum_format,
        "delta_encoding": formats and formats.delta_encoding,
        "files": found.files,
        "tensors": found.tensors,
        "changed_tensors": found.changed_tensors,
        "changed_bytes": found.changed_bytes,
        "changed_frac": _compute_share(found.changed_bytes, found.full_bytes),
        "dtypes": found.dtypes,
        "full_bytes": found.full_bytes,
        "stored_bytes": found.stored_bytes,
        "seconds": found.seconds,
        "mb_per_s": _compute_rate(found.stored_bytes, found.seconds),
    }


def _compute_share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _compute_rate(num_bytes: int, seconds: float) -> float:
    """Return MB/s, a megabyte being 1,000,000 bytes."""
    return num_bytes / _MEGABYTE / seconds if seconds > 0 else 0.0


def _print(facts: dict[str, Any], as_json: bool) -> None:
    import json

    from hotloop.units import format_bytes

    if as_json:
        click.echo(json.dumps(facts, sort_keys=True))
        return
    for name, value in facts.items():
        if value is None:
            continue
        label = name.removesuffix("_bytes").replace("_frac", " share").replace("_", " ")
        if name.endswith("_bytes"):
            text = f"{format_bytes(value)} ({value} bytes)"
        elif name.endswith("_frac"):
            text = f"{100 * value:.3f} %"
        elif isinstance(value, float):
            text = f"{value:.3f}" if name == "seconds" else f"{value:.0f}"
        elif isinstance(value, dict):
            text = ", ".join(f"{key} {count}" for key, count in value.items())
        else:
            text = str(value)
        click.echo(f"{label.replace('mb per s', 'MB/s'):<20} {text}")
