"""Rollouts of a round as the page shows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from hotloop.errors import InputError
from hotloop.lab.rollouts import TokenText, compute_wilson, list_rounds, measure_round, read_round

PROMPT_IDS, SORTED, WRONG = [1, 13], [3, 4, 2], [4, 3, 2]


def record(group: int, index: int, reward: float | None, **more: Any) -> dict[str, Any]:
    ids = SORTED if reward else WRONG
    return {
        "group_index": group,
        "index": index,
        "rollout_id": group * 10 + index,
        "prompt": "s10=",
        "label": "01",
        "response": "01" if reward else "10",
        "response_length": 3,
        "tokens": PROMPT_IDS + ids,
        "rollout_log_probs": [-0.5, -0.25, -0.125],
        "version_spans": [[0, 1, 4], [1, 3, 5]],
        "status": "completed",
        "reward": reward,
        "reason": "equal" if reward else "differs",
        "advantage": 0.7 if reward else -0.7,
        **more,
    }


def write(run: Path, round_: int, records: list[dict[str, Any]]) -> None:
    (run / "rollouts").mkdir(exist_ok=True, parents=True)
    lines = b"".join(orjson.dumps(item, option=orjson.OPT_APPEND_NEWLINE) for item in records)
    packed = zstandard.ZstdCompressor().compress(lines)
    (run / "rollouts" / f"rollout_{round_}.jsonl.zst").write_bytes(packed)


def write_tokenizer(run: Path, **more: Any) -> None:
    (run / "policy").mkdir(parents=True, exist_ok=True)
    document = {"model": {"vocab": {"0": 3, "1": 4}}, "added_tokens": [{"id": 2, "content": "<eos>"}], **more}
    (run / "policy" / "tokenizer.json").write_bytes(orjson.dumps(document))


def test_a_group_has_its_tokens_as_text_with_logprob_and_version(tmp_path: Path) -> None:
    write(tmp_path, 7, [record(0, 0, 1.0), record(0, 1, 0.0), record(1, 0, 1.0), record(1, 1, 1.0)])
    write_tokenizer(tmp_path)
    page = read_round(tmp_path, 7, 0)
    assert (page["num_groups"], page["prompt"], page["mean_reward"]) == (2, "s10=", 0.5)
    assert page["std_reward"] == pytest.approx(math.sqrt(0.5))
    first = page["rollouts"][0]
    assert first["tokens"] == ["0", "1", "<eos>"]
    assert first["versions"] == [4, 5, 5]
    assert first["logprobs"] == [-0.5, -0.25, -0.125]
    assert first["gaps"] is None


def test_the_gap_is_trainer_minus_engine(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 0, 1.0, train_log_probs=[-0.25, -0.25, -0.25])])
    assert read_round(tmp_path, 0, 0)["rollouts"][0]["gaps"] == [0.25, 0.0, -0.125]


def test_without_a_tokenizer_ids_are_shown_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 0, 1.0)])
    assert read_round(tmp_path, 0, 0)["rollouts"][0]["tokens"] == ["<3>", "<4>", "<2>"]


def test_byte_level_vocabularies_are_read_back_to_text(tmp_path: Path) -> None:
    vocabulary = {"Ġx": 0, "Ã©": 1, "Ċ": 2}
    write_tokenizer(tmp_path, model={"vocab": vocabulary}, decoder={"type": "ByteLevel"}, added_tokens=[])
    text = TokenText.read(tmp_path / "policy")
    assert [text.of(i) for i in range(3)] == [" x", "é", "\n"]


def test_rounds_are_listed_rising_and_other_files_are_not_rounds(tmp_path: Path) -> None:
    for round_ in (10, 2, 0):
        write(tmp_path, round_, [record(0, 0, 1.0)])
    (tmp_path / "rollouts" / "rollout_x.jsonl.zst").touch()
    assert list_rounds(tmp_path) == [0, 2, 10]


def test_an_unknown_round_or_group_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 0, 1.0)])
    for arguments, code in (((1, 0), "round_unknown"), ((0, 1), "group_unknown")):
        with pytest.raises(InputError) as caught:
            read_round(tmp_path, *arguments)
        assert caught.value.code == code


def test_the_standard_error_is_over_groups_and_leaves_dropped_ones_out(tmp_path: Path) -> None:
    groups = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]  # means 0.5, 1, 0: sd 0.5, over sqrt(3)
    records = [record(g, i, reward) for g, rewards in enumerate(groups) for i, reward in enumerate(rewards)]
    write(tmp_path, 0, [*records, record(9, 0, 1.0, dropped="zero_std_1")])
    assert measure_round(tmp_path, 0) == pytest.approx(0.5 / math.sqrt(3))


def test_one_group_has_no_standard_error(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(0, 0, 1.0), record(0, 1, 0.0)])
    assert measure_round(tmp_path, 0) is None
    assert measure_round(tmp_path, 1) is None


def test_wilson_bounds_agree_with_the_published_example() -> None:
    # 81 of 263: Newcombe 1998, table I, method 3: 0.2553 to 0.3662
    low, high = compute_wilson(81 / 263, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_wilson_bounds_stay_inside_0_and_1() -> None:
    assert compute_wilson(0.0, 512)[0] == pytest.approx(0.0, abs=1e-12)
    assert compute_wilson(1.0, 512)[1] == pytest.approx(1.0, abs=1e-12)
