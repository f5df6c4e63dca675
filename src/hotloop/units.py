"""Formatting of quantities. Bytes are integers and seconds are floats; GiB and minutes exist only when shown."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: int) -> str:
    """Write a byte count with a binary unit and three significant digits, such as `75.6 GiB`."""
    sign = "-" if num_bytes < 0 else ""
    value = float(abs(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{sign}{int(value)} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{sign}{value:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Write a duration as a person says it: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(value: int) -> str:
    """Write a count with a decimal suffix and three significant digits, such as `0.10 M` or `29.9 B`."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.{2 if abs(scaled) < 10 else 1}f} {suffix}"
    return str(value)
