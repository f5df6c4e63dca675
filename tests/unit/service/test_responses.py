"""Answers and their record: chunks add up to the whole, absent is absent, numbers are the engine's own."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import numpy as np
import pytest
from builtin_tokenizer import open_builtin_tokenizer

from hotloop.engines.base import Chunk
from hotloop.service.engine_data import BlockOptions, Serving, completion_block, routing_matrices
from hotloop.service.responses import Answer, ChoiceText
from hotloop.service.rollout_request import parse_rollout_request
from hotloop.types import Completion, Support, TopLogprobs, VersionSpan

TOKENIZER = open_builtin_tokenizer()
SERVING = Serving("r0", 7, "step000007")
IDS = TOKENIZER.encode("12345678")[1:]
LOGPROBS = [-0.1 * (at + 1) for at in range(8)]
ROUTES = np.arange(10 * 3 * 2, dtype=np.uint8).reshape(10, 3, 2)
"""Prompt 3 + 8 tokens - 1 rows, 3 layers, 2 experts a token."""
MOE = BlockOptions(moe_layers=(1, 2), num_experts=64)


def completion(start: int, end: int, *, extras: bool = True) -> Completion:
    """Tokens [start, end) of one answer: five by version 6, the rest by 7."""
    spans = [VersionSpan(0, 5, 6, "step000006"), VersionSpan(5, 8, 7, "step000007")]
    cut = [
        VersionSpan(max(s.start, start), min(s.end, end), s.policy_version, s.snapshot_identity)
        for s in spans
        if s.start < end and s.end > start
    ]
    count = end - start
    first_row = 0 if start == 0 else 3 + start - 1
    return Completion(
        IDS[start:end],
        [value / 2 for value in LOGPROBS[start:end]],
        LOGPROBS[start:end],
        cut,
        "length",
        top_logprobs=TopLogprobs(1, "sampling", [[i] for i in IDS[start:end]], [[-0.5]] * count) if extras else None,
        support=Support(list(range(count + 1)), IDS[start:end]) if extras else None,
        routed_experts=ROUTES[first_row : 3 + end - 1] if extras else None,
        routed_experts_start=first_row,
    )


def answer_for(kind: Any = "text", **body: Any) -> Answer:
    start = {"prompt": [1, 2, 3]} if kind == "text" else {"messages": [{"role": "user", "content": "12"}]}
    nvext = {"extra_fields": ["engine_data"], **body.pop("nvext", {})}
    request = parse_rollout_request(kind, {**start, "nvext": nvext, **body}, {}, TOKENIZER)
    options = BlockOptions(request.encoding, request.routed_experts_layers, (1, 2), 64)
    return Answer(
        request,
        TOKENIZER,
        options,
        answer_id="cmpl-1",
        created=5,
        replica_id="r0",
        served_name="policy",
        names_identity=False,
    )


def whole_of(answer: Answer, n: int = 1) -> dict[str, Any]:
    chunks = {index: Chunk("a", index, completion(0, 8), True, "length") for index in range(n)}
    return answer.whole(chunks, SERVING, {})


def pieces_of(answer: Answer, cuts: tuple[int, ...] = (0, 2, 6, 8), index: int = 0) -> list[dict[str, Any]]:
    found = []
    for start, end in itertools.pairwise(cuts):
        is_last = end == 8
        chunk = Chunk("a", index, completion(start, end), is_last, "length" if is_last else None)
        found.append(answer.piece(index, chunk, SERVING))
    return found


def decode(field: Any, dtype: str) -> list[Any]:
    found = np.frombuffer(base64.b64decode(field["data"]), dtype)
    assert list(found.shape) == field["shape"]
    return found.tolist()


@pytest.mark.parametrize("cuts", [(0, 8), (0, 2, 6, 8), tuple(range(9))])
def test_concatenated_chunks_are_the_whole_block(cuts: tuple[int, ...]) -> None:
    whole = whole_of(answer_for())["nvext"]["engine_data"]
    parts = [piece["nvext"]["engine_data"] for piece in pieces_of(answer_for(), cuts)]
    for name in ("completion_token_ids", "sampling_logprobs", "logprobs"):
        assert [value for part in parts for value in part[name]] == whole[name]
    assert [row for part in parts for row in part["top_logprobs"]["token_ids"]] == whole["top_logprobs"]["token_ids"]
    assert [token for part in parts for token in part["top_p_mask"]["token_ids"]] == whole["top_p_mask"]["token_ids"]
    routes = b"".join(base64.b64decode(part["routed_experts"]["data"]) for part in parts)
    assert routes == base64.b64decode(whole["routed_experts"]["data"]) == ROUTES.tobytes()
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [1, 2, 3]
    assert all("prompt_token_ids" not in part for part in parts[1:])
    joined: list[dict[str, Any]] = []
    for span in (span for part in parts for span in part["version_spans"]):
        if joined and joined[-1]["policy_version"] == span["policy_version"]:
            assert joined[-1]["end"] == span["start"]
            joined[-1] = {**joined[-1], "end": span["end"]}
        else:
            joined.append(span)
    assert joined == whole["version_spans"]


def test_the_version_is_that_of_the_oldest_token_also_in_the_last_chunk() -> None:
    whole = whole_of(answer_for())["nvext"]["engine_data"]
    last = pieces_of(answer_for())[-1]["nvext"]["engine_data"]
    for block in (whole, last):
        assert (block["policy_version"], block["policy_version_start"], block["policy_version_end"]) == (6, 6, 7)
        assert block["snapshot_identity"] == "step000007"


def test_an_answer_without_tokens_has_no_spans_and_the_served_version() -> None:
    empty = Completion([], [], [], [], "abort")
    block = completion_block(empty, SERVING, BlockOptions(), prompt_ids=[1])
    assert block["version_spans"] == [] and block["policy_version"] == 7
    assert block["snapshot_identity"] == "step000007"


def test_absent_data_is_an_absent_field() -> None:
    block = completion_block(completion(0, 8, extras=False), SERVING, BlockOptions(), prompt_ids=[1])
    assert not {"top_logprobs", "top_p_mask", "routed_experts"} & set(block)
    assert None not in block.values()


def test_with_several_choices_the_blocks_sit_in_choices() -> None:
    data = whole_of(answer_for(n=2), 2)["nvext"]["engine_data"]
    assert (data["schema"], data["replica_id"]) == (1, "r0") and "completion_token_ids" not in data
    assert [choice["index"] for choice in data["choices"]] == [0, 1]
    piece = pieces_of(answer_for(n=2), index=1)[0]
    assert [choice["index"] for choice in piece["nvext"]["engine_data"]["choices"]] == [1]
    assert piece["choices"][0]["index"] == 1


def test_base64_holds_the_same_numbers() -> None:
    data = whole_of(answer_for(nvext={"engine_data_encoding": "base64"}))["nvext"]["engine_data"]
    assert data["completion_token_ids"]["dtype"] == "int32" and data["logprobs"]["dtype"] == "float32"
    assert decode(data["completion_token_ids"], "<i4") == IDS
    assert decode(data["logprobs"], "<f4") == pytest.approx(LOGPROBS)
    assert decode(data["top_p_mask"]["offsets"], "<i4") == list(range(9))


def test_routes_of_all_layers_or_of_those_with_experts() -> None:
    every = whole_of(answer_for())["nvext"]["engine_data"]["routed_experts"]
    assert (every["dtype"], every["shape"], every["start"], every["layers"]) == ("uint8", [10, 3, 2], 0, "all")
    moe = whole_of(answer_for(nvext={"routed_experts_layers": "moe"}))["nvext"]["engine_data"]["routed_experts"]
    assert moe["shape"] == [10, 2, 2]
    assert base64.b64decode(moe["data"]) == ROUTES[:, 1:].tobytes()


def test_routes_above_256_experts_are_two_bytes_each_and_give_no_matrix() -> None:
    options = BlockOptions(moe_layers=(0,), num_experts=257)
    wide = Completion([5], [0.0], [0.0], [], "length", routed_experts=np.full((1, 1, 1), 256, np.uint16))
    field = completion_block(wide, SERVING, options, prompt_ids=[1])["routed_experts"]
    assert field["dtype"] == "uint16" and base64.b64decode(field["data"]) == b"\x00\x01"
    assert routing_matrices(wide, options, 1) == [None]


def test_a_routing_matrix_is_the_row_of_the_position_before_its_token() -> None:
    rows = routing_matrices(completion(0, 8), MOE, 3)
    assert [base64.b64decode(str(row)) for row in rows] == [ROUTES[2 + at, 1:].tobytes() for at in range(8)]
    later = routing_matrices(completion(6, 8), MOE, 3 + 6)
    assert later == rows[6:]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_streamed_logprobs_and_text_add_up(kind: Any) -> None:
    whole = whole_of(answer_for(kind, logprobs=True, include_routing_matrix=True))["choices"][0]
    pieces = [piece["choices"][0] for piece in pieces_of(answer_for(kind, logprobs=True, include_routing_matrix=True))]
    # The routes of a chat start at another prompt length, so that only a text's matrices are compared.
    strip = (lambda entry: entry) if kind == "text" else (lambda entry: {**entry, "routing_matrix": None})
    streamed = [strip(entry) for piece in pieces for entry in piece["logprobs"]["content"]]
    assert streamed == [strip(entry) for entry in whole["logprobs"]["content"]]
    if kind == "text":
        assert "".join(piece["text"] for piece in pieces) == whole["text"] == "12345678"
        offsets = [at for piece in pieces for at in piece["logprobs"]["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"] == list(range(8))
    else:
        assert "".join(piece["delta"]["content"] for piece in pieces) == whole["message"]["content"]
        assert [piece["delta"].get("role") for piece in pieces] == ["assistant", None, None]


def test_echo_comes_once_and_before_the_first_chunk() -> None:
    pieces = pieces_of(answer_for(echo=True, return_token_ids=True))
    ids = [token for piece in pieces for token in piece["choices"][0]["raw_output"]["completion_token_ids"]]
    assert ids == [1, 2, 3, *IDS]
    last_two = whole_of(answer_for(echo_last=2, return_token_ids=True))["choices"][0]["raw_output"]
    assert last_two["completion_token_ids"] == [2, 3, *IDS]


def test_token_names_may_be_ids() -> None:
    entry = whole_of(answer_for(logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{IDS[0]}" and entry["bytes"] == [ord("1")]


@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_a_stop_string_never_leaves_however_the_tokens_come(step: int) -> None:
    text = ChoiceText(TOKENIZER, ("456", "xx"))
    said = ""
    for start in range(0, 8, step):
        said += text.push(IDS[start : start + step], is_last=start + step >= 8)
        assert "4" not in said
    assert said == "123"


def test_what_only_looks_like_a_stop_string_is_held_back_and_then_said() -> None:
    text = ChoiceText(TOKENIZER, ("24",))
    assert [text.push([token], is_last=False) for token in IDS[:3]] == ["1", "", "23"]
    assert text.push(IDS[3:4], is_last=True) == "4"


def test_usage_counts_each_prompt_once_and_every_choice() -> None:
    usage = whole_of(answer_for(n=2), 2)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 16, 19)
