"""Section 2: which flags each choice writes, with which values."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import (
    build_environment,
    build_train_argv,
    choose_driver,
    format_number,
)
from hotloop.experiment.flags import split_flags
from hotloop.experiment.resolve import resolve


def argv(**choices: Any) -> list[str]:
    catalog = load_catalog()
    resolved = resolve(Experiment.model_validate(choices), catalog)
    return build_train_argv(resolved, find_model(catalog, resolved.model))


def environment(**choices: Any) -> dict[str, str]:
    return build_environment(resolve(Experiment.model_validate(choices)))


def text(words: list[str]) -> str:
    return " " + " ".join(words) + " "


def added(base: dict[str, Any], change: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the uses that a change adds and those that it takes away, one text each."""
    before = {" ".join((use.name, *use.values)) for use in split_flags(argv(**base))[0]}
    after = {" ".join((use.name, *use.values)) for use in split_flags(argv(**base, **change))[0]}
    return after - before, before - after


SEPARATE = {"layout": "separate"}

ROWS: list[tuple[str, dict[str, Any], dict[str, Any], set[str], set[str]]] = [
    ("layout separate", {}, {"layout": "separate"}, {"--rollout-num-gpus 8"}, {"--colocate"}),
    (
        "layout external",
        {},
        {"layout": "external", "external_addrs": "h1:80, [::1]:81"},
        {"--rollout-external-engine-addrs h1:80 [::1]:81"},
        {"--colocate"},
    ),
    (
        "schedule async",
        SEPARATE,
        {"schedule": "async"},
        {
            "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "--skip-eval-before-train",
        },
        set(),
    ),
    ("nodes", {}, {"nodes": 2}, {"--actor-num-nodes 2"}, {"--actor-num-nodes 1"}),
    ("rolloutGpus", SEPARATE, {"rollout_gpus": 32}, {"--rollout-num-gpus 32"}, {"--rollout-num-gpus 8"}),
    (
        "task custom",
        {},
        {"task": "custom", "generate_hook": "m.g", "reward_hook": "m.r"},
        {"--custom-generate-function-path m.g", "--custom-rm-path m.r"},
        {"--rm-type deepscaler"},
    ),
    (
        "precision fp8",
        {},
        {"precision": "fp8"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash-FP8"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash"},
    ),
    (
        "precision int4",
        {},
        {"precision": "int4"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash-INT4"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash"},
    ),
    (
        "precision fp8train",
        {},
        {"precision": "fp8train"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash-FP8", "--fp8-format e4m3", "--fp8-recipe blockwise"},
        {"--hf-checkpoint /data/models/GLM-4.7-Flash"},
    ),
    ("kvDtype", {}, {"kv_dtype": "fp8"}, {"--sglang-kv-cache-dtype fp8_e4m3"}, set()),
    (
        "ssm choices of a hybrid",
        {"model": "qwen38"},
        {"ssm_dtype": "float32", "ssm_ratio": 1.5},
        {"--sglang-mamba-ssm-dtype float32", "--sglang-mamba-full-memory-ratio 1.5"},
        set(),
    ),
    ("ssm choices elsewhere", {}, {"ssm_dtype": "float32", "ssm_ratio": 1.5}, set(), set()),
    (
        "correction none",
        {},
        {"correction": "none"},
        set(),
        {"--use-tis", "--tis-clip-low 0", "--tis-clip 2"},
    ),
    (
        "correction icepop",
        {},
        {"correction": "icepop"},
        {"--tis-clip-low 0.5", "--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function"},
        {"--tis-clip-low 0"},
    ),
    ("r3", {}, {"r3": True}, {"--use-rollout-routing-replay"}, set()),
    (
        "sc",
        {},
        {"sc": True},
        {
            "--use-score-centering",
            "--score-centering-top-k 128",
            "--pg-loss-type reinforce",
            "--disable-grpo-std-normalization",
            "--calculate-per-token-loss",
        },
        {
            "--advantage-estimator grpo",
            "--eps-clip 0.2",
            "--eps-clip-high 0.28",
            "--kl-coef 0",
            "--entropy-coef 0",
        },
    ),
    (
        "deterministic",
        {},
        {"deterministic": True},
        {"--deterministic-mode", "--sglang-enable-deterministic-inference"},
        set(),
    ),
    (
        "deterministic on GLM-4-9B",
        {"model": "dense"},
        {"deterministic": True},
        {
            "--deterministic-mode",
            "--sglang-enable-deterministic-inference",
            "--sglang-attention-backend flashinfer",
        },
        set(),
    ),
    (
        "pd",
        {"layout": "separate", "rollout_gpus": 16},
        {"pd": True, "rdma_device": "mlx5_0"},
        {
            "--sglang-config .slime-lab.sglang.yaml",
            "--sglang-disaggregation-transfer-backend mooncake",
            "--sglang-disaggregation-ib-device mlx5_0",
        },
        set(),
    ),
    (
        "hicache",
        {},
        {"hicache": True},
        {"--sglang-enable-hierarchical-cache", "--sglang-hicache-ratio 2"},
        set(),
    ),
    ("hicache with pd is the prefill group's", {"pd": True, "rdma_device": "d"}, {"hicache": True}, set(), set()),
    (
        "eagle builtin",
        {},
        {"eagle": "builtin"},
        {
            "--sglang-speculative-algorithm EAGLE",
            "--sglang-speculative-num-steps 3",
            "--sglang-speculative-eagle-topk 1",
            "--sglang-speculative-num-draft-tokens 4",
        },
        set(),
    ),
    (
        "eagle external on GLM-5.3",
        {"model": "glm5"},
        {"eagle": "external", "draft_path": "/d"},
        {
            "--sglang-speculative-algorithm EAGLE",
            "--sglang-speculative-num-steps 4",
            "--sglang-speculative-eagle-topk 1",
            "--sglang-speculative-num-draft-tokens 5",
            "--sglang-speculative-draft-model-path /d",
        },
        set(),
    ),
    (
        "transport disk",
        SEPARATE,
        {"transport": "disk", "weight_dir": "/w"},
        {"--update-weight-transport disk", "--update-weight-mode full", "--update-weight-disk-dir /w"},
        set(),
    ),
    (
        "transport delta",
        SEPARATE,
        {"transport": "delta", "weight_dir": "/w", "local_weight_dir": "/n"},
        {
            "--update-weight-transport disk",
            "--update-weight-mode delta",
            "--update-weight-disk-dir /w",
            "--update-weight-local-checkpoint-dir /n",
        },
        set(),
    ),
    (
        "straw",
        {},
        {"straw": True, "straw_dir": "/q", "straw_run_id": "r1", "straw_declaration": "/d.json"},
        {
            "--rollout-data-transport straw",
            "--rollout-data-dir /q",
            "--rollout-queue-run-id r1",
            "--rollout-storage-profile juicefs",
            "--rollout-storage-declaration /d.json",
            "--save-interval 1",
        },
        {"--save-interval 20"},
    ),
    ("partial sync", {}, {"partial": True}, {"--partial-rollout", "--over-sampling-batch-size 16"}, set()),
    ("partial async", {"layout": "separate", "schedule": "async"}, {"partial": True}, {"--partial-rollout"}, set()),
    (
        "mask prefix",
        {"partial": True},
        {"mask_prefix": True},
        {"--mask-offpolicy-in-partial-rollout"},
        set(),
    ),
    (
        "cpuAdam",
        {"model": "dense"},
        {"cpu_adam": True},
        {"--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"},
        set(),
    ),
    (
        "recompute off",
        {},
        {"recompute": False},
        set(),
        {"--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"},
    ),
    (
        "concurrency",
        {},
        {"concurrency": 64},
        {"--sglang-server-concurrency 64"},
        {"--sglang-server-concurrency 128"},
    ),
    (
        "responseTokens",
        {},
        {"response_tokens": 8192},
        {"--rollout-max-response-len 8192"},
        {"--rollout-max-response-len 4096"},
    ),
    ("rounds", {}, {"rounds": 7}, {"--num-rollout 7"}, {"--num-rollout 3"}),
    ("gpu, image and maxStaleness", {}, {"gpu": "b200", "image": "rocm", "max_staleness": 2}, set(), set()),
    (
        "sampling",
        {},
        {
            "sampling": {
                "num_groups": 16, "group_size": 4, "over_sampling": 32, "temperature": 0.7, "top_p": 0.9, "top_k": 50,
                "stop": ["</a>", "\n\n"], "drop_zero_std": True,
            }
        },
        {
            "--rollout-batch-size 16", "--n-samples-per-prompt 4", "--over-sampling-batch-size 32",
            "--rollout-temperature 0.7", "--rollout-top-p 0.9", "--rollout-top-k 50", "--rollout-stop </a> \n\n",
            "--dynamic-sampling-filter-path "
            "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        },
        {
            "--rollout-batch-size 8", "--n-samples-per-prompt 8", "--rollout-temperature 1", "--rollout-top-p 1",
            "--rollout-top-k -1",
        },
    ),
    (
        "algorithm",
        {},
        {
            "algorithm": {
                "kind": "gspo", "eps_clip": 0.0001, "eps_clip_high": 0.0002, "dual_clip": 3, "kl_loss_coef": 0.01,
                "kl_loss_type": "low_var_kl", "entropy_coef": 0.001, "normalize_std": False, "aggregation": "per_token",
            }
        },
        {
            "--advantage-estimator gspo", "--eps-clip 0.0001", "--eps-clip-high 0.0002", "--eps-clip-c 3",
            "--use-kl-loss", "--kl-loss-coef 0.01", "--kl-loss-type low_var_kl", "--entropy-coef 0.001",
            "--disable-grpo-std-normalization", "--calculate-per-token-loss",
        },
        {"--advantage-estimator grpo", "--eps-clip 0.2", "--eps-clip-high 0.28", "--entropy-coef 0"},
    ),
    (
        "algorithm reinforce_plus_plus",
        {},
        {"algorithm": {"kind": "reinforce_plus_plus", "gamma": 0.99, "kl_coef": 0.1}},
        {
            "--advantage-estimator reinforce_plus_plus", "--normalize-advantages", "--gamma 0.99", "--kl-coef 0.1",
        },
        {"--advantage-estimator grpo", "--kl-coef 0"},
    ),
    (
        "optimizer",
        {},
        {
            "rounds": 10,
            "optimizer": {
                "lr": 0.0005, "lr_decay_style": "linear", "lr_min_frac": 0.05, "lr_warmup_steps": 5,
                "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95, "clip_grad": 0.3, "steps_per_round": 2,
                "max_tokens_per_microbatch": 2048,
            },
        },
        {
            "--num-rollout 10", "--lr 0.0005", "--lr-decay-style linear", "--min-lr 2.5e-5",
            "--lr-warmup-fraction 0.25", "--weight-decay 0", "--adam-beta1 0.8", "--adam-beta2 0.95",
            "--clip-grad 0.3", "--global-batch-size 32", "--max-tokens-per-gpu 2048",
        },
        {
            "--num-rollout 3", "--lr 1e-6", "--lr-decay-style constant", "--weight-decay 0.1", "--adam-beta1 0.9",
            "--adam-beta2 0.98", "--global-batch-size 64", "--max-tokens-per-gpu 8192",
        },
    ),
    (
        "data",
        {},
        {
            "data_path": "/p.jsonl",
            "data": {
                "prompt_key": "question", "label_key": "answer", "apply_chat_template": False, "shuffle": False,
                "slice": "[0:100]",
            },
        },
        {"--prompt-data /p.jsonl@[0:100]", "--input-key question", "--label-key answer"},
        {
            "--prompt-data /data/dapo-math-17k/dapo-math-17k.jsonl", "--input-key prompt", "--label-key label",
            "--apply-chat-template", "--rollout-shuffle",
        },
    ),
    ("reward math", {}, {"reward": {"kind": "math"}}, {"--rm-type math"}, {"--rm-type deepscaler"}),
    (
        "reward remote",
        {},
        {"reward": {"kind": "remote", "url": "http://rm:1"}},
        {"--rm-type remote_rm", "--rm-url http://rm:1"},
        {"--rm-type deepscaler"},
    ),
    (
        "reward exact",
        {},
        {"reward": {"kind": "exact"}},
        {"--custom-rm-path hotloop.integrations.slime.score"},
        {"--rm-type deepscaler"},
    ),
    (
        "slime_args",
        {},
        {"export": {"slime_args": ["--log-passrate", "--wandb-group", "g"]}},
        {"--log-passrate", "--wandb-group g"},
        set(),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("base", "change", "plus", "minus"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_choice_writes_exactly_its_flags(
    base: dict[str, Any], change: dict[str, Any], plus: set[str], minus: set[str]
) -> None:
    assert added(base, change) == (plus, minus)


def test_every_choice_of_the_schema_is_in_the_table_above() -> None:
    """A choice without a row here is one whose flags nobody looked at."""
    named = {name for _, base, change, _, _ in ROWS for name in (*base, *change)}
    elsewhere = {
        "slime_target", "hf_path", "train_path", "save_path", "megatron_path", "prefill_gpus", "eagle_steps",
        "eval_mode", "eval_data", "eval_interval", "eval_samples", "resume_from", "rounds_more", "laptop",
    }  # fmt: skip
    assert set(Experiment.model_fields) - named == elsewhere


@pytest.mark.parametrize("section", ["sampling", "algorithm", "optimizer", "data", "reward", "export", "laptop"])
def test_a_section_of_defaults_gives_the_same_bytes(section: str) -> None:
    defaults = Experiment().model_dump(mode="json")[section]
    assert argv(**{section: defaults}) == argv()


def test_the_draft_has_one_token_more_than_steps() -> None:
    words = argv(eagle="builtin", eagle_steps=7)
    assert words[words.index("--sglang-speculative-num-draft-tokens") + 1] == "8"


def test_mixture_of_experts_flags_by_model() -> None:
    assert "--moe-enable-deepep" in argv(model="deepseek")
    assert "--moe-enable-deepep" not in argv(model="glm5")
    assert "--moe-token-dispatcher-type alltoall" in text(argv(model="glm5"))
    assert "--moe-token-dispatcher-type" not in argv(model="dense")


def test_moonlight_leaves_the_attention_backend_out() -> None:
    assert "--attention-backend" not in argv(model="moonlight-16b-a3b")
    assert "--attention-backend" in argv(model="qwen3-30b-a3b")


def test_sequence_parallel_follows_tensor_parallel() -> None:
    assert "--sequence-parallel" in argv(model="qwen3-4b")
    assert "--sequence-parallel" not in argv(model="qwen2.5-0.5b")


def test_slime_args_come_last_so_that_they_win() -> None:
    words = argv(export={"slime_args": ["--lr", "1e-5"]})
    assert words[-2:] == ["--lr", "1e-5"]


@pytest.mark.parametrize(
    ("choices", "driver"),
    [
        ({}, "train.py"),
        ({"slime_target": "624b824a"}, "train.py"),
        ({"schedule": "async"}, "train.py"),
        ({"schedule": "async", "slime_target": "624b824a"}, "train_async.py"),
    ],
)
def test_the_driver_of_each_target(choices: dict[str, Any], driver: str) -> None:
    assert choose_driver(Experiment.model_validate(choices)) == driver


@pytest.mark.parametrize(
    ("choices", "extra"),
    [
        ({}, {}),
        ({"precision": "fp8train"}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}),
        ({"sc": True}, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}),
        (
            {"deterministic": True},
            {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
        ({"reward": {"kind": "format", "pattern": "a'b"}}, {"HOTLOOP_REWARD": '{"kind": "format", "pattern": "a\'b"}'}),
        ({"reward": {"kind": "exact"}, "task": "custom"}, {}),
    ],
)
def test_environment(choices: dict[str, Any], extra: dict[str, str]) -> None:
    assert environment(**choices) == {
        "PYTHONPATH": "/root/Megatron-LM",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVSHMEM_DISABLE_NCCL": "1",
        "NCCL_NVLS_ENABLE": "0",
        **extra,
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, "1"), (0.0, "0"), (1e-6, "1e-6"), (2.5e-5, "2.5e-5"), (0.28, "0.28"), (1e22, "1e22"), (-1.0, "-1")],
)
def test_numbers_read_as_in_slime_s_scripts(value: float, expected: str) -> None:
    assert format_number(value) == expected
    assert float(expected) == value
