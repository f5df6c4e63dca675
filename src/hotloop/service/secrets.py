"""Secrets by name: from the environment, or from a file that only its owner can read.

Owns: where a secret is looked for and how its file must lie. Promises: a secret's text is in no message, log or repr.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from hotloop.errors import InputError


@dataclass(frozen=True, slots=True)
class Secret:
    """A named text that does not print itself."""

    name: str
    text: str = field(repr=False)


def read_secret(name: str, secrets_dir: str) -> Secret:
    """Find a secret: environment variable NAME in upper case, else `<secrets_dir>/<name>`.

    Raises:
        InputError: `secret_missing`, or `secret_readable` when others may read the file.
    """
    variable = name.upper()
    if variable in os.environ:
        return Secret(name, os.environ[variable])
    if secrets_dir:
        path = Path(secrets_dir) / name
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise InputError(
                    "secret_readable",
                    f"the secret {name} may be read by others (mode {mode:04o})",
                    where=str(path),
                    do=f"Run: chmod 600 {path}",
                )
            return Secret(name, path.read_text().strip())
    raise InputError(
        "secret_missing",
        f"the secret {name} is neither in the environment variable {variable} nor a file of secrets_dir",
        do=f"Set {variable}, or write the secret to a file with mode 0600 and name its folder in secrets_dir.",
    )


def parse_secret_object(secret: Secret) -> dict[str, object]:
    """Parse a secret that is a JSON object.

    Raises:
        InputError: `secret_malformed`, without the text.
    """
    try:
        parsed = orjson.loads(secret.text)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise InputError(
            "secret_malformed", f"the secret {secret.name} is not a JSON object", do="See docs/guides/serve.md."
        )
    return parsed
