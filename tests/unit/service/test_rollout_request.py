"""What of an OpenAI body is honoured, refused and ignored, and the values that follow."""

from __future__ import annotations

from typing import Any

import pytest
from builtin_tokenizer import open_builtin_tokenizer

from hotloop.errors import ServiceError
from hotloop.service.rollout_request import Kind, RolloutRequest, parse_rollout_request, split_model_name
from hotloop.service.token_ids_only import TokenIdsOnly

TOKENIZER = open_builtin_tokenizer()


def parse(kind: Kind = "text", headers: dict[str, str] | None = None, **body: Any) -> RolloutRequest:
    start: dict[str, Any] = {"prompt": [1, 2]} if kind == "text" else {"messages": [{"role": "user", "content": "s5"}]}
    return parse_rollout_request(kind, start | body, headers or {}, TOKENIZER)


def refusal(kind: Kind = "text", **body: Any) -> tuple[str, str]:
    with pytest.raises(ServiceError) as caught:
        parse(kind, **body)
    return caught.value.code, str(caught.value.details.get("param"))


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("s5", [[1, TOKENIZER.encode("s")[1], TOKENIZER.encode("5")[1]]]),
        ([4, 5], [[4, 5]]),
        ([[4], [5, 6]], [[4], [5, 6]]),
        (["s", "5"], [TOKENIZER.encode("s"), TOKENIZER.encode("5")]),
    ],
)
def test_a_text_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, wanted: list[list[int]]) -> None:
    assert parse(prompt=prompt).prompts == wanted


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [1, "s"], [True], [-1], [2**31], {}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(prompt=prompt) == ("invalid_field", "prompt")


def test_token_data_replaces_the_prompt_of_either_kind() -> None:
    assert parse(nvext={"token_data": [7, 8]}).prompts == [[7, 8]]
    assert parse("chat", nvext={"token_data": [7, 8]}).prompts == [[7, 8]]
    assert refusal(nvext={"token_data": ["a"]}) == ("invalid_field", "nvext.token_data")


def test_chat_content_may_be_text_parts_and_nothing_else() -> None:
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "5"}]
    assert parse("chat", messages=[{"role": "user", "content": parts}]).prompts == parse("chat").prompts
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert refusal("chat", messages=[{"role": "user", "content": image}]) == ("invalid_field", "messages[0].content")
    assert refusal("chat", messages=[]) == ("invalid_field", "messages")
    assert refusal("chat", messages=[{"content": "s"}]) == ("invalid_field", "messages[0]")


def test_defaults_are_those_of_openai_and_a_seed_is_drawn() -> None:
    text, chat = parse(), parse("chat")
    assert (text.params.max_new_tokens, text.params.temperature, text.params.top_p, text.n) == (16, 1.0, 1.0, 1)
    assert chat.params.max_new_tokens == 2**31 - 1
    assert text.params.stop_token_ids == (2,), "the tokenizer's end token"
    seeds = {parse().params.seed for _ in range(8)}
    assert len(seeds) == 8 and None not in seeds


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse("chat", max_tokens=9, max_completion_tokens=4).params.max_new_tokens == 4


def test_sampling_fields_reach_the_engine() -> None:
    params = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        seed=-1,
        stop="x",
        stop_token_ids=[9],
        logit_bias={"7": -3},
    ).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, -1, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (2**63 - 1, ("x",), (2, 9))
    assert params.logit_bias == {7: -3.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stream", 1),
        ("echo", "yes"),
        ("echo_last", -1),
        ("logprobs", 129),
        ("top_logprobs", -1),
        ("include_routing_matrix", 0),
        ("nvext", []),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("presence_penalty", 0.5),
        ("best_of", 2),
        ("suffix", "x"),
        ("ignore_eos", True),
    ],
)
def test_a_field_with_a_value_that_is_not_served_is_named(field: str, value: Any) -> None:
    assert refusal(**{field: value}) == ("invalid_field", field)


def test_neutral_values_of_refused_fields_pass() -> None:
    parse(response_format={"type": "text"}, tools=[], presence_penalty=0.0, best_of=1, suffix="", ignore_eos=False)


def test_a_number_as_logprobs_is_for_text_only() -> None:
    assert (parse(logprobs=3).logprobs, parse(logprobs=3).top_logprobs) == (True, 3)
    assert (parse(logprobs=0).logprobs, parse(logprobs=0).top_logprobs) == (True, 0)
    assert refusal("chat", logprobs=3) == ("invalid_field", "logprobs")
    assert parse("chat", logprobs=True, top_logprobs=128).top_logprobs == 128


def test_what_is_ignored_is_named_in_order() -> None:
    found = parse(store=True, nvext={"colour": 1, "extra_fields": ["engine_data", "weather"]}, metadata={})
    assert found.ignored == ("store", "metadata", "nvext.colour", "nvext.extra_fields.weather")
    assert found.extra_fields == {"engine_data"}


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, 5])
def test_a_cache_salt_has_no_separators(salt: Any) -> None:
    assert refusal(nvext={"cache_salt": salt}) == ("invalid_field", "nvext.cache_salt")


def test_the_session_is_the_header_before_the_body() -> None:
    control = {"session_control": {"session_id": "body"}}
    assert parse(nvext=control).session_id == "body"
    assert parse(nvext=control, headers={"x-multi-turn-session-id": "head"}).session_id == "head"


def test_routes_and_prompt_logprobs_are_asked_for_only_where_somebody_reads_them() -> None:
    assert not parse().wants_routes and not parse().wants_prompt_logprobs
    assert (
        parse(include_routing_matrix=True).wants_routes and parse(nvext={"extra_fields": ["engine_data"]}).wants_routes
    )
    assert parse(echo=True, logprobs=1).wants_prompt_logprobs and not parse(echo=True).wants_prompt_logprobs
    assert parse(nvext={"extra_fields": ["prompt_logprobs"]}).wants_prompt_logprobs


def test_a_vendor_header_asks_for_the_raw_output() -> None:
    assert parse(headers={"fireworks-model": "m"}).raw_output and not parse().raw_output


def test_a_model_name_may_have_a_path_and_an_identity() -> None:
    assert split_model_name("", "policy") == ""
    assert split_model_name("policy", "policy") == ""
    assert split_model_name("accounts/a/models/policy@step000001", "policy") == "step000001"
    with pytest.raises(ServiceError) as caught:
        split_model_name("other@step000001", "policy")
    assert (caught.value.code, caught.value.details["param"]) == ("model_not_found", "model")


def test_without_a_tokenizer_ids_work_and_text_says_what_to_do() -> None:
    assert parse_rollout_request("text", {"prompt": [3]}, {}, TokenIdsOnly()).prompts == [[3]]
    with pytest.raises(ServiceError) as caught:
        parse_rollout_request("text", {"prompt": "s"}, {}, TokenIdsOnly())
    assert caught.value.code == "no_tokenizer"
