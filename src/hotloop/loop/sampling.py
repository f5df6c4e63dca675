"""Prompts in, groups of rollouts out: encoding, seeds, requests to the engine, text, status.

    tasks -> encode -> one request per group, all at once -> engine -> completions -> rollouts in group order

Owns: `Sampler`. It waits for the engine's completions; it is unblocked by the last one, or by `stop`.

Promises: a rollout's seed follows from the run's seed, its group id and its place among the siblings, so the same round
gives the same tokens in any run; groups come back in the order of their ids. A group whose request fails is asked for
once more, and then its rollouts are failed rollouts with the reason.
Does not do: rewards (scoring.py), which tasks (source.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hotloop.engines.base import Engine, GenerateRequest, collect
from hotloop.errors import InputError, Problem, ServiceError
from hotloop.loop.seeds import derive_seeds
from hotloop.loop.source import MAX_PROBLEMS_SHOWN
from hotloop.models.tokenizer import Tokenizer, cut_at_stop
from hotloop.types import Completion, Group, Rollout, RolloutStatus, SamplingParams, Task

MAX_CACHED_TEXTS = 20_000
_STATUS: dict[str, RolloutStatus] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
_NOTHING = Completion([], [], [], [], "abort")


def encode_prompt(tokenizer: Tokenizer, task: Task, applies_chat_template: bool) -> list[int]:
    """Turn a task's prompt into ids; messages always go through the chat template.

    Raises:
        InputError: the tokenizer's own codes.
    """
    if not isinstance(task.prompt, str):
        return tokenizer.encode_chat(task.prompt)
    if applies_chat_template and tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": task.prompt}])
    return tokenizer.encode(task.prompt)


def find_longest_prompt(tokenizer: Tokenizer, tasks: Sequence[Task], applies_chat_template: bool, limit: int) -> int:
    """Return the length of the longest prompt in tokens.

    Raises:
        InputError: every prompt that leaves no room for one new token (`prompt_too_long`), together.
    """
    lengths = [len(encode_prompt(tokenizer, task, applies_chat_template)) for task in tasks]
    problems = [
        Problem(
            "prompt_too_long",
            f"the prompt has {length} tokens, and the context of {limit} has room for {limit - 1} and an answer",
            task.task_id,
            "Shorten the row or leave it out (data.slice), or take a policy with a longer context.",
        )
        for task, length in zip(tasks, lengths, strict=True)
        if length > limit - 1
    ]
    if problems:
        raise InputError.of(problems[:MAX_PROBLEMS_SHOWN])
    return max(lengths)


@dataclass(slots=True)
class Sampler:
    """Turns tasks into groups with one engine."""

    engine: Engine
    tokenizer: Tokenizer
    params: SamplingParams
    seed: int
    max_context: int
    """Tokens of prompt and answer together."""
    applies_chat_template: bool = False
    """Plain text prompts are put into the policy's chat template, if it has one."""
    returns_routed_experts: bool = False
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    async def sample(
        self, tasks: Sequence[Task], *, first_group_id: int, group_size: int, purpose: str = "rollout"
    ) -> list[Group]:
        """Sample one group for each task.

        Args:
            purpose: part of the seeds, so that evaluation draws its own.
        """
        prompts = [encode_prompt(self.tokenizer, task, self.applies_chat_template) for task in tasks]
        return list(
            await asyncio.gather(
                *(
                    self._sample_group(task, ids, first_group_id + offset, group_size, purpose)
                    for offset, (task, ids) in enumerate(zip(tasks, prompts, strict=True))
                )
            )
        )

    async def _sample_group(
        self, task: Task, prompt_ids: list[int], group_id: int, group_size: int, purpose: str
    ) -> Group:
        room = self.max_context - len(prompt_ids)
        params = self.params
        if params.max_new_tokens > room:
            params = replace(params, max_new_tokens=room)
        request = GenerateRequest(
            request_id=f"{purpose}-{group_id}",
            prompt_ids=prompt_ids,
            params=params,
            n=group_size,
            seeds=derive_seeds(group_size, self.seed, purpose, group_id),
            return_routed_experts=self.returns_routed_experts,
            return_support=params.top_p < 1 or params.top_k > 0,
        )
        failure = ""
        completions: list[Completion] = []
        for _ in range(2):
            try:
                completions = await collect(self.engine, request)
                break
            except ServiceError as error:
                failure = str(error)
        first_id = group_id * group_size
        rollouts = [
            self._rollout(task, prompt_ids, group_id, first_id, index, completion)
            for index, completion in enumerate(completions)
        ] or [
            Rollout(first_id + index, group_id, index, task, prompt_ids, _NOTHING, "", "failed", failure=failure)
            for index in range(group_size)
        ]
        return Group(group_id, task, rollouts)

    def _rollout(
        self, task: Task, prompt_ids: list[int], group_id: int, first_id: int, index: int, completion: Completion
    ) -> Rollout:
        status = _STATUS[completion.finish_reason]
        text = self.text_of(completion)
        return Rollout(first_id + index, group_id, index, task, prompt_ids, completion, text, status)

    def text_of(self, completion: Completion) -> str:
        """Decode an answer without the token that ended it; other special tokens stay visible, so they never match."""
        key = tuple(completion.token_ids)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= MAX_CACHED_TEXTS:
                self._texts.clear()
            ends = bool(key) and completion.finish_reason == "stop" and key[-1] in self.tokenizer.stop_ids
            text = self.tokenizer.decode(key[:-1] if ends else key, skip_special_tokens=False)
            text = self._texts[key] = cut_at_stop(text, self.params.stop)
        return text
