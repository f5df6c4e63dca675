"""From an empty folder to a hot-loaded delta: the script with curl, and the same walk with the `openai` client."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_policy import Deployment, PolicyTrainer, start_policy

openai = pytest.importorskip("openai")
SCRIPT = Path(__file__).parents[2] / "examples" / "hot_load_walkthrough.sh"
RECORD: dict[str, Any] = {"nvext": {"extra_fields": ["engine_data"]}}
PROMPT = [1, 13, 8, 5, 11]
NEVER_ENDS = {"2": -100}
"""A bias that keeps the end token out of reach."""


@pytest.mark.slow
def test_the_script_walks_from_an_empty_folder_to_a_hot_loaded_delta(tmp_path: Path) -> None:
    home = {name: str(tmp_path / name.lower()) for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR")}
    for folder in home.values():
        Path(folder).mkdir()
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **home, "PATH": commands, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^answer .*, policy_version (\d+)$", done.stdout, re.MULTILINE) == ["1", "2"]
    assert done.stdout.index("step000001 is served") < done.stdout.index("step000002 is served")
    assert done.stdout.endswith("== done\n")
    left = list((tmp_path / "tmpdir").glob("tmp.*"))  # torch leaves a folder of its own there
    assert left == [], "it cleans up behind itself"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTrainer:
    root = tmp_path_factory.mktemp("walk")
    return PolicyTrainer(root, root / "bucket")


@pytest.fixture(scope="module")
def deployment(trainer: PolicyTrainer) -> Iterator[Deployment]:
    running = start_policy(trainer, trainer.root / "deployment")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Any]:
    with openai.OpenAI(base_url=deployment.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def text(client: Any, **fields: Any) -> Any:
    extra = {**RECORD, **fields.pop("extra_body", {})}
    defaults = {"model": "policy", "prompt": PROMPT, "max_tokens": 8, "seed": 7, "logit_bias": NEVER_ENDS}
    return client.completions.create(**{**defaults, **fields}, extra_body=extra)


def chat(client: Any, **fields: Any) -> Any:
    extra = {**RECORD, **fields.pop("extra_body", {})}
    messages = [{"role": "user", "content": "s528"}]
    defaults = {"model": "policy", "messages": messages, "max_tokens": 8, "seed": 7, "logit_bias": NEVER_ENDS}
    return client.chat.completions.create(**{**defaults, **fields}, extra_body=extra)


def record_of(answer: Any) -> dict[str, Any]:
    found = answer.nvext["engine_data"]
    assert isinstance(found, dict)
    return found


def test_a_text_completion_carries_ids_logprobs_and_version(client: Any) -> None:
    answer = text(client)
    record = record_of(answer)
    assert answer.object == "text_completion" and answer.model == "policy"
    assert record["policy_version"] == 1 and record["snapshot_identity"] == "step000001"
    assert record["prompt_token_ids"] == PROMPT
    assert record["version_spans"] == [
        {"start": 0, "end": 8, "policy_version": 1, "snapshot_identity": "step000001"},
    ]
    assert len(record["completion_token_ids"]) == len(record["logprobs"]) == 8
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_completion_renders_its_template_and_answers_as_the_assistant(client: Any) -> None:
    answer = chat(client)
    assert record_of(answer)["prompt_token_ids"][0] == 1 and len(record_of(answer)["prompt_token_ids"]) == 5
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content


@pytest.mark.parametrize("ask", [text, chat])
def test_a_stream_adds_up_to_the_whole_answer(client: Any, ask: Any) -> None:
    whole = ask(client, n=2)
    pieces = list(ask(client, n=2, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    for index in (0, 1):
        own = [piece for piece in pieces if piece.choices and piece.choices[0].index == index]
        ids = [token for piece in own for token in record_of(piece)["choices"][0]["completion_token_ids"]]
        assert ids == record_of(whole)["choices"][index]["completion_token_ids"]
        if ask is text:
            assert "".join(piece.choices[0].text for piece in own) == whole.choices[index].text
        else:
            said = "".join(piece.choices[0].delta.content or "" for piece in own)
            assert said == whole.choices[index].message.content
            assert own[0].choices[0].delta.role == "assistant"
        assert [piece.choices[0].finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) > 1
    ids = [choice["completion_token_ids"] for choice in record_of(whole)["choices"]]
    assert ids[0] != ids[1]


def test_a_seed_repeats_an_answer_and_its_absence_does_not(client: Any) -> None:
    ids = record_of(text(client))["completion_token_ids"]
    assert record_of(text(client))["completion_token_ids"] == ids
    free = {tuple(record_of(text(client, seed=openai.omit))["completion_token_ids"]) for _ in range(4)}
    assert len(free) == 4, "32 ids and 8 tokens: four equal draws by chance are out of the question"


def test_a_stop_string_ends_the_answer_before_it_whole_and_streamed(client: Any) -> None:
    said = text(client, max_tokens=30).choices[0].text
    stop = said[3:5]
    whole = text(client, max_tokens=30, stop=[stop])
    assert whole.choices[0].finish_reason == "stop" and whole.choices[0].stop_reason == stop
    assert whole.choices[0].text == said[: said.index(stop)]
    pieces = list(text(client, max_tokens=30, stop=[stop], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_logprobs_and_top_logprobs_are_those_of_the_record(client: Any) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    record = record_of(answer)
    assert [entry.logprob for entry in content] == record["logprobs"]
    assert [entry.token_id for entry in content] == record["completion_token_ids"]
    for entry, ids, values in zip(
        content, record["top_logprobs"]["token_ids"], record["top_logprobs"]["logprobs"], strict=True
    ):
        assert [best.token_id for best in entry.top_logprobs] == ids and len(ids) == 3
        assert [best.logprob for best in entry.top_logprobs] == values == sorted(values, reverse=True)
    legacy = text(client, logprobs=2).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == 8
    assert all(len(best) == 2 for best in legacy.top_logprobs)
    assert legacy.text_offset == [sum(map(len, legacy.tokens[:at])) for at in range(8)]


def test_echo_puts_the_prompt_first_with_its_logprobs(client: Any) -> None:
    plain = text(client)
    whole = text(client, echo=True, logprobs=1)
    prompt_text = "<bos>" if whole.choices[0].text.startswith("<bos>") else ""
    assert whole.choices[0].text.removeprefix(prompt_text).endswith(plain.choices[0].text)
    values = whole.choices[0].logprobs.token_logprobs
    assert values[0] is None and len(values) == 13
    assert values[5:] == record_of(whole)["logprobs"]
    pieces = list(text(client, echo=True, logprobs=1, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    streamed = [value for piece in pieces for value in piece.choices[0].logprobs.token_logprobs]
    assert streamed[0] is None and streamed[1:] == pytest.approx(values[1:], abs=1e-4)
    offsets = [at for piece in pieces for at in piece.choices[0].logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset


def test_a_bias_decides_the_draw_and_leaves_the_raw_logprob(client: Any) -> None:
    answer = text(client, logit_bias={"9": 100})
    record = record_of(answer)
    assert record["completion_token_ids"] == [9] * 8
    assert max(map(abs, record["sampling_logprobs"])) < 1e-4 and max(record["logprobs"]) < math.log(0.9)


def test_what_would_change_the_answer_is_refused_and_the_rest_is_named(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format={"type": "json_object"})
    assert caught.value.code == "invalid_field" and caught.value.param == "response_format"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    raw = client.chat.completions.with_raw_response.create(
        model="policy",
        messages=[{"role": "user", "content": "s"}],
        max_tokens=1,
        metadata={"a": "b"},
        extra_body={"nvext": {"colour": 1}},
    )
    assert raw.headers["x-hotloop-ignored"] == "metadata,nvext.colour"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_refuses_is_a_400_also_when_streamed(client: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        text(client, prompt=[1, 99], stream=stream)
    assert caught.value.code == "token_out_of_vocabulary"


def test_models_lists_the_name_and_the_snapshot(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "policy" and re.fullmatch(r"policy@step00000[12]", names[1])


def test_the_walk_pins_before_and_after_a_delta(client: Any, deployment: Deployment, trainer: PolicyTrainer) -> None:
    at_one = {"weight_version": {"exact_version": 1}}
    assert record_of(text(client, extra_body=at_one))["policy_version"] == 1
    pinned = text(client, model="accounts/a/models/policy@step000001")
    assert pinned.model == "policy@step000001"
    with pytest.raises(openai.ConflictError) as early:
        text(client, extra_body={"weight_version": {"min_version": 2}})
    assert early.value.code == "weight_version_not_ready"
    assert early.value.response.headers["retry-after"] == "1"
    details = early.value.body["details"]
    assert (details["current_policy_version"], details["requested_min"], details["target_policy_version"]) == (1, 2, 1)
    two = trainer.publish_policy()
    reply = deployment.load(two).body
    assert (reply["accepted"], reply["policy_version"], reply["current_snapshot_identity"]) == (True, 2, "step000001")
    deployment.wait_ready(two)
    answer = text(client, extra_body={"weight_version": {"min_version": 2}})
    assert record_of(answer)["policy_version"] == 2 and record_of(answer)["snapshot_identity"] == two
    for extra, model, code in (
        (at_one, "policy", "weight_version_gone"),
        ({}, "policy@step000001", "snapshot_not_served"),
    ):
        with pytest.raises(openai.ConflictError) as gone:
            text(client, model=model, extra_body=extra)
        assert gone.value.code == code and "retry-after" not in gone.value.response.headers
