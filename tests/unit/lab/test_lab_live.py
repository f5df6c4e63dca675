"""Following a growing run folder: nothing lost, nothing twice, whatever the reader does."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hotloop.lab.live import Cursor, LiveEvent, follow, read_new_events, read_new_lines


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_cursor_survives_being_written_and_read() -> None:
    assert Cursor.parse(str(Cursor(120, 7))) == Cursor(120, 7)


def test_anything_that_is_no_cursor_means_the_start() -> None:
    for text in ("", "12", "a-b", "-1-2", "1-", "٣-٤"):
        assert Cursor.parse(text) == Cursor()


def test_an_unfinished_line_is_not_read_until_its_newline_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, '{"round":0}\n{"rou')
    lines, was_cut = read_new_lines(path, 0)
    assert (lines, was_cut) == ([('{"round":0}', 12)], False)
    add(path, 'nd":1}\n')
    assert read_new_lines(path, 12) == ([('{"round":1}', 24)], False)


def test_a_reader_that_comes_back_gets_exactly_what_it_missed(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", '{"round":0}\n')
    events, cursor = read_new_events(tmp_path, Cursor())
    assert [event.data for event in events] == ['{"round":0}']
    add(tmp_path / "metrics.jsonl", '{"round":1}\n')
    add(tmp_path / "events.jsonl", '{"event":"saved"}\n')
    again, cursor = read_new_events(tmp_path, Cursor.parse(str(cursor)))
    assert [(event.kind, event.data) for event in again] == [
        ("metrics", '{"round":1}'),
        ("span", '{"event":"saved"}'),
    ]
    assert read_new_events(tmp_path, cursor) == ([], cursor)


def test_a_file_that_became_shorter_is_read_again_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, '{"round":0}\n{"round":1}\n')
    _, cursor = read_new_events(tmp_path, Cursor())
    path.write_text('{"round":0}\n')
    events, cursor = read_new_events(tmp_path, cursor)
    assert [event.kind for event in events] == ["reset"]
    events, _ = read_new_events(tmp_path, cursor)
    assert [event.data for event in events] == ['{"round":0}']


def test_an_event_of_state_moves_nobody_forward() -> None:
    assert LiveEvent("state", "{}").render() == "event: state\ndata: {}\n\n"
    assert LiveEvent("metrics", "{}", Cursor(5, 0)).render() == "id: 5-0\nevent: metrics\ndata: {}\n\n"


def test_a_stream_ends_only_when_the_run_has_ended_and_all_is_read(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", '{"round":0}\n')
    polls = 0

    def describe() -> tuple[str, bool]:
        nonlocal polls
        polls += 1
        if polls == 3:
            add(tmp_path / "metrics.jsonl", '{"round":1}\n')
        return ('{"state":"finished"}', True) if polls >= 3 else ('{"state":"running"}', False)

    async def collect() -> str:
        return "".join([part async for part in follow(tmp_path, Cursor(), describe, poll_s=0.001)])

    text = asyncio.run(collect())
    assert text.count("event: metrics") == 2
    assert text.count("event: state") == 2
    assert text.rstrip().endswith('event: end\ndata: {"state":"finished"}')


def test_a_stream_of_a_server_that_ends_breaks_off_without_an_end(tmp_path: Path) -> None:
    polls = iter([False, False, True])

    async def collect() -> str:
        stream = follow(tmp_path, Cursor(), lambda: ("{}", False), is_closing=lambda: next(polls), poll_s=0.001)
        return "".join([part async for part in stream])

    assert "event: end" not in asyncio.run(collect())


def test_what_is_drawn_beside_a_number_is_added_to_metrics_only(tmp_path: Path) -> None:
    add(tmp_path / "metrics.jsonl", '{"round":0}\n')
    add(tmp_path / "events.jsonl", '{"event":"saved"}\n')

    async def collect() -> str:
        stream = follow(tmp_path, Cursor(), lambda: ("{}", True), enrich=lambda _, line: line.replace("0", "7"))
        return "".join([part async for part in stream])

    text = asyncio.run(collect())
    assert '{"round":7}' in text
    assert '{"event":"saved"}' in text
