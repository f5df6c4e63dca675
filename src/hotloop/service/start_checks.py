"""What no replica could get over, told before the first one is started.

Owns: checks of a deployment's settings that need this machine: tokenizer, engine, device. Without them a replica would
fail again and again behind a gateway that stays up and is never ready.
Promises: every problem is told at once; torch is not loaded into this process.
Does not do: anything that may change while the deployment runs, such as the bucket's content or a server that is down.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from hotloop.engines.remote import RemoteServer
from hotloop.errors import InputError, MissingExtra, Problem
from hotloop.models.tokenizer import open_tokenizer
from hotloop.service.config import DeploymentConfig, EngineConfig
from hotloop.snapshots.layout import parse_bucket_url

_DEVICE_BUDGET_S = 120.0
"""Loading torch and asking its driver takes seconds; a driver that hangs longer would hang every replica too."""


def check_start(config: DeploymentConfig) -> None:
    """Refuse settings with which no replica can ever become ready.

    Raises:
        InputError: `tokenizer_not_found`, `tokenizer_unreadable`, `engine_settings`, `engine_address`.
        MissingExtra: the engine or the tokenizer needs a package that is not installed.
    """
    problems: list[Problem] = []
    for check in (_check_tokenizer, _check_engine):
        try:
            check(config)
        except InputError as error:
            problems.extend(error.problems or [Problem(error.code, error.why, error.where, error.do)])
    if problems:
        raise InputError.of(problems)


def find_missing_bucket(config: DeploymentConfig) -> str:
    """Return the address of a `file://` bucket whose directory is not there yet; else an empty text.

    It may still be made by the first publish, so it is worth a warning and no refusal.
    """
    parsed = parse_bucket_url(config.bucket)
    return str(parsed) if parsed.scheme == "file" and not Path(parsed.prefix).is_dir() else ""


def _check_tokenizer(config: DeploymentConfig) -> None:
    if not config.tokenizer:
        return
    try:
        open_tokenizer(config.tokenizer)
    except InputError as error:
        raise InputError(error.code, error.why, where=f"tokenizer: {error.where}", do=error.do) from None


def _check_engine(config: DeploymentConfig) -> None:
    engine = config.engine
    if engine.kind in ("sglang", "vllm"):
        RemoteServer(engine.url, name=engine.kind)
    elif engine.kind == "torch":
        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("the embedded engine", "torch", "torch")
        fault = _find_device_fault(engine)
        if fault:
            raise InputError("engine_settings", fault, where=f"engine.device = {engine.device}", do="Use cpu.")


def _find_device_fault(engine: EngineConfig) -> str:
    if engine.device == "cpu":
        return ""
    ask = [sys.executable, "-m", "hotloop.engines.torch.device", engine.device]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=_DEVICE_BUDGET_S, check=False)
    except subprocess.TimeoutExpired:
        return f"torch did not say within {_DEVICE_BUDGET_S:.0f} s whether it can use it"
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return f"torch cannot be asked for it ({last[:200]})"
    return answer.stdout.strip()
