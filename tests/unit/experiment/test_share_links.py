"""Section 8, L07, L10, L36: what a link carries, what it never carries, and what a broken one does."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from hotloop.errors import InputError
from hotloop.experiment.choices import MAX_TEXT, Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.share import (
    MAX_LINK_CHARS,
    PRIVATE_CHOICES,
    PRIVATE_SECTION_VALUES,
    clean_choices,
    encode_comparison,
    encode_experiment,
    read_link,
)

SECRET = "zz-secret"


def unpack(fragment: str) -> dict[str, Any]:
    packed = fragment.partition("=")[2]
    body: dict[str, Any] = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    return body


def pack(body: Any, key: str = "experiment") -> str:
    text = body if isinstance(body, str) else json.dumps(body)
    return f"{key}=" + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def everything_private() -> Experiment:
    values: dict[str, Any] = dict.fromkeys(PRIVATE_CHOICES, SECRET)
    values |= {
        "data": {"held_out_path": SECRET},
        "export": {"publish": SECRET, "slime_args": ["--wandb-key", SECRET]},
        "laptop": {"policy": f"/{SECRET}", "publish": SECRET, "service_url": SECRET, "hooks": {"h": SECRET}},
        "reward": {"kind": "python", "function": SECRET},
    }
    return Experiment.model_validate(values)


def test_l07_a_link_holds_only_what_differs_from_its_default_in_snake_case() -> None:
    experiment = Experiment.model_validate({"model": "glm5", "rollout_gpus": 64, "sampling": {"top_p": 0.9}})
    fragment = encode_experiment(experiment)
    assert fragment.startswith("experiment=")
    assert unpack(fragment) == {
        "schema": 1,
        "choices": {"model": "glm5", "rollout_gpus": 64, "sampling": {"top_p": 0.9}},
    }
    assert unpack(encode_experiment(Experiment())) == {"schema": 1, "choices": {}}


def test_l07_the_fragment_is_base64url_without_padding() -> None:
    packed = encode_experiment(Experiment.model_validate({"data": {"prompt_key": "问>?"}})).partition("=")[2]
    assert not set(packed) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_l07_no_private_value_is_in_a_link() -> None:
    body = json.dumps(unpack(encode_experiment(everything_private())))
    assert SECRET not in body


@pytest.mark.parametrize("path", sorted(PRIVATE_CHOICES | PRIVATE_SECTION_VALUES))
def test_every_private_path_is_one_of_the_schema(path: str) -> None:
    known = {name for name, _ in flatten(everything_private().model_dump())} | {"reward.url", "laptop.hooks"}
    assert path in known


def test_every_path_address_and_hook_of_the_schema_is_private() -> None:
    """A new key whose name says that it holds one of these must be listed."""
    words = ("path", "addr", "hook", "_dir", "url", "publish", "function", "device", "declaration", "run_id", "args")
    keys = {name for name, _ in flatten(everything_private().model_dump())}
    telling = {name for name in keys if any(word in name.rpartition(".")[2] for word in words)}
    hooks = {name for name in telling if name.startswith("laptop.hooks.")}
    assert telling - hooks - {"laptop.publish_full_every", "laptop.device"} <= PRIVATE_CHOICES | PRIVATE_SECTION_VALUES


def test_opening_a_link_keeps_the_reader_s_own_private_values() -> None:
    mine = everything_private()
    link = "http://127.0.0.1:8420/#" + encode_experiment(Experiment(model="dense", hf_path="/theirs", rounds=9))
    opened = read_link(link, mine).experiment
    assert (opened.model, opened.rounds) == ("dense", 9)
    assert opened.hf_path == SECRET
    assert opened.export == mine.export
    assert opened.laptop == mine.laptop
    assert opened.data.held_out_path == SECRET


def test_a_private_value_smuggled_into_a_link_is_dropped() -> None:
    link = pack({"schema": 1, "choices": {"hf_path": "/theirs", "export": {"slime_args": ["--x"]}, "rounds": 5}})
    opened = read_link(link, Experiment(hf_path="/mine")).experiment
    assert (opened.hf_path, opened.export.slime_args, opened.rounds) == ("/mine", (), 5)
    assert read_link(link).experiment.hf_path is None


def test_a_reward_whose_function_stayed_behind_takes_the_reader_s_or_none() -> None:
    link = encode_experiment(Experiment.model_validate({"reward": {"kind": "python", "function": "theirs.f"}}))
    mine = Experiment.model_validate({"reward": {"kind": "python", "function": "mine.f"}})
    assert read_link(link, mine).experiment.reward.model_dump() == {"kind": "python", "function": "mine.f"}
    assert read_link(link).experiment.reward.model_dump() == {"kind": "python", "function": ""}


def test_a_built_in_policy_is_shared_and_a_directory_is_not() -> None:
    assert unpack(encode_experiment(Experiment.model_validate({"laptop": {"policy": "moe"}})))["choices"] == {
        "laptop": {"policy": "moe"}
    }
    assert unpack(encode_experiment(Experiment.model_validate({"laptop": {"policy": "/p"}})))["choices"] == {}


def test_both_key_spellings_are_read() -> None:
    link = pack({"schema": 1, "choices": {"rolloutGpus": 16, "kv_dtype": "fp8", "sampling": {"topP": 0.5}}})
    opened = read_link(link).experiment
    assert (opened.rollout_gpus, opened.kv_dtype, opened.sampling.top_p) == (16, "fp8", 0.5)


@pytest.mark.parametrize(
    ("link", "code"),
    [
        ("experiment=" + "A" * MAX_LINK_CHARS, "link_too_long"),
        ("experiment=****", "bad_link"),
        (pack("{"), "bad_link"),
        (pack("[1]"), "bad_link"),
        (pack('{"schema": 1}'), "bad_link"),
        (pack('{"schema": 1, "choices": {"rounds": NaN}}'), "bad_link"),
        (pack("[" * 4000), "bad_link"),
        (pack({"schema": 2, "choices": {}}), "schema_unsupported"),
        (pack({"choices": {}}), "schema_unsupported"),
        (pack({"schema": 1, "choices": {}}, "plan"), "bad_link"),
        (pack({"schema": 1, "choices": {"nodes": 513}}), "out_of_range"),
        (pack({"schema": 1, "choices": {"layout": "moon"}}), "wrong_value"),
        ("", "bad_link"),
    ],
)
def test_a_link_that_cannot_be_read_says_why(link: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        read_link(link)
    assert caught.value.code == code


def test_a_link_of_the_longest_length_is_read() -> None:
    """The limit counts the whole link: 8192 characters are fine, one more is not."""
    body = '{"schema":1,"choices":{}' + " " * 6110 + "}"
    link = "x" * (MAX_LINK_CHARS - len("#" + pack(body))) + "#" + pack(body)
    assert len(link) == MAX_LINK_CHARS
    assert read_link(link).experiment == Experiment()
    with pytest.raises(InputError, match="link_too_long"):
        read_link("x" + link)


def test_an_experiment_that_does_not_fit_a_link_is_refused_when_it_is_made() -> None:
    stops = [f"stop {number} " + "x" * 400 for number in range(40)]
    with pytest.raises(InputError, match="link_too_long"):
        encode_experiment(Experiment.model_validate({"sampling": {"stop": stops}}))


def test_l36_an_a_b_link_filters_both_sides() -> None:
    a, b = everything_private(), Experiment(model="dense", save_path=f"/{SECRET}")
    fragment = encode_comparison(a, b)
    assert fragment.startswith("compare=")
    assert SECRET not in json.dumps(unpack(fragment))
    mine = Experiment(hf_path="/mine")
    opened = read_link(f"http://x/#{fragment}", mine)
    assert opened.experiment.model == "dense"
    assert opened.reference is not None
    assert opened.reference.hf_path == opened.experiment.hf_path == "/mine"


def test_l10_unknown_wrong_control_and_proto_keys_are_dropped() -> None:
    raw = {
        "rounds": 5,
        "bogus": 1,
        "__proto__": {"rounds": 9},
        "constructor": "x",
        "nodes": "many",
        "r3": "yes indeed",
        "hfPath": 7,
        "sampling": {"temperature": "hot", "top_k": 3, "__proto__": {}},
        "optimizer": [1, 2],
        "generate_hook": "a\x00b\x1b[31mc\nd\x7fe\x85f",
        "algorithm": {"kind": "grpo", "gamma": 0.5},
    }
    assert clean_choices(raw) == {
        "rounds": 5,
        "sampling": {"top_k": 3},
        "generate_hook": "ab[31mcdef",
        "algorithm": {"kind": "grpo"},
    }


def test_l10_text_is_cut_at_2048_characters() -> None:
    assert clean_choices({"hf_path": "x" * 3000}) == {"hf_path": "x" * MAX_TEXT}


def test_l10_an_integer_out_of_range_is_refused_with_a_message() -> None:
    with pytest.raises(InputError, match=r"nodes = 513.*out_of_range"):
        read_link(pack({"schema": 1, "choices": {"nodes": 513}}))
