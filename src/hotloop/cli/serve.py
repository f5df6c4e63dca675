"""`hotloop serve`: one deployment, replicas behind one address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--port", type=click.IntRange(0, 65535), help="Listen there; 0 takes a free port.")
@click.option("--host", help="Listen on this address; beyond loopback only with API keys.")
@click.option("--replicas", type=click.IntRange(0, 256), help="Replica processes to start.")
def command(config: Path, port: int | None, host: str | None, replicas: int | None) -> None:
    """Serve rollouts from replicas whose weights are hot-loaded from a bucket.

    CONFIG is a YAML file; `bucket` and `served_model_name` suffice. The first line printed is JSON with url and pid.
    """
    from hotloop.service.config import load_config
    from hotloop.service.serve import run_deployment
    from hotloop.service.start_checks import check_start, find_missing_bucket

    given = {"port": port, "host": host, "replicas": replicas}
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    deployment = load_config(config, overrides)
    check_start(deployment)
    missing = find_missing_bucket(deployment)
    if missing:
        click.echo(f"note: {missing}: there is no such directory yet; replicas wait for the first publish", err=True)
    run_deployment(deployment)
