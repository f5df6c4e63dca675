"""An experiment as slime's argument vector: which flags it writes, with which values, in which order.

Owns: `build_train_groups` (the arrays of `experiment.sh train`), `make_side_eval_choices` (the evaluation-only job),
`build_environment` (environment of driver and workers), `choose_driver`. Foreign names (`n_samples_per_prompt`,
`rollout_id`) live only here.

Promises: pure; the same choices give the same words. MODEL_ARGS of the model script come first and these groups after
them, because of a repeated flag the last one counts. Every flag exists in flags.json (test_export_grid.py).

Does not do: quoting (shell.py), the file around it (bundle.py), rules on the vector (argv_rules.py).

Source: slime 624b824a; slime docs, v0.4.0; observed behaviour of both parsers.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from hotloop.experiment.catalog.records import Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.layout import parse_external_addrs
from hotloop.experiment.sections import Algorithm, RemoteReward

Row = tuple[str, ...]

GPUS_PER_NODE = 8
SGLANG_CONFIG_FILE = ".slime-lab.sglang.yaml"
"""Stands for the path that the script makes when it writes the PD groups; the script passes its own variable."""

ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
REWARD_HOOK = "hotloop.integrations.slime.score"
"""Scores with the experiment's own verifier, for rewards that slime does not have."""
PUBLISH_HOOK = "hotloop.integrations.slime.publish_written"
SLIME_REWARDS = frozenset({"deepscaler", "math"})
"""Kinds of `[reward]` that are an `--rm-type` of slime too."""
ICEPOP_HOOK = "slime.backends.megatron_utils.loss.icepop_function"
NONZERO_STD_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
SCORE_CENTERING_HEAD = 128
"""Ids of the sampler's head that score centering keeps; slime docs, v0.4.0."""
SAVE_INTERVAL = 20
HICACHE_RATIO = 2


class ArgGroup(NamedTuple):
    """One bash array of the script: a name and rows of a flag with its values."""

    name: str
    rows: tuple[Row, ...]

    @property
    def words(self) -> list[str]:
        """All words in order."""
        return [word for row in self.rows for word in row]


def format_number(value: float) -> str:
    """Write a number as slime's scripts do: `1`, `0.28`, `1e-6`."""
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = repr(float(value))
    mantissa, exponent_mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent_mark else text


def choose_driver(choices: Experiment) -> str:
    """Return the script that slime starts: 624b824a has its own driver for async."""
    if choices.schedule == "async" and choices.slime_target == "624b824a":
        return "train_async.py"
    return "train.py"


def build_train_groups(choices: Experiment, model: Model) -> list[ArgGroup]:
    """Return every array of the training job after MODEL_ARGS.

    Args:
        choices: resolved (no recipe value left empty).
        model: the catalogue record that `choices.model` names.
    """
    groups = [
        ArgGroup("LAYOUT_ARGS", tuple(_layout_rows(choices))),
        ArgGroup("CHECKPOINT_ARGS", tuple(_checkpoint_rows(choices))),
        ArgGroup("ROLLOUT_ARGS", tuple(_rollout_rows(choices))),
        ArgGroup("OBJECTIVE_ARGS", tuple(_objective_rows(choices))),
        ArgGroup("PARALLEL_ARGS", tuple(_parallel_rows(choices, model))),
        ArgGroup("OPTIMIZER_ARGS", tuple(_optimizer_rows(choices))),
        ArgGroup("NUMERICS_ARGS", tuple(_numerics_rows(choices, model))),
        ArgGroup("SGLANG_ARGS", tuple(_sglang_rows(choices, model))),
        ArgGroup("TRANSPORT_ARGS", tuple(_transport_rows(choices))),
        ArgGroup("EVAL_ARGS", tuple(_inline_eval_rows(choices))),
        ArgGroup("EXTRA_ARGS", tuple((word,) for word in choices.export.slime_args)),
    ]
    return [group for group in groups if group.rows]


def build_train_argv(choices: Experiment, model: Model) -> list[str]:
    """Return the whole vector after MODEL_ARGS, with `SGLANG_CONFIG_FILE` for the path of the PD groups."""
    words = [word for group in build_train_groups(choices, model) for word in group.words]
    if choices.pd:
        words += ["--sglang-config", SGLANG_CONFIG_FILE]
    return words


def make_side_eval_choices(choices: Experiment) -> Experiment:
    """Return the evaluation-only job that reads the newest checkpoint (X05.4), as choices.

    slime evaluates and stops when `--num-rollout` is 0 and an eval interval is set. The job runs on its own GPUs with
    the layout of the experiment, colocated, on the sync driver; nothing of it enters training data.
    """
    return choices.model_copy(
        update={
            "schedule": "sync",
            "layout": "colocate",
            "transport": "nccl",
            "pd": False,
            "partial": False,
            "mask_prefix": False,
            "straw": False,
            "eval_mode": "inline",
            "eval_interval": 1,
            "rounds": 0,
            "rounds_more": None,
            "resume_from": choices.save_path or "",
        }
    )


def build_environment(choices: Experiment) -> dict[str, str]:
    """Return the environment of the job's driver and workers."""
    env = {
        "PYTHONPATH": choices.megatron_path or "",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVSHMEM_DISABLE_NCCL": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if choices.precision == "fp8train":
        env["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    if choices.sc:
        env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    if choices.deterministic:
        env["NCCL_ALGO"] = "Ring"
        env["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if uses_own_reward(choices):
        env["HOTLOOP_REWARD"] = json.dumps(choices.reward.model_dump(mode="json"), sort_keys=True)
    if publishes(choices):
        env["ROLLOUT_BUCKET"] = choices.export.publish
    return env


def is_glm5(model: Model) -> bool:
    """Whether a model is of the GLM-5 family: sparse attention with an indexer, served by the sparse kernels."""
    return bool(model.arch.index_layers) or "glm5" in model.model_script


def _layout_rows(choices: Experiment) -> list[Row]:
    rows: list[Row] = [
        ("--actor-num-nodes", str(choices.nodes)),
        ("--actor-num-gpus-per-node", str(GPUS_PER_NODE)),
    ]
    if choices.layout == "colocate":
        rows.append(("--colocate",))
    elif choices.layout == "separate":
        rows.append(("--rollout-num-gpus", str(choices.rollout_gpus)))
    else:
        rows.append(("--rollout-external-engine-addrs", *parse_external_addrs(choices.external_addrs)))
    return rows


def _checkpoint_rows(choices: Experiment) -> list[Row]:
    rows: list[Row] = [
        ("--hf-checkpoint", choices.hf_path or ""),
        ("--ref-load", choices.train_path or ""),
    ]
    if choices.resume_from:
        rows.append(("--load", choices.resume_from))
    rows.append(("--save", choices.save_path or ""))
    rows.append(("--save-interval", "1" if choices.straw else str(SAVE_INTERVAL)))
    return rows


def _rollout_rows(choices: Experiment) -> list[Row]:
    sampling, data = choices.sampling, choices.data
    rows: list[Row] = [("--prompt-data", prompt_data(choices))]
    rows.append(("--input-key", data.prompt_key))
    rows.append(("--label-key", data.label_key))
    if data.apply_chat_template:
        rows.append(("--apply-chat-template",))
    if data.shuffle:
        rows.append(("--rollout-shuffle",))
    rows += _reward_rows(choices)
    if choices.schedule == "async":
        rows += [("--rollout-function-path", ASYNC_ROLLOUT), ("--skip-eval-before-train",)]
    rows += [
        ("--num-rollout", str(choices.rounds)),
        ("--rollout-batch-size", str(sampling.num_groups)),
        ("--n-samples-per-prompt", str(sampling.group_size)),
        ("--global-batch-size", str(global_batch_size(choices))),
        ("--rollout-max-response-len", str(choices.response_tokens)),
        ("--rollout-temperature", format_number(sampling.temperature)),
        ("--rollout-top-p", format_number(sampling.top_p)),
        ("--rollout-top-k", str(sampling.top_k)),
    ]
    if sampling.stop:
        rows.append(("--rollout-stop", *sampling.stop))
    over_sampling = sampling.over_sampling
    if choices.partial:
        rows.append(("--partial-rollout",))
        if over_sampling is None and choices.schedule == "sync":
            over_sampling = 2 * sampling.num_groups
    if over_sampling is not None:
        rows.append(("--over-sampling-batch-size", str(over_sampling)))
    if choices.mask_prefix:
        rows.append(("--mask-offpolicy-in-partial-rollout",))
    if sampling.drop_zero_std:
        rows.append(("--dynamic-sampling-filter-path", NONZERO_STD_FILTER))
    return rows


_SLICED_PATH = re.compile(r"(.+)@(\[-?\d*:-?\d*\])")
"""A data path with a row slice, as slime and the loop read it."""


def strip_slice(path: str) -> str:
    """Return the file of a data path that may end in `@[a:b]`."""
    found = _SLICED_PATH.fullmatch(path)
    return found[1] if found else path


def prompt_data(choices: Experiment) -> str:
    """Return the data path with its row slice; a slice of the path itself counts before `data.slice`."""
    path = choices.data_path or ""
    if not choices.data.slice or strip_slice(path) != path:
        return path
    return f"{path}@{choices.data.slice}"


def global_batch_size(choices: Experiment) -> int:
    """Return rollouts per optimizer step; a round that does not divide evenly drops the rest (slime 624b824a)."""
    return choices.sampling.num_groups * choices.sampling.group_size // choices.optimizer.steps_per_round


def _reward_rows(choices: Experiment) -> list[Row]:
    if choices.task == "custom":
        return [
            ("--custom-generate-function-path", choices.generate_hook),
            ("--custom-rm-path", choices.reward_hook),
        ]
    reward = choices.reward
    if isinstance(reward, RemoteReward):
        return [("--rm-type", "remote_rm"), ("--rm-url", reward.url)]
    if reward.kind in SLIME_REWARDS:
        return [("--rm-type", reward.kind)]
    return [("--custom-rm-path", REWARD_HOOK)]


def uses_own_reward(choices: Experiment) -> bool:
    """Whether the job scores with a verifier of this package, which every node must then have installed."""
    kind = choices.reward.kind
    return choices.task == "math" and kind not in SLIME_REWARDS and kind != "remote"


def publishes(choices: Experiment) -> bool:
    """Whether the trainer publishes every policy version that it writes (E13)."""
    return choices.transport == "delta" and bool(choices.export.publish)


def _objective_rows(choices: Experiment) -> list[Row]:
    algorithm = choices.algorithm
    if choices.sc:
        rows: list[Row] = [
            ("--use-score-centering",),
            ("--score-centering-top-k", str(SCORE_CENTERING_HEAD)),
            ("--pg-loss-type", "reinforce"),
        ]
        if algorithm.kind != "grpo":
            rows.append(("--advantage-estimator", algorithm.kind))
    else:
        rows = [
            ("--advantage-estimator", algorithm.kind),
            ("--eps-clip", format_number(algorithm.eps_clip)),
            ("--eps-clip-high", format_number(algorithm.eps_clip_high)),
        ]
        if algorithm.dual_clip is not None:
            rows.append(("--eps-clip-c", format_number(algorithm.dual_clip)))
    if not choices.sc or algorithm.kl_coef:
        rows.append(("--kl-coef", format_number(algorithm.kl_coef)))
    if algorithm.kl_loss_coef:
        rows += [
            ("--use-kl-loss",),
            ("--kl-loss-coef", format_number(algorithm.kl_loss_coef)),
            ("--kl-loss-type", algorithm.kl_loss_type),
        ]
    if not choices.sc or algorithm.entropy_coef:
        rows.append(("--entropy-coef", format_number(algorithm.entropy_coef)))
    if choices.sc or not algorithm.normalize_std:
        rows.append(("--disable-grpo-std-normalization",))
    if choices.sc or algorithm.aggregation == "per_token":
        rows.append(("--calculate-per-token-loss",))
    rows += _estimator_rows(algorithm)
    rows += _correction_rows(choices)
    if choices.r3:
        rows.append(("--use-rollout-routing-replay",))
    return rows


def _estimator_rows(algorithm: Algorithm) -> list[Row]:
    rows: list[Row] = []
    if algorithm.kind in ("reinforce_plus_plus", "reinforce_plus_plus_baseline") and algorithm.normalize_advantages:
        rows.append(("--normalize-advantages",))
    if algorithm.kind == "reinforce_plus_plus" and algorithm.gamma != 1:
        rows.append(("--gamma", format_number(algorithm.gamma)))
    return rows


def _correction_rows(choices: Experiment) -> list[Row]:
    if choices.correction == "none":
        return []
    low = "0" if choices.correction == "tis" else "0.5"
    rows: list[Row] = [("--use-tis",), ("--tis-clip-low", low), ("--tis-clip", "2")]
    if choices.correction == "icepop":
        rows.append(("--custom-tis-function-path", ICEPOP_HOOK))
    return rows


def _parallel_rows(choices: Experiment, model: Model) -> list[Row]:
    recipe = model.recipe
    rows: list[Row] = [("--tensor-model-parallel-size", str(recipe.tp))]
    if recipe.tp > 1:
        rows.append(("--sequence-parallel",))
    rows += [
        ("--pipeline-model-parallel-size", str(recipe.pp)),
        ("--context-parallel-size", str(recipe.cp)),
        ("--expert-model-parallel-size", str(recipe.ep)),
        ("--expert-tensor-parallel-size", str(recipe.etp)),
    ]
    if recipe.first_stage_layers:
        rows.append(("--decoder-first-pipeline-num-layers", str(recipe.first_stage_layers)))
    if recipe.last_stage_layers:
        rows.append(("--decoder-last-pipeline-num-layers", str(recipe.last_stage_layers)))
    if choices.recompute:
        rows += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    rows += [
        ("--use-dynamic-batch-size",),
        ("--max-tokens-per-gpu", str(choices.optimizer.max_tokens_per_microbatch or recipe.max_tokens_per_gpu)),
    ]
    return rows


def _optimizer_rows(choices: Experiment) -> list[Row]:
    optimizer = choices.optimizer
    rows: list[Row] = [
        ("--optimizer", "adam"),
        ("--lr", format_number(optimizer.lr)),
        ("--lr-decay-style", optimizer.lr_decay_style),
        ("--weight-decay", format_number(optimizer.weight_decay)),
        ("--adam-beta1", format_number(optimizer.beta1)),
        ("--adam-beta2", format_number(optimizer.beta2)),
    ]
    if optimizer.lr_min_frac:
        rows.append(("--min-lr", format_number(optimizer.lr * optimizer.lr_min_frac)))
    if optimizer.lr_warmup_steps:
        total_steps = max(1, choices.rounds * optimizer.steps_per_round)
        fraction = min(1.0, optimizer.lr_warmup_steps / total_steps)
        rows.append(("--lr-warmup-fraction", format_number(fraction)))
    if optimizer.clip_grad != 1:
        rows.append(("--clip-grad", format_number(optimizer.clip_grad)))
    if choices.cpu_adam:
        rows += [
            ("--optimizer-cpu-offload",),
            ("--overlap-cpu-optimizer-d2h-h2d",),
            ("--use-precision-aware-optimizer",),
        ]
    return rows


def _numerics_rows(choices: Experiment, model: Model) -> list[Row]:
    rows: list[Row] = [
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
        ("--accumulate-allreduce-grads-in-fp32",),
        ("--attention-softmax-in-fp32",),
    ]
    if model.id != "moonlight-16b-a3b":
        # Its scripts leave the backend to Transformer Engine.
        rows.append(("--attention-backend", "flash"))
    if model.arch.moe:
        rows.append(("--moe-token-dispatcher-type", model.recipe.moe_dispatcher))
        if model.recipe.moe_dispatcher == "flex":
            rows.append(("--moe-enable-deepep",))
    if choices.precision == "fp8train":
        rows += [("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise")]
    if choices.deterministic:
        rows.append(("--deterministic-mode",))
    return rows


def _sglang_rows(choices: Experiment, model: Model) -> list[Row]:
    recipe = model.recipe
    rows: list[Row] = [
        ("--rollout-num-gpus-per-engine", str(recipe.engine_gpus)),
        ("--sglang-mem-fraction-static", format_number(recipe.mem_fraction_static)),
        ("--sglang-server-concurrency", str(choices.concurrency)),
    ]
    if recipe.engine_dp > 1:
        rows += [
            ("--sglang-enable-dp-attention",),
            ("--sglang-dp-size", str(recipe.engine_dp)),
            ("--sglang-enable-dp-lm-head",),
            ("--sglang-moe-dense-tp-size", "1"),
        ]
    if recipe.engine_ep > 1:
        rows.append(("--sglang-ep-size", str(recipe.engine_ep)))
    if model.id == "deepseek" or is_glm5(model):
        rows += [("--sglang-moe-a2a-backend", "deepep"), ("--sglang-deepep-mode", "auto")]
    if is_glm5(model):
        rows += [
            ("--sglang-page-size", "64"),
            ("--sglang-nsa-prefill-backend", "flashmla_sparse"),
            ("--sglang-nsa-decode-backend", "flashmla_kv"),
            ("--sglang-disable-overlap-schedule",),
        ]
    if choices.kv_dtype == "fp8":
        rows.append(("--sglang-kv-cache-dtype", "fp8_e4m3"))
    if model.arch.is_hybrid:
        rows += _hybrid_rows(choices)
    rows += _eagle_rows(choices)
    if choices.hicache and not choices.pd:
        rows += [("--sglang-enable-hierarchical-cache",), ("--sglang-hicache-ratio", str(HICACHE_RATIO))]
    if choices.deterministic:
        rows.append(("--sglang-enable-deterministic-inference",))
        if model.id == "dense":
            rows.append(("--sglang-attention-backend", "flashinfer"))
    if choices.pd:
        rows += [
            ("--sglang-disaggregation-transfer-backend", "mooncake"),
            ("--sglang-disaggregation-ib-device", choices.rdma_device),
        ]
    return rows


def _hybrid_rows(choices: Experiment) -> list[Row]:
    rows: list[Row] = [("--sglang-mamba-scheduler-strategy", "extra_buffer")]
    if choices.ssm_dtype != "auto":
        rows.append(("--sglang-mamba-ssm-dtype", choices.ssm_dtype))
    if choices.ssm_ratio is not None:
        rows.append(("--sglang-mamba-full-memory-ratio", format_number(choices.ssm_ratio)))
    return rows


def _eagle_rows(choices: Experiment) -> list[Row]:
    if choices.eagle == "off":
        return []
    steps = choices.eagle_steps or 0
    rows: list[Row] = [
        ("--sglang-speculative-algorithm", "EAGLE"),
        ("--sglang-speculative-num-steps", str(steps)),
        ("--sglang-speculative-eagle-topk", "1"),
        ("--sglang-speculative-num-draft-tokens", str(steps + 1)),
    ]
    if choices.eagle == "external":
        rows.append(("--sglang-speculative-draft-model-path", choices.draft_path))
    return rows


def _transport_rows(choices: Experiment) -> list[Row]:
    rows: list[Row] = []
    if choices.transport != "nccl":
        rows += [
            ("--update-weight-transport", "disk"),
            ("--update-weight-mode", "full" if choices.transport == "disk" else "delta"),
            ("--update-weight-disk-dir", choices.weight_dir),
        ]
        if choices.local_weight_dir:
            rows.append(("--update-weight-local-checkpoint-dir", choices.local_weight_dir))
    if publishes(choices):
        rows.append(("--custom-update-weight-post-write-path", PUBLISH_HOOK))
    if choices.straw:
        rows += [
            ("--rollout-data-transport", "straw"),
            ("--rollout-data-dir", choices.straw_dir),
            ("--rollout-queue-run-id", choices.straw_run_id),
            ("--rollout-storage-profile", "juicefs"),
            ("--rollout-storage-declaration", choices.straw_declaration),
        ]
    return rows


def _inline_eval_rows(choices: Experiment) -> list[Row]:
    if choices.eval_mode != "inline" or choices.schedule != "sync":
        return []
    return [
        ("--eval-interval", str(choices.eval_interval)),
        ("--eval-prompt-data", "aime", choices.eval_data),
        ("--n-samples-per-eval-prompt", str(choices.eval_samples)),
    ]
