"""Prompt sources: the cursor is everything, and malformed files are named line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.errors import InputError
from hotloop.loop.source import DrawSource, PromptSource, RowSource, read_tasks, split_slice
from hotloop.types import Task

TASKS = [Task(f"t{i}", f"p{i}") for i in range(7)]


def _ids(tasks: list[Task]) -> list[str]:
    return [task.task_id for task in tasks]


@pytest.mark.parametrize("make", [lambda: DrawSource(TASKS, 3), lambda: RowSource(TASKS, 3, shuffle=True)])
def test_a_restored_source_goes_on_where_the_other_stopped(make: object) -> None:
    assert callable(make)
    whole: PromptSource = make()
    expected = _ids(whole.take(20))
    first: PromptSource = make()
    head = _ids(first.take(9))
    second: PromptSource = make()
    second.restore(first.state())
    assert head + _ids(second.take(11)) == expected


def test_how_prompts_are_taken_does_not_change_them() -> None:
    one, many = DrawSource(TASKS, 5), DrawSource(TASKS, 5)
    assert _ids(one.take(12)) == [task_id for _ in range(4) for task_id in _ids(many.take(3))]


def test_another_seed_draws_other_prompts() -> None:
    assert _ids(DrawSource(TASKS, 1).take(30)) != _ids(DrawSource(TASKS, 2).take(30))


def test_every_row_comes_once_an_epoch_in_a_new_order() -> None:
    source = RowSource(TASKS, 0, shuffle=True)
    first, second = _ids(source.take(7)), _ids(source.take(7))
    assert sorted(first) == sorted(second) == [f"t{i}" for i in range(7)]
    assert first != second


def test_without_shuffle_rows_keep_their_order_across_epochs() -> None:
    source = RowSource(TASKS, 0, shuffle=False)
    assert _ids(source.take(9)) == ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t0", "t1"]
    assert source.state() == {"kind": "rows", "items": 7, "epoch": 1, "offset": 2}


@pytest.mark.parametrize("state", [{"kind": "rows", "items": 7}, {"kind": "draw", "items": 8}, {}])
def test_a_cursor_of_other_data_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(InputError, match="cursor_mismatch"):
        DrawSource(TASKS, 0).restore(state)


def test_rows_become_tasks(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"q": "1+1", "a": 2, "level": "easy"}\n\n{"q": [{"role": "user", "content": "hi"}], "a": "x"}\n{"q": "z"}\n'
    )
    tasks = read_tasks(str(path), prompt_key="q", label_key="a")
    assert tasks[0] == Task("d.jsonl:1", "1+1", "2", {"level": "easy"})
    assert tasks[1].prompt == ({"role": "user", "content": "hi"},)
    assert tasks[1].task_id == "d.jsonl:3"
    assert tasks[2].label is None


def test_every_malformed_row_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"prompt": "ok"}\n{"prompt": \n[1]\n{"question": "x"}\n{"prompt": 5}\n{"prompt": "y", "label": []}\n'
    )
    with pytest.raises(InputError) as caught:
        read_tasks(str(path), prompt_key="prompt", label_key="label")
    assert [problem.where for problem in caught.value.problems] == [f"{path}:{line}" for line in (2, 3, 4, 5, 6)]
    assert {problem.code for problem in caught.value.problems} == {"bad_row"}
    assert "has no key 'prompt' [bad_row]. Keys here: question." in str(caught.value)


def test_many_malformed_rows_are_counted_and_not_all_shown(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("nope\n" * 30)
    with pytest.raises(InputError) as caught:
        read_tasks(str(path), prompt_key="prompt", label_key="label")
    assert len(caught.value.problems) == 21
    assert "and 10 more rows" in caught.value.problems[-1].why


@pytest.mark.parametrize(
    ("path", "rows", "expected"),
    [("d@[1:3]", "", ["d:2", "d:3"]), ("d", "[-1:]", ["d:4"]), ("d@[:1]", "[2:]", ["d:1"]), ("d", "", ["d:1"] * 0)],
)
def test_slices(tmp_path: Path, path: str, rows: str, expected: list[str]) -> None:
    (tmp_path / "d").write_text('{"prompt": "x"}\n' * 4)
    tasks = read_tasks(str(tmp_path / path), prompt_key="prompt", label_key="label", rows=rows)
    assert _ids(tasks) == (expected or ["d:1", "d:2", "d:3", "d:4"])


def test_a_path_is_split_from_its_slice() -> None:
    assert split_slice("a@b/c.jsonl@[2:-1]") == ("a@b/c.jsonl", "[2:-1]")
    assert split_slice("a.jsonl") == ("a.jsonl", "")


@pytest.mark.parametrize(
    ("text", "rows", "code"),
    [("", "", "data_empty"), ('{"prompt":"x"}\n', "[5:]", "data_empty"), ("", "2", "bad_slice")],
)
def test_no_rows_is_an_error(tmp_path: Path, text: str, rows: str, code: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=code):
        read_tasks(str(path), prompt_key="prompt", label_key="label", rows=rows)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data_not_found") as caught:
        read_tasks(str(tmp_path / "none.jsonl"), prompt_key="prompt", label_key="label")
    assert caught.value.exit_code == 2


def test_a_byte_order_mark_before_the_first_row_is_not_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [task.prompt for task in read_tasks(str(path), prompt_key="prompt", label_key="label")] == ["a", "b"]
