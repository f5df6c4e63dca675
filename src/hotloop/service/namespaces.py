"""Prompt-cache namespaces: which requests may reuse whose prefixes after a swap. Pure.

Owns: the namespace of a request, and what a swap does to it.
Promises: a block computed under weights A is never matched under a namespace made after A, except by the two opt-ins
(`new_session` for known sessions, `none` for everyone); a rewind always starts a new namespace.
Source: hot_load.md section 7.
"""

from __future__ import annotations

from collections import OrderedDict

from hotloop.service.hot_load_api import ResetPromptCache

MAX_SESSIONS = 100_000
"""Sessions remembered; the least recently used one then counts as new."""


class Namespaces:
    """The namespaces of one replica."""

    def __init__(self) -> None:
        self._epoch = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def on_swap(self, reset: ResetPromptCache, *, is_rewind: bool) -> None:
        """Note that the weights changed."""
        if is_rewind or reset == "all":
            self._epoch += 1
            self._sessions.clear()
        elif reset == "new_session":
            self._epoch += 1

    def namespace_of(self, session_id: str, salt: str) -> str:
        """Return the namespace of a request; the client's salt divides it further."""
        epoch = self._epoch
        if session_id:
            epoch = self._sessions.setdefault(session_id, self._epoch)
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return f"{epoch}/{salt}"
