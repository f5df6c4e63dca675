"""`hotloop publish`: put snapshots into a bucket and look after them.

Owns: flags, progress bars and what is printed. Exit codes: 2 for a refusal, 3 for storage that refused or cannot be
reached, 4 when a check of `verify` failed.

Does not do: the work itself (snapshots/).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotloop.snapshots.progress import OnProgress
    from hotloop.snapshots.publish_job import Published
    from hotloop.snapshots.publisher import Publisher
    from hotloop.snapshots.reader import SnapshotReader

EXIT_VERIFY_FAILED = 4
STORAGE_BUDGET_S = 60.0
"""A person waits at the other end, so a store that is down is reported sooner than in a service."""


@click.group("publish")
def command() -> None:
    """Publish snapshots into a bucket and look after them.

    A bucket is s3://bucket/run, gs://bucket/run or file:///dir, one per training run. Credentials come from the
    usual AWS chain; --bucket defaults to ROLLOUT_BUCKET.
    """


def _bucket_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--bucket",
        "bucket_url",
        envvar="ROLLOUT_BUCKET",
        required=True,
        show_envvar=True,
        help="Where the snapshots lie.",
    )(function)


def _publish_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        click.option(
            "--dir",
            "directory",
            required=True,
            type=click.Path(path_type=Path),
            help="Checkpoint directory: config.json, safetensors, tokenizer.",
        ),
        _bucket_option,
        click.option("--identity", required=True, help="Name of the snapshot, such as step000042."),
        click.option("--policy-version", required=True, type=click.IntRange(min=0), help="Rises with each snapshot."),
        click.option("--workers", default=8, show_default=True, type=click.IntRange(min=1), help="Uploads at once."),
        click.option("--startup", is_flag=True, help="Let new replicas load it."),
        click.option("--dry-run", is_flag=True, help="Do everything but write."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command("full")
@_publish_options
@click.option(
    "--max-shard-size", type=click.IntRange(min=1), help="Cut the weights into new files of at most this many bytes."
)
def full(
    directory: Path,
    bucket_url: str,
    identity: str,
    policy_version: int,
    workers: int,
    startup: bool,
    dry_run: bool,
    max_shard_size: int | None,
) -> None:
    """Publish a checkpoint directory as an anchor."""
    from hotloop.snapshots.checkpoint import open_checkpoint

    with _open_publisher(bucket_url, is_dry_run=dry_run, workers=workers) as publisher:
        published = publisher.publish(
            open_checkpoint(directory, max_shard_bytes=max_shard_size),
            identity,
            policy_version,
            kind="anchor",
            is_dry_run=dry_run,
        )
    _print_published(published, dry_run)
    if startup:
        _set_startup(publisher, identity, dry_run)


@command.command("delta")
@_publish_options
@click.option("--parent", help="Snapshot to take the difference from; default the newest, unless --base-dir is given.")
@click.option(
    "--base-dir",
    type=click.Path(path_type=Path),
    help="Directory with the parent's content; without it the parent is rebuilt from the bucket.",
)
@click.option(
    "--format",
    "delta_format",
    type=click.Choice(["arc_v2", "slime"]),
    default="arc_v2",
    show_default=True,
    help="arc_v2 for Fireworks and Baseten deployments, slime for slime, Miles and cwtrain.",
)
@click.option("--level", type=click.IntRange(1, 22), help="zstd level. [default: 3 for arc_v2, 1 for slime]")
@click.option(
    "--full-every",
    default=25,
    show_default=True,
    type=click.IntRange(min=0),
    help="Publish an anchor instead as the Nth snapshot since the last one; 0 for never.",
)
@click.option("--skip-empty", is_flag=True, help="Publish nothing when no byte changed.")
def delta(
    directory: Path,
    bucket_url: str,
    identity: str,
    policy_version: int,
    workers: int,
    startup: bool,
    dry_run: bool,
    parent: str | None,
    base_dir: Path | None,
    delta_format: str,
    level: int | None,
    full_every: int,
    skip_empty: bool,
) -> None:
    """Publish a checkpoint directory as the difference from a snapshot in the bucket."""
    from hotloop.errors import InputError
    from hotloop.snapshots.codecs.base import ARC_V2_FORMATS, SLIME_FORMATS

    if base_dir is not None and parent is None:
        raise InputError(
            "parent_required",
            "--base-dir needs --parent, because a directory does not say which snapshot it is",
            where="publish delta",
            do="Add --parent IDENTITY.",
        )
    is_slime = delta_format == "slime"
    with _open_publisher(
        bucket_url,
        is_dry_run=dry_run,
        workers=workers,
        full_every=full_every,
        formats=SLIME_FORMATS if is_slime else ARC_V2_FORMATS,
        level=level if level is not None else 1 if is_slime else 3,
    ) as publisher:
        published = publisher.publish(
            directory,
            identity,
            policy_version,
            kind="delta",
            parent=parent,
            base_dir=base_dir,
            skip_empty=skip_empty,
            is_dry_run=dry_run,
        )
    _print_published(published, dry_run)
    if startup and not published.is_skipped:
        _set_startup(publisher, identity, dry_run)


@command.command("startup")
@_bucket_option
@click.option("--identity", required=True, help="Snapshot that new replicas load.")
def startup_command(bucket_url: str, identity: str) -> None:
    """Name the snapshot that new replicas load."""
    with _open_publisher(bucket_url, makes_bucket=False) as publisher:
        _set_startup(publisher, identity, is_dry_run=False)


@command.command("verify")
@_bucket_option
@click.option("--identity", help="Only this snapshot; default all.")
@click.option("--deep", is_flag=True, help="Rebuild each chain and check every tensor.")
@click.pass_context
def verify(context: click.Context, bucket_url: str, identity: str | None, deep: bool) -> None:
    """Check that snapshots are complete and have their digests; exit 4 if one is not."""
    from hotloop.snapshots.verify import verify_bucket

    with _show_progress() as on_progress:
        reports = verify_bucket(_open_reader(bucket_url), identity=identity, is_deep=deep, on_progress=on_progress)
    for report in reports:
        click.echo(report.render())
    if not reports:
        click.echo("no snapshots")
    if any(not report.is_sound for report in reports):
        context.exit(EXIT_VERIFY_FAILED)


@command.command("list")
@_bucket_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(bucket_url: str, as_json: bool) -> None:
    """List the snapshots of a bucket."""
    from hotloop.snapshots.verify import list_rows

    startup, rows = list_rows(_open_reader(bucket_url))
    if as_json:
        click.echo(json.dumps({"startup": startup, "snapshots": [row.as_dict() for row in rows]}, indent=2))
        return
    if not rows:
        click.echo("no snapshots")
        return
    from hotloop.units import format_bytes

    cells = [("identity", "kind", "parent", "chain", "version", "size", "complete")]
    for row in rows:
        cells.append(
            (
                row.identity + (" *" if row.identity == startup else ""),
                row.kind or "-",
                row.parent or "-",
                "-" if row.chain_length is None else str(row.chain_length),
                "-" if row.policy_version is None else str(row.policy_version),
                format_bytes(row.stored_bytes),
                "yes" if row.is_complete else f"no: {row.reason}",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if startup:
        click.echo(f"* STARTUP_SNAPSHOT names {startup}")


@command.command("prune")
@_bucket_option
@click.option("--keep-anchors", required=True, type=int, help="How many of the newest anchors stay.")
@click.option("--keep-from", help="Keep this snapshot and all later ones.")
@click.option("--protect", multiple=True, help="Keep this snapshot and its chain; may be given again.")
@click.option("--yes", is_flag=True, help="Delete; without it only the plan is shown.")
def prune(bucket_url: str, keep_anchors: int, keep_from: str | None, protect: tuple[str, ...], yes: bool) -> None:
    """Delete old snapshots; without --yes only show which."""
    from hotloop.snapshots.reader import Incomplete
    from hotloop.snapshots.retention import delete_snapshots, plan_prune
    from hotloop.snapshots.verify import find_startup

    reader = _open_reader(bucket_url)
    found = [info for info in reader.list_snapshots() if not isinstance(info, Incomplete)]
    plan = plan_prune(
        [info.link for info in found],
        keep_anchors=keep_anchors,
        keep_from=keep_from,
        startup=find_startup(reader),
        protected=protect,
    )
    for identity, why in sorted(plan.keep.items()):
        click.echo(f"keep    {identity}  ({why})")
    for identity in plan.delete:
        click.echo(f"delete  {identity}")
    if not plan.delete:
        click.echo("nothing to delete")
    elif yes:
        deleted = delete_snapshots(reader.bucket, plan.delete, retry=reader.retry)
        click.echo(f"deleted {len(plan.delete)} snapshots, {deleted} objects")
    else:
        click.echo("nothing was deleted; add --yes to delete")


@command.command("rollback")
@click.option("--url", envvar="HOTLOOP_URL", required=True, show_envvar=True, help="Address of the deployment.")
@click.option("--identity", required=True, help="Snapshot to go back to.")
def rollback(url: str, identity: str) -> None:
    """Move a deployment back to an older snapshot."""
    from hotloop.snapshots.rollback import post_rollback

    answer = post_rollback(url, identity, api_key=os.environ.get("HOTLOOP_API_KEY", ""))
    click.echo(f"accepted {answer.get('identity', identity)} policy_version={answer.get('policy_version')}")


def _open_reader(bucket_url: str) -> SnapshotReader:
    from hotloop.snapshots.bucket_access import open_bucket_to_read
    from hotloop.snapshots.reader import SnapshotReader
    from hotloop.snapshots.retry import RetryPolicy

    return SnapshotReader(open_bucket_to_read(bucket_url), retry=RetryPolicy(budget_s=STORAGE_BUDGET_S))


@contextmanager
def _open_publisher(
    bucket_url: str, *, is_dry_run: bool = False, makes_bucket: bool = True, **settings: Any
) -> Iterator[Publisher]:
    from hotloop.snapshots.bucket_access import open_bucket, open_bucket_to_read, open_bucket_to_rehearse
    from hotloop.snapshots.publish_job import PublishSettings
    from hotloop.snapshots.publisher import Publisher
    from hotloop.snapshots.retry import RetryPolicy

    open_it = open_bucket_to_rehearse if is_dry_run else open_bucket if makes_bucket else open_bucket_to_read
    with _show_progress() as on_progress:
        yield Publisher(
            open_it(bucket_url),
            PublishSettings(keeps_parent=False, on_progress=on_progress, **settings),
            retry=RetryPolicy(budget_s=STORAGE_BUDGET_S),
        )


@contextmanager
def _show_progress() -> Iterator[OnProgress]:
    """Draw a bar on a terminal, gone when the context ends; say nothing in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from hotloop.snapshots.progress import Progress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bars = Bars(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    tasks: dict[tuple[str, str], Any] = {}

    def on_progress(progress: Progress) -> None:
        key = (progress.identity, progress.stage)
        if key not in tasks:
            tasks[key] = bars.add_task(" ".join(part for part in (progress.identity, progress.stage) if part))
        bars.update(tasks[key], completed=progress.bytes_done, total=progress.bytes_total or None)

    with bars:
        yield on_progress


def _set_startup(publisher: Publisher, identity: str, is_dry_run: bool) -> None:
    if is_dry_run:
        click.echo(f"would let STARTUP_SNAPSHOT name {identity}")
        return
    publisher.set_startup(identity)
    click.echo(f"STARTUP_SNAPSHOT names {identity}")


def _print_published(published: Published, is_dry_run: bool) -> None:
    from hotloop.units import format_bytes

    if published.is_skipped:
        click.echo(f"skipped {published.identity}: no byte changed since {published.parent}")
        return
    verb = "would publish" if is_dry_run else "found" if published.was_there else "published"
    click.echo(f"{verb} {published.kind} {published.identity} policy_version={published.policy_version}")
    if published.kind == "delta":
        ratio = published.full_bytes / published.stored_bytes if published.stored_bytes else 0.0
        click.echo(
            f"parent {published.parent}, {published.num_changed} of {published.num_tensors} tensors changed,"
            f" {100 * published.changed_frac:.3g} % of bytes;"
            f" {format_bytes(published.stored_bytes)} for {format_bytes(published.full_bytes)} ({ratio:.1f}x smaller)"
        )
    else:
        click.echo(f"{published.num_tensors} tensors, {format_bytes(published.stored_bytes)}")
