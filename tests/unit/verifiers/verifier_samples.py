"""Rollouts and reward functions that the verifier tests share."""

from __future__ import annotations

import asyncio
from typing import Any

from hotloop.types import Completion, Rollout, Score, Task


def rollout_of(response: str, label: str | None = "42", *, number: int = 0, prompt: Any = "What?") -> Rollout:
    task = Task(f"t{number}", prompt, label)
    return Rollout(number, number, 0, task, [1], Completion([], [], [], [], "stop"), response, "completed")


def length_reward(task: Task, response: str) -> float:
    return float(len(response))


async def slow_length_reward(task: Task, response: str) -> Score:
    await asyncio.sleep(0)
    return Score(float(len(response)), "length", {"chars": float(len(response))})


def no_reward(task: Task, response: str) -> None:
    return None


def nan_reward(task: Task, response: str) -> float:
    return float("nan")


def dict_reward(task: Task, response: str) -> dict[str, float]:
    return {"score": 1.0}


def broken_reward(task: Task, response: str) -> float:
    return 1.0 / (len(response) - len(response))


async def broken_async_reward(task: Task, response: str) -> float:
    raise KeyError("missing column")


def one_argument(task: Task) -> float:
    return 0.0


NOT_A_FUNCTION = 3
