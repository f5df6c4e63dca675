"""Where decoded pieces of one tensor go: gathered as absolute changes, or written out as the whole new tensor.

Owns: the three sinks of a decoder, and what each costs: `ChangeSink` keeps ranges and new bytes (in a spool),
`WholeSink` passes every piece of the new tensor on and keeps nothing, `BufferSink` makes the new tensor in a buffer
without a copy.

Promises: a sink feeds the new bytes to the decoder's hashers, in order, each byte once. What a `WholeSink` or a
`BufferSink` has written is not verified before the decoder returns; its caller throws it away when the decoder raises.

    difference piece, base piece -> sink -> hashers
                                     +----> ranges and new bytes, or the whole new piece
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from hotloop.snapshots.checksum import Hasher
from hotloop.snapshots.codecs.kernel import Bytes, Ranges, make_kernel
from hotloop.snapshots.codecs.spool import MEMORY_LIMIT_BYTES, Spool

# Pieces differ in how much of them changed; memory that is not touched costs nothing.
_SLACK = 1.25

WritePiece = Callable[[int, memoryview], None]
"""Takes a position, in bytes from the tensor's start, and the new bytes from there on."""


class Sink(Protocol):
    """Takes the pieces of one tensor, in order: `size` bytes from `position` on."""

    def place(self, position: int, size: int) -> Bytes | None:
        """Return where the difference of a piece must be put before `take`; None when any padded buffer will do."""

    def take(self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]) -> None:
        """Take a piece that may have changed; arguments as `Kernel.merge`, which spends `difference`."""

    def keep(self, base: Bytes, position: int, size: int, hashers: Sequence[Hasher]) -> None:
        """Take a piece that did not change."""


class _Run:
    """A spool behind a block of memory whose size is guessed from the first piece, so that most tensors need one block.

    Fresh memory costs a page fault for each 4 KiB, which is more than all else that is done with a changed word.
    """

    def __init__(self, scratch: Path | None) -> None:
        self._spool = Spool(scratch)
        self._block = np.empty(0, np.uint8)
        self._used = 0

    def append(self, data: Bytes, pieces_left: float) -> None:
        """Copy bytes to the end; `pieces_left` counts this piece, too."""
        if self._used + data.nbytes > self._block.nbytes:
            self._close_block()
            guess = min(int(data.nbytes * pieces_left * _SLACK), MEMORY_LIMIT_BYTES)
            self._block = np.empty(max(data.nbytes, guess), np.uint8)
        self._block[self._used : self._used + data.nbytes] = data
        self._used += data.nbytes

    def _close_block(self) -> None:
        self._spool.append(self._block[: self._used].data)
        self._used = 0

    def view(self) -> memoryview:
        """Return all bytes; nothing can be appended afterwards."""
        self._close_block()
        return self._spool.view()


class ChangeSink:
    """Gather the changed words of a tensor as ranges and new bytes."""

    def __init__(self, scratch: Path | None = None) -> None:
        self._ranges, self._data = _Run(scratch), _Run(scratch)
        self._kernel = make_kernel()

    def place(self, position: int, size: int) -> None:
        """See `Sink`."""

    def take(self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        found = self._kernel.merge(base, position, size, difference, hashers)
        if found is not None:
            pieces_left = (base.nbytes - position) / size
            self._ranges.append(found.ranges.reshape(-1).view(np.uint8), pieces_left)
            self._data.append(found.data, pieces_left)

    def keep(self, base: Bytes, position: int, size: int, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        for hasher in hashers:
            hasher.update(base[position : position + size].data)

    def finish(self) -> tuple[Ranges, memoryview]:
        """Return ranges [R, 2] and their new bytes."""
        return np.frombuffer(self._ranges.view(), dtype=np.int64).reshape(-1, 2), self._data.view()


class WholeSink:
    """Pass the whole new tensor on, piece by piece."""

    def __init__(self, write: WritePiece) -> None:
        self._write = write
        self._kernel = make_kernel()
        self.changed_bytes = 0
        """How many bytes differ from the base so far."""

    def place(self, position: int, size: int) -> None:
        """See `Sink`."""

    def take(self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        self.changed_bytes += self._kernel.patch(base, position, size, difference)
        self._pass_on(position, difference[:size].data, hashers)

    def keep(self, base: Bytes, position: int, size: int, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        self._pass_on(position, base[position : position + size].data, hashers)

    def _pass_on(self, position: int, new: memoryview, hashers: Sequence[Hasher]) -> None:
        for hasher in hashers:
            hasher.update(new)
        self._write(position, new)


class BufferSink:
    """Make the whole new tensor in a buffer: differences are expanded there and turned into new bytes in place."""

    def __init__(self, target: Bytes) -> None:
        self._target = target
        self._kernel = make_kernel()
        self.changed_bytes = 0
        """How many bytes differ from the base so far."""

    def place(self, position: int, size: int) -> Bytes:
        """See `Sink`."""
        return self._target[position : position + size]

    def take(self, base: Bytes, position: int, size: int, difference: Bytes, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        self.changed_bytes += self._kernel.patch(base, position, size, difference)
        for hasher in hashers:
            hasher.update(difference.data)

    def keep(self, base: Bytes, position: int, size: int, hashers: Sequence[Hasher]) -> None:
        """See `Sink`."""
        piece = self.place(position, size)
        piece[:] = base[position : position + size]
        for hasher in hashers:
            hasher.update(piece.data)
