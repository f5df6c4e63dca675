"""Quoting: any text is one bash word with exactly its own value."""

from __future__ import annotations

import subprocess

import pytest

from hotloop.experiment.export.shell import (
    choose_heredoc_mark,
    join_words,
    quote,
    render_array,
    render_comment,
)

NASTY = [
    "",
    " ",
    "'",
    "''",
    '"',
    "'; touch x; '",
    "$(touch x)",
    "`touch x`",
    "${IFS}",
    "$HOME",
    "a b\tc",
    "line\nbreak",
    "\r",
    "\\",
    "\\'",
    "*",
    "[0]*1+[1]*46",
    "~",
    "~root",
    "{a,b}",
    "!history",
    "#comment",
    "-n",
    "--colocate",
    "a=b",
    "a;b|c&d>e<f",
    "\x1b[31m",
    "日本語 中文",
    "\u2028",
    "%s%n",
]


@pytest.mark.parametrize("text", NASTY)
def test_bash_reads_a_quoted_text_back_as_one_equal_word(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {quote(text)}"], capture_output=True, check=True)
    assert done.stdout.decode() == text + "\0"


def test_flags_and_numbers_stay_bare_and_every_other_word_is_quoted() -> None:
    assert join_words(["--lr", "1e-6", "--top-k", "-1", "0.28", "grpo", "/data/x"]) == (
        "--lr 1e-6 --top-k -1 0.28 'grpo' '/data/x'"
    )


def test_a_nul_cannot_be_a_word() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


def test_an_array_holds_exactly_its_words() -> None:
    rows = [("--a", "x y"), ("--b",), ("'$(id)'",)]
    script = render_array("ARGS", rows) + "printf '%s\\0' \"${ARGS[@]}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == ["--a", "x y", "--b", "'$(id)'"]


def test_an_array_has_a_plain_name() -> None:
    with pytest.raises(ValueError, match="bash name"):
        render_array("A; touch x", [])


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n", "\v", "\f", "\u2028", "\x85"])
def test_a_line_break_cannot_leave_a_comment(ending: str) -> None:
    text = render_comment(f"before{ending}touch x")
    assert all(line.startswith("#") for line in text.splitlines())


def test_the_end_mark_of_a_here_document_is_no_line_of_the_text() -> None:
    assert choose_heredoc_mark("a\nb") == "HOTLOOP_END"
    assert choose_heredoc_mark("a\nHOTLOOP_END\nHOTLOOP_END_1\n") == "HOTLOOP_END_2"
