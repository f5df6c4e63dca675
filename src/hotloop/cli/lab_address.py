"""Where the lab listens unless told otherwise: what `hotloop lab` binds and what `hotloop link` points at.

Owns: the two constants. Imports nothing, because making a link must not load a server.
"""

from __future__ import annotations

DEFAULT_PORT = 8421
DEFAULT_ADDRESS = f"http://127.0.0.1:{DEFAULT_PORT}/"
