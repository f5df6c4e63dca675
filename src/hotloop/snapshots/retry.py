"""Retries of storage calls: jittered, bounded by one time budget, with clock, sleep and randomness passed in.

Promises: only faults that may pass by themselves (`storage_unavailable`) are tried again; the wait grows, is jittered
over its whole range and capped; when the budget is spent the last fault is raised with the time that was given.

Does not do: deciding which fault of a store is which (storage_errors.py), resuming a transfer (transfer.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hotloop.errors import SnapshotError

T = TypeVar("T")

DEFAULT_BUDGET_S = 600.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 15.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often a storage call is tried again."""

    budget_s: float = DEFAULT_BUDGET_S
    """Seconds from the first failure until the fault is final."""
    first_wait_s: float = _FIRST_WAIT_S
    longest_wait_s: float = _LONGEST_WAIT_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in 0..1."""

    def start(self) -> Attempts:
        """Begin counting attempts of one call or transfer."""
        return Attempts(self)


class Attempts:
    """Waits between the attempts of one call; progress made resets the wait, not the budget."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._began = policy.clock()
        self._failures = 0

    def made_progress(self) -> None:
        """Note that bytes arrived since the last failure, so that the next wait is short again."""
        self._failures = 0

    def wait_or_raise(self, error: SnapshotError) -> None:
        """Sleep before the next attempt, or raise the fault when it is final or the budget is spent.

        Raises: SnapshotError: the given one, or `storage_unavailable` that names the spent budget.
        """
        if error.code != "storage_unavailable" or self.policy.budget_s <= 0:
            raise error
        spent = self.policy.clock() - self._began
        ceiling = min(self.policy.longest_wait_s, self.policy.first_wait_s * 2.0**self._failures)
        # Full jitter: many replicas that failed at once must not come back at once.
        wait = ceiling * (0.1 + 0.9 * self.policy.random())
        if spent + wait > self.policy.budget_s:
            raise SnapshotError(
                "storage_unavailable",
                f"{error.why}, and went on for {spent:.0f} s of the {self.policy.budget_s:.0f} s allowed",
                where=error.where,
                do=error.do,
                details=error.details,
                retryable=True,
                exit_code=3,
            ) from error
        self._failures += 1
        self.policy.sleep(wait)


def call_with_retries(policy: RetryPolicy, call: Callable[[], T]) -> T:
    """Run a storage call until it succeeds or its fault is final.

    Raises: SnapshotError as the call does; `storage_unavailable` after the budget.
    """
    attempts = policy.start()
    while True:
        try:
            return call()
        except SnapshotError as error:
            attempts.wait_or_raise(error)
