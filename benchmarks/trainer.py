"""What each exact saving of the trainer is worth, as ratios taken inside one run.

Measures one optimizer step on real rollouts of the default task (sort five digits, 32 prompts x 16 answers, 0.1 M
parameters): the plain path, each saving alone, all together. Taken at the start of training (sampled accuracy about
0.4) and again after some rounds, since groups without signal and equal answers become more frequent. The variants
alternate, so that a busy machine slows all of them; the gap of each gradient to the plain one is printed beside.

Run: python benchmarks/trainer.py [--rounds 100] [--repeats 10] [--kind dense|moe] [--json FILE]     (needs torch)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from hotloop.algorithms.advantages import compute_group_advantages
from hotloop.loop.tasks import load_task_set
from hotloop.models.builtin import make_policy
from hotloop.models.decoder import compute_logits, forward
from hotloop.models.tokenizer import Tokenizer, open_tokenizer
from hotloop.models.weights import Arena
from hotloop.trainers.base import Batch, LossSettings, OptimizerSettings, TrainerSettings
from hotloop.trainers.packing import Savings
from hotloop.trainers.torch.trainer import TorchTrainer
from hotloop.types import Sample, Task

NUM_PROMPTS, GROUP_SIZE = 32, 16
VARIANTS = {
    "plain": Savings(),
    "prompt once per group": Savings(share_prompts=True),
    "zero-advantage skipped": Savings(skip_zero_advantage=True),
    "equal responses merged": Savings(merge_equal=True),
    "all": Savings(share_prompts=True, skip_zero_advantage=True, merge_equal=True),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant at one moment of training."""

    variant: str
    ms: float
    rows: int
    tokens: int
    gradient_gap: float


def sample_batch(arena: Arena, tokenizer: Tokenizer, tasks: list[Task], max_new: int, seed: int, round_: int) -> Batch:
    """Sample one round with the current weights; plain and slow, it is not what is measured."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [tokenizer.encode(str(task.prompt)) for task in tasks]
    width = len(prompts[0])
    assert all(len(prompt) == width for prompt in prompts)
    ids_BT = torch.tensor([prompt for prompt in prompts for _ in range(GROUP_SIZE)])
    logprobs = []
    with torch.no_grad():
        for _ in range(max_new):
            positions = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
            hidden = forward(arena.config, arena.params, ids_BT, positions).hidden_BTD[:, -1]
            all_logprobs = torch.log_softmax(compute_logits(arena.config, arena.params, hidden), -1)
            # One uniform number per answer: equal prefixes of a group get bit-equal logprobs from equal rows.
            drawn = torch.multinomial(all_logprobs.exp(), 1, generator=generator)
            logprobs.append(all_logprobs.gather(1, drawn)[:, 0])
            ids_BT = torch.cat((ids_BT, drawn), 1)
    logprobs_BR = torch.stack(logprobs, 1).tolist()
    stop = tokenizer.token_id("<eos>")
    rows, rewards = [], []
    for row, ids in enumerate(ids_BT.tolist()):
        answer = ids[width:]
        length = answer.index(stop) + 1 if stop in answer else len(answer)
        label = tokenizer.encode(str(tasks[row // GROUP_SIZE].label), add_special_tokens=False)
        rewards.append(float(answer[:length] == [*label, stop]))
        rows.append((ids[: width + length], logprobs_BR[row][:length]))
    groups = [row // GROUP_SIZE for row in range(len(rows))]
    advantages = compute_group_advantages(rewards, groups)
    samples = [
        Sample(
            ids=ids,
            mask=[0] * width + [1] * len(behaviour),
            behaviour_logprobs=[0.0] * width + behaviour,
            advantages=[0.0] * width + [float(advantages[row])] * len(behaviour),
            rollout_id=row,
            group_id=groups[row],
            oldest_policy_version=round_,
        )
        for row, (ids, behaviour) in enumerate(rows)
    ]
    return Batch(round_, samples, len(samples))


def measure(policy_dir: Path, weights: torch.Tensor, batch: Batch, repeats: int) -> list[Measured]:
    """Time one step of every variant from the same weights, in turns."""
    trainers = {}
    for name, savings in VARIANTS.items():
        trainers[name] = open_trainer(policy_dir, learning_rate=0.0)
        trainers[name]._savings = savings
        trainers[name].arena.flat.copy_(weights)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    metrics = {}
    for _ in range(repeats + 2):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            metrics[name] = trainer.train_round(batch)
            times[name].append((time.perf_counter() - began) * 1e3)
    plain = trainers["plain"].arena.grad
    assert plain is not None
    measured = []
    for name, trainer in trainers.items():
        assert trainer.arena.grad is not None
        gap = float((trainer.arena.grad - plain).norm() / plain.norm())
        ms = statistics.median(times[name][2:])
        rows, tokens = metrics[name]["train/computed_rows"], metrics[name]["train/computed_tokens"]
        measured.append(Measured(name, ms, int(rows), int(tokens), gap))
    return measured


def open_trainer(policy_dir: Path, *, learning_rate: float) -> TorchTrainer:
    """The default experiment's objective: clip, TIS, no KL."""
    optimizer = OptimizerSettings(lr=learning_rate, weight_decay=0.0, clip_grad=1.0)
    return TorchTrainer(
        TrainerSettings(policy_dir=str(policy_dir), loss=LossSettings(correction="tis"), optimizer=optimizer)
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of training between the two measurements")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kind", choices=("dense", "moe"), default="dense")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = load_task_set("sort5")
    draw = random.Random(options.seed)
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        policy_dir = Path(folder) / "policy"
        pairs = [(str(task.prompt), str(task.label)) for task in tasks.train]
        gate = [(str(task.prompt), str(task.label)) for task in tasks.gate]
        made = make_policy(policy_dir, kind=options.kind, seed=options.seed, items=pairs, gate=gate)
        print(f"{made.num_params:,} parameters, warmed up to {made.gate_accuracy:.2f} sampled")
        tokenizer = open_tokenizer(policy_dir)
        learner = open_trainer(policy_dir, learning_rate=5e-4)
        for round_ in range(options.rounds + 1):
            chosen = draw.sample(tasks.train, NUM_PROMPTS)
            batch = sample_batch(learner.arena, tokenizer, chosen, tasks.max_new_tokens, 1000 + round_, round_)
            if round_ in (0, options.rounds):
                right = sum(sample.advantages[-1] > 0 for sample in batch.samples)
                print(f"\nround {round_} ({right} of {len(batch.samples)} answers with a positive advantage)")
                measured = measure(policy_dir, learner.arena.flat, batch, options.repeats)
                print(f"{'':24}{'ms':>8}{'speed':>8}{'rows':>7}{'tokens':>8}{'gap':>10}")
                for one in measured:
                    ratio = measured[0].ms / one.ms
                    print(
                        f"{one.variant:24}{one.ms:8.1f}{ratio:7.1f}x{one.rows:7}{one.tokens:8}{one.gradient_gap:10.1e}"
                    )
                report[f"round_{round_}"] = [
                    {name: getattr(one, name) for name in Measured.__dataclass_fields__} for one in measured
                ]
            learner.train_round(batch)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
