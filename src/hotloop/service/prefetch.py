"""A hint: bring what exists of a snapshot into the node's cache.

Promises: never verifies, stages or installs; errors are only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hotloop.errors import HotloopError
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.foreign import Hints
from hotloop.snapshots.reader import SnapshotReader

logger = logging.getLogger(__name__)


def prefetch(reader: SnapshotReader, cache: Cache, identity: str, files: Sequence[str], hints: Hints) -> None:
    """Fetch the named files of a snapshot, or all of them."""
    try:
        info = reader.find(identity, hints)
        for name, file in info.files.items() if info is not None else ():
            if not files or name in files:
                cache.fetch(file)
    except HotloopError as error:
        logger.warning("prefetch of %s: %s", identity, error)
