"""The one exception tree, and the one shape of a message.

Owns: the classes that a user, a client or a caller may catch, and how they read. A message says where (the place
and the value found), why (the rule, with numbers), and what to do. The code in brackets is a stable snake_case
word with an entry in `docs/reference/errors.md`.

Promises: `str(error)` is a complete message for a person; `error.code`, `error.details` and `error.retryable` are
the same facts for a machine; `error.exit_code` is what a command exits with.

Does not do: HTTP status codes (service/) or printing (cli/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERRUPTED = 130


def render_message(code: str, why: str, *, where: str = "", do: str = "") -> str:
    """Join the parts of a message: `where: why [code]. do`."""
    head = f"{where}: " if where else ""
    tail = f" {do}" if do else ""
    return f"{head}{why} [{code}].{tail}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with an input. Several are raised together in one `InputError`."""

    code: str
    why: str
    where: str = ""
    do: str = ""

    def __str__(self) -> str:
        return render_message(self.code, self.why, where=self.where, do=self.do)


class HotloopError(Exception):
    """Base of every error that is not a bug of ours."""

    exit_code = EXIT_FAILED

    def __init__(
        self,
        code: str,
        why: str,
        *,
        where: str = "",
        do: str = "",
        details: Mapping[str, Any] | None = None,
        retryable: bool = False,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(render_message(code, why, where=where, do=do))
        self.code = code
        self.why = why
        self.where = where
        self.do = do
        self.details: dict[str, Any] = dict(details or {})
        self.retryable = retryable
        if exit_code is not None:
            self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(cls: type[HotloopError], state: dict[str, Any], args: tuple[Any, ...]) -> HotloopError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class InputError(HotloopError):
    """What a user gave cannot be used: an experiment, a data file, a flag. Holds every problem found."""

    exit_code = EXIT_BAD_INPUT

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> InputError:
        """Make one error of all problems of one input; at least one is needed."""
        first = problems[0]
        error = cls(first.code, first.why, where=first.where, do=first.do)
        error.problems = tuple(problems)
        if len(problems) > 1:
            error.args = ("\n".join(str(problem) for problem in problems),)
        return error

    problems: tuple[Problem, ...] = ()


class SnapshotError(HotloopError):
    """A snapshot, a bucket or a delta is not what it must be. `code` is a reason of the hot-load contract."""


class ServiceError(HotloopError):
    """A request to the rollout service cannot be answered."""


class VersionNotReady(ServiceError):
    """No replica serves the wanted policy version yet; retry later."""


class ReplicaLost(ServiceError):
    """A replica died or stopped answering while it held a request."""


class RunError(HotloopError):
    """A run cannot go on: a non-finite loss, a full disk, a reward that raises."""


class MissingExtra(HotloopError):
    """A command needs an optional package that is not installed."""

    exit_code = EXIT_ENVIRONMENT

    def __init__(self, needed_by: str, package: str, extra: str) -> None:
        super().__init__(
            "missing_extra",
            f"{needed_by} needs {package}, which is not installed",
            do=f"Install it with: pip install 'hotloop[{extra}]'",
        )
