r"""Answers inside text: the last `\boxed{...}`, and the part that follows the model's thinking.

Owns: two pure functions on strings, shared by the math and the deepscaler verifier. Braces are balanced by counting,
because answers nest them.
"""

from __future__ import annotations

THINK_END = "</think>"
RESPONSE_MARKER = "###Response"

_OPENERS = ("\\boxed", "\\fbox")


def extract_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` or `\fbox{...}` holds, or None if there is none or it never closes."""
    start = max(text.rfind(opener) for opener in _OPENERS)
    if start < 0:
        return None
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in _OPENERS:
        return None
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : position].strip()
    return None


def extract_after_thinking(text: str) -> str | None:
    """Return the text after the last think-end tag, else after the `###Response` marker, else None."""
    if THINK_END in text:
        return text.rpartition(THINK_END)[2]
    if RESPONSE_MARKER in text:
        return text.partition(RESPONSE_MARKER)[2]
    return None
