"""What the command line does about errors of the system and about terminals that lack characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.cli.main import main
from hotloop.errors import EXIT_ENVIRONMENT


def test_a_file_that_cannot_be_written_is_one_line_and_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file" / "schema.json"
    path.parent.write_text("not a folder")
    with pytest.raises(SystemExit) as caught:
        main(["schema", "--out", str(path)])
    assert caught.value.code == EXIT_ENVIRONMENT
    shown = capsys.readouterr().err
    assert shown == f"error: {path}: Not a directory [io_failed]. Check the path, its rights and the free space.\n"


def test_traceback_shows_where_it_arose(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NotADirectoryError):
        main(["--traceback", "schema", "--out", str(tmp_path / "file" / "schema.json")])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full_is_said_on_the_other_one() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop.cli.main", "schema"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == EXIT_ENVIRONMENT
    assert done.stderr == (
        b"error: No space left on device [io_failed]. Check the path, its rights and the free space.\n"
    )


def test_a_terminal_without_the_characters_gets_question_marks() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    code = "import sys; from hotloop.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: print('\u2581')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ascii_only}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\n?\n")
