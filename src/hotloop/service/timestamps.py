"""Times as the wire shows them: UTC, ISO 8601, milliseconds. The one place of the service that reads the wall clock."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """Return this moment, such as `2026-09-30T12:00:00.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
