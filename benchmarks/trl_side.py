"""The TRL side of loop_vs_trl.py: GRPOTrainer on the default task, in an environment of its own (see there).

Reads one JSON file (policy directory, items, settings), prints one JSON line: seconds of each step without evaluation,
and the accuracies along the way. Same model, task, optimiser, group and batch sizes as the default run of hotloop.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

BOS = "<bos>"
"""GRPOTrainer encodes prompts without special tokens, so the text carries it."""


@torch.no_grad()
def measure_accuracy(model, tokenizer, items, *, greedy, max_new_tokens):
    """Exact match, end token included, of one answer per item; the KV cache is used."""
    was_training = model.training
    model.eval()
    batch = tokenizer([BOS + prompt for prompt, _ in items], add_special_tokens=False, return_tensors="pt")
    out = model.generate(
        **batch, do_sample=not greedy, max_new_tokens=max_new_tokens, temperature=1.0, top_k=0, top_p=1.0
    )
    model.train(was_training)
    answers = out[:, batch["input_ids"].shape[1] :].tolist()
    right = 0
    for answer, (_, label) in zip(answers, items, strict=True):
        wanted = [*tokenizer(label, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        right += answer[: len(wanted)] == wanted
    return right / len(items)


class Probe(TrainerCallback):
    """Times every step and measures accuracy in between, off the clock."""

    def __init__(self, tokenizer, job):
        self.tokenizer, self.job = tokenizer, job
        self.step_seconds, self.curve = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.step_seconds.append(time.perf_counter() - self.began)
        job = self.job
        if job["eval_every"] and state.global_step % job["eval_every"] == 0:
            greedy, sampled = (
                measure_accuracy(model, self.tokenizer, job["held_out"], greedy=g, max_new_tokens=job["max_new_tokens"])
                for g in (True, False)
            )
            self.curve.append([state.global_step, sum(self.step_seconds), greedy, sampled])
            if greedy >= job["stop_greedy"] and sampled >= job["stop_sampled"]:
                control.should_training_stop = True
        if sum(self.step_seconds) > job["max_s"]:
            control.should_training_stop = True
        return control


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["policy"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["policy"], dtype=torch.float32)
    labels = {BOS + prompt: label for prompt, label in job["train"]}
    ids = tokenizer(next(iter(labels)), add_special_tokens=False)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1

    def reward(prompts, completions, **kwargs):
        return [
            float(completion.removesuffix("<eos>") == labels[prompt])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job["num_groups"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="linear",
        warmup_steps=5,
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=50,
        save_strategy="no",
        seed=job["seed"],
        disable_tqdm=True,
        log_completions=False,
    )
    probe = Probe(tokenizer, job)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        processing_class=tokenizer,
        callbacks=[probe],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in labels]),
    )
    trainer.train()
    print("RESULT " + json.dumps({"step_seconds": probe.step_seconds, "curve": probe.curve}), flush=True)


if __name__ == "__main__":
    main()
