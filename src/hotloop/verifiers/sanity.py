"""The reward sanity check (X03): score answers whose reward is known, before anything is trained on.

Owns: how a reference answer is wrapped, the five tests of experiment.md X03, and their findings.

Promises: an error finding means that the reward cannot teach what the labels say; a note does not stop a run.
Does not do: sampling (rollouts of the policy are handed in), the planner's own note about deepscaler.

X03.1 error `reward_never_positive`: every reference scores 0 for want of a think-end tag or a response marker
X03.2 error `reward_rejects_reference`, `reward_accepts_wrong`: a reference does not score 1, an altered one not 0
X03.3 note `zero_variance`: all rewards of at least 8 prompts are equal
X03.4 error `reward_invalid`, `reward_raised`, naming the rollout: None, NaN, not a number, or an exception
X03.5 error `function_not_found`, `function_signature`: a hook cannot be imported or called

A user's function or service may want another form than the bare label, so for them X03.2 is a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hotloop.errors import HotloopError, render_message
from hotloop.types import Completion, Rollout, Score, Task
from hotloop.verifiers.base import Verifier, score_rollouts
from hotloop.verifiers.boxed import RESPONSE_MARKER, THINK_END
from hotloop.verifiers.python import check_signature, resolve_function

MIN_PROMPTS_FOR_VARIANCE = 8
"""Below so many prompts, equal rewards say nothing (X03.3)."""

_MAX_REFERENCES = 8
"""Tasks whose reference answer is scored."""

_ALTERED = "not the answer"
"""Wrapped in place of the label; no label of a sensible task equals it."""

_BOXED_KINDS = ("math", "deepscaler")
_OPEN_KINDS = ("python", "remote")


@dataclass(frozen=True, slots=True)
class SanityFinding:
    """One thing that the check found."""

    code: str
    level: Literal["error", "note"]
    why: str
    where: str = ""
    do: str = ""

    def __str__(self) -> str:
        return render_message(self.code, self.why, where=self.where, do=self.do)


def wrap_answer(answer: str, kind: str, chat_template: str) -> str:
    """Write an answer as a response of a model with this chat template would hold it.

    Args:
        answer: the bare answer.
        kind: of the reward; `math` and `deepscaler` want a box.
        chat_template: its source; a think-end tag or a response marker in it will be in responses too.
    """
    text = f"The answer is \\boxed{{{answer}}}." if kind in _BOXED_KINDS else answer
    if kind != "deepscaler":
        return text
    if THINK_END in chat_template:
        return f"Thinking.\n{THINK_END}\n\n{text}"
    if RESPONSE_MARKER in chat_template:
        return f"{RESPONSE_MARKER}\n{text}"
    return text


async def check_references(
    verifier: Verifier, kind: str, tasks: Sequence[Task], *, chat_template: str = ""
) -> list[SanityFinding]:
    """Run X03.1, X03.2 and X03.4 on reference answers.

    Args:
        verifier: to be checked.
        kind: `reward.kind`.
        tasks: of the data set; the first few with a label are used. `format` and `program` judge no bare label, so
            nothing is scored for them.
        chat_template: source of the policy's chat template, or empty.
    """
    chosen = [task for task in tasks if task.label is not None and task.label.strip()][:_MAX_REFERENCES]
    if kind in ("format", "program") or not chosen:
        return []
    right = [
        _make_rollout(task, wrap_answer(task.label or "", kind, chat_template), n) for n, task in enumerate(chosen)
    ]
    wrong = [_make_rollout(task, wrap_answer(_ALTERED, kind, chat_template), n) for n, task in enumerate(chosen)]
    try:
        scores = await score_rollouts(verifier, [*right, *wrong])
    except HotloopError as error:
        return [SanityFinding(error.code, "error", error.why, error.where, error.do)]
    right_scores, wrong_scores = scores[: len(right)], scores[len(right) :]
    if (
        kind == "deepscaler"
        and THINK_END not in chat_template
        and RESPONSE_MARKER not in chat_template
        and not any(score.reward for score in right_scores)
    ):
        return [
            SanityFinding(
                "reward_never_positive",
                "error",
                f"deepscaler reads the text after {THINK_END} or {RESPONSE_MARKER}, and this policy's chat template"
                f" produces neither: all {len(right)} correct boxed answers score 0",
                where="reward.kind = 'deepscaler'",
                do="Use reward.kind = 'math', or a policy whose chat template opens a thinking block.",
            )
        ]
    level: Literal["error", "note"] = "note" if kind in _OPEN_KINDS else "error"
    findings = []
    for rollout, score in zip(right, right_scores, strict=True):
        if score.reward != 1.0:
            findings.append(_unexpected("reward_rejects_reference", level, verifier.name, rollout, score, wanted=1))
            break
    for rollout, score in zip(wrong, wrong_scores, strict=True):
        if score.reward != 0.0:
            findings.append(_unexpected("reward_accepts_wrong", level, verifier.name, rollout, score, wanted=0))
            break
    return findings


async def check_rollouts(verifier: Verifier, rollouts: Sequence[Rollout]) -> list[SanityFinding]:
    """Run X03.3 and X03.4 on rollouts that the policy sampled."""
    try:
        scores = await score_rollouts(verifier, rollouts)
    except HotloopError as error:
        return [SanityFinding(error.code, "error", error.why, error.where, error.do)]
    num_prompts = len({rollout.group_id for rollout in rollouts})
    rewards = {score.reward for score in scores}
    if num_prompts < MIN_PROMPTS_FOR_VARIANCE or len(rewards) != 1:
        return []
    return [
        SanityFinding(
            "zero_variance",
            "note",
            f"all {len(scores)} rewards of {num_prompts} prompts are {rewards.pop():g}, so no advantage differs from 0",
            where=f"reward {verifier.name}",
            do="Look at the responses: the policy may be too weak or too strong for the task.",
        )
    ]


def check_hooks(hooks: Mapping[str, str], arguments: Mapping[str, tuple[str, ...]]) -> list[SanityFinding]:
    """Run X03.5: import every hook and bind the arguments that it will be called with.

    Args:
        hooks: hook name to dotted path.
        arguments: hook name to the names of its positional arguments; a hook that is absent is only imported.
    """
    findings = []
    for name, dotted in hooks.items():
        try:
            function = resolve_function(dotted, where=name)
            if name in arguments:
                check_signature(function, arguments[name], dotted=dotted, where=name)
        except HotloopError as error:
            findings.append(SanityFinding(error.code, "error", error.why, error.where, error.do))
    return findings


def _make_rollout(task: Task, response: str, number: int) -> Rollout:
    empty = Completion([], [], [], [], "stop")
    return Rollout(number, number, 0, task, [], empty, response, "completed")


def _unexpected(
    code: str, level: Literal["error", "note"], name: str, rollout: Rollout, score: Score, *, wanted: int
) -> SanityFinding:
    kind = "correct" if wanted else "altered"
    return SanityFinding(
        code,
        level,
        f"the {kind} answer {rollout.response!r} scores {score.reward:g} ({score.reason or 'no reason given'}),"
        f" and must score {wanted}",
        where=f"reward {name}, task {rollout.task.task_id} (label {rollout.task.label!r})",
        do="Check the label column and the reward's kind.",
    )
