"""`hotloop hot-load`: ask a deployment for a snapshot and watch it load."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotloop.service.client import Client

_URL = click.option("--url", default="", envvar="HOTLOOP_URL", help="The deployment's address; default HOTLOOP_URL.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
MAX_WAIT_S = 7 * 24 * 3600.0
"""A week: longer than any load, and short enough for every clock."""


def _refuse_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    """A range lets nan through, since it compares with nothing, and a wait of nan seconds would never end."""
    if math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", context, option)
    return value


@click.group()
def command() -> None:
    """Ask a deployment for a snapshot and watch it load."""


def _call(url: str, work: Callable[[Client], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    from hotloop.service.client import Client

    async def run() -> dict[str, Any]:
        async with Client(url) as client:
            return await work(client)

    return asyncio.run(run())


def _print_json(answer: dict[str, Any]) -> None:
    import orjson

    click.echo(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())


def _print_status(answer: dict[str, Any]) -> None:
    queued = answer["queued_snapshot_identity"]
    click.echo(
        f"{'ready' if answer['ready'] else 'not ready'}; target {answer['target_snapshot_identity']}"
        + (f", then {queued}" if queued else "")
    )
    for replica in answer["replicas"]:
        loading = replica["loading_state"]
        line = (
            f"  {replica['replica_id']}: serves {replica['current_snapshot_identity']} "
            f"(version {replica['policy_version']}), {loading['stage']}"
        )
        if loading["stage"] in ("downloading", "verifying"):
            line += f" {loading['bytes_done']}/{loading['bytes_total']} bytes"
        if loading["stage"] == "error":
            line += f" on {loading['target_snapshot_identity']}: {loading['message']}"
        click.echo(line)


@command.command()
@_URL
@_JSON
def status(url: str, as_json: bool) -> None:
    """Show what every replica serves and loads."""
    answer = _call(url, lambda client: client.status())
    (_print_json if as_json else _print_status)(answer)


@command.command()
@click.argument("identity")
@click.option("--wait", is_flag=True, help="Wait until every replica serves it; fail if one cannot.")
@click.option("--allow-rewind", is_flag=True, help="Also go back to a lower policy version.")
@click.option("--transition", type=click.Choice(["ASYNC", "SYNC"]), help="How requests in flight meet the swap.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, max=MAX_WAIT_S),
    callback=_refuse_nan,
    default=600.0,
    show_default=True,
    help="Seconds that --wait waits.",
)
@_URL
@_JSON
def load(
    identity: str, wait: bool, allow_rewind: bool, transition: str | None, timeout_s: float, url: str, as_json: bool
) -> None:
    """Ask for IDENTITY."""
    from hotloop.snapshots.layout import check_identity

    check_identity(identity)
    fields: dict[str, Any] = {"allow_rewind": True} if allow_rewind else {}
    if transition:
        fields["transition"] = transition
    answer = _call(url, lambda client: client.load(identity, wait=wait, timeout_s=timeout_s, **fields))
    if as_json:
        _print_json(answer)
    elif wait:
        _print_status(answer)
    else:
        how = "already served" if answer["already_current"] else "queued" if answer["queued"] else "accepted"
        click.echo(f"{identity}: {how}; watch it with hotloop hot-load status")


@command.command()
@click.option("--clear", is_flag=True, help="Forget the history; the next load must then be an anchor.")
@_URL
@_JSON
def ledger(clear: bool, url: str, as_json: bool) -> None:
    """Show the history of loads, newest first."""
    answer = _call(url, lambda client: client.clear_ledger() if clear else client.ledger())
    if as_json or clear:
        _print_json(answer)
        return
    for entry in answer["entries"]:
        click.echo(
            f"{entry['requested_at']}  {entry['identity']}  {entry['kind']}  version {entry['policy_version']}  "
            f"{entry['state']} {entry['reason']}".rstrip()
        )


@command.command()
@_URL
def cancel(url: str) -> None:
    """Cancel the waiting load, or the active one before it is installed."""
    answer = _call(url, lambda client: client.cancel())
    click.echo(f"canceled {answer['canceled']}")
