"""The built-in tokenizer as a snapshot holds it: with its chat template."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hotloop.models.tokenizer import Tokenizer, build_char_tokenizer, open_tokenizer


def open_builtin_tokenizer() -> Tokenizer:
    """Write its files and open them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in build_char_tokenizer().items():
            (Path(folder) / name).write_bytes(data)
        return open_tokenizer(folder)
