"""`hotloop(...)` for tests, and a policy cache that belongs to the test session."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Outcome, RunCommand

from hotloop.cli.main import main


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def hotloop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, policy_cache: Path) -> RunCommand:
    monkeypatch.setenv("XDG_CACHE_HOME", str(policy_cache))

    def run(*arguments: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)

    return run
