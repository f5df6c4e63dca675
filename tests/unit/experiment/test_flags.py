"""The flag table, and how an argument vector is read against it."""

from __future__ import annotations

import pytest

from hotloop.experiment.flags import check_flags, is_flag_word, load_flags, split_flags


def codes(*words: str, target: str = "v0.4.0") -> list[str]:
    return [problem.code for problem in check_flags(words, target)]


def test_the_table_holds_the_flags_of_the_three_parsers() -> None:
    table = load_flags()
    assert table.slime_commit.startswith("624b824a")
    assert len(table.flags) == 229 + 2 + 102 + 44 + 9
    assert table.flags["--adam-beta2"].owner == "megatron"
    assert table.flags["--sglang-dp-size"].value_type == "int"
    assert table.flags["--sglang-nsa-prefill-backend"].replaced_by == "--sglang-dsa-prefill-backend"


def test_a_right_vector_has_no_problem() -> None:
    assert codes("--colocate", "--lr", "1e-6", "--rollout-top-k", "-1", "--advantage-estimator", "grpo") == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--colocated"], "unknown_flag"),
        (["--lr"], "flag_arity"),
        (["--lr", "1", "2"], "flag_arity"),
        (["--colocate", "1"], "flag_arity"),
        (["--lr", "high"], "flag_value"),
        (["--lr", "nan"], "flag_value"),
        (["--num-rollout", "3.5"], "flag_value"),
        (["--advantage-estimator", "gae"], "flag_value"),
        (["--train-env-vars", "{"], "flag_value"),
        (["--spec", "a"], "flag_arity"),
        (["--rollout-stop"], "flag_arity"),
        (["--sglang-port", "1"], "flag_skipped"),
        (["stray", "--colocate"], "stray_word"),
        (["--hf-checkpoint", "--colocate"], "flag_arity"),
        (["--hf-checkpoint", "-x"], "flag_arity"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], code: str) -> None:
    assert code in codes(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--lr=1e-6"],
        ["--spec", "module", "function"],
        ["--rollout-stop", "a", "b"],
        ["--train-env-vars", "{}"],
        ["--hf-checkpoint", "- x"],
        ["--hf-checkpoint=-x"],
        ["--freeze-params-name-list"],
        ["--no-offload-train"],
    ],
)
def test_the_nearest_right_form_has_no_problem(words: list[str]) -> None:
    assert codes(*words) == []


def test_a_later_flag_is_refused_for_624b824a_only() -> None:
    assert codes("--use-score-centering") == []
    assert codes("--use-score-centering", target="624b824a") == ["not_in_target"]
    assert codes("--rollout-data-transport", "straw") == []
    assert codes("--rollout-data-transport", "straw", target="624b824a") == ["flag_value"]
    assert codes("--rollout-data-transport", "nixl", target="624b824a") == []


@pytest.mark.parametrize("word", ["--a", "-x", "--", "-1x"])
def test_a_leading_dash_makes_a_flag(word: str) -> None:
    assert is_flag_word(word)


@pytest.mark.parametrize("word", ["-", "-1", "-0.5", "", "a", "- a", "-a b"])
def test_numbers_lone_dashes_and_texts_with_a_blank_are_values(word: str) -> None:
    assert not is_flag_word(word)


def test_splitting_keeps_values_positions_and_strays() -> None:
    uses, strays = split_flags(["x", "--a", "1", "2", "--b", "--c=v"])
    assert strays == ["x"]
    assert [(use.name, use.values, use.position) for use in uses] == [
        ("--a", ("1", "2"), 1),
        ("--b", (), 4),
        ("--c", ("v",), 5),
    ]


def test_argparse_agrees_on_what_is_a_flag() -> None:
    """The standard parser is the reference: it refuses a value exactly where we call it a flag."""
    import argparse
    import contextlib
    import io

    for word in ["-x", "--y", "-1", "-1.5", "- x", "-a b", "--", "plain", "-", ""]:
        parser = argparse.ArgumentParser(exit_on_error=True)
        parser.add_argument("--hf-checkpoint")
        taken = True
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                parser.parse_known_args(["--hf-checkpoint", word])
            except SystemExit:
                taken = False
        assert taken is not is_flag_word(word), word
