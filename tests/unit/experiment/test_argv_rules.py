"""Every row of table 4.2: a launch that breaks only this rule, and its nearest neighbour that does not."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.experiment.argv import Launch, build_launch
from hotloop.experiment.argv_rules import NOTES, RULES, check_argv, check_launch, note_argv, note_launch
from hotloop.experiment.catalog.load import find_gpu, find_model, load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.sglang import ServerGroup
from hotloop.experiment.resolve import resolve


def launch(*extra: str, without: tuple[str, ...] = (), **choices: Any) -> Launch:
    """The launch of an experiment with flags added at its end and flags (with their values) taken out."""
    catalog = load_catalog()
    resolved = resolve(Experiment.model_validate(choices), catalog)
    base = build_launch(resolved, find_model(catalog, resolved.model))
    words: list[str] = []
    skipping = False
    for word in base.argv:
        if word.startswith("--"):
            skipping = word in without
        if not skipping:
            words.append(word)
    return base._replace(argv=(*words, *extra))


def errors(made: Launch) -> list[str]:
    return [finding.code for finding in check_launch(made)]


def notes(made: Launch) -> list[str]:
    return [finding.code for finding in note_launch(made)]


SEPARATE = {"layout": "separate"}
DISK = {**SEPARATE, "transport": "disk", "weight_dir": "/w"}
DELTA = {**SEPARATE, "transport": "delta", "weight_dir": "/w", "local_weight_dir": "/n"}
PLUS = {"algorithm": {"kind": "reinforce_plus_plus", "normalize_advantages": False}}

CASES: list[tuple[str, str, Launch, Launch]] = [
    (
        "temperature > 0",
        "temperature",
        launch(sampling={"temperature": 0.0}),
        launch(sampling={"temperature": 0.01}),
    ),
    (
        "kl-coef and kl-loss-coef not both non-zero",
        "kl_both",
        launch(algorithm={"kind": "grpo", "kl_coef": 0.1, "kl_loss_coef": 0.1}),
        launch(algorithm={"kind": "grpo", "kl_coef": 0.1}),
    ),
    (
        "a KL term needs a reference",
        "kl_reference",
        launch(algorithm={"kind": "grpo", "kl_loss_coef": 0.1}, without=("--ref-load",)),
        launch(without=("--ref-load",)),
    ),
    (
        "reinforce_plus_plus needs --normalize-advantages",
        "normalize_advantages",
        launch(**PLUS),
        launch(algorithm={"kind": "reinforce_plus_plus"}),
    ),
    (
        "the baseline needs it too",
        "normalize_advantages",
        launch(algorithm={"kind": "reinforce_plus_plus_baseline", "normalize_advantages": False}),
        launch("--normalize-advantages", **PLUS),
    ),
    (
        "--use-rollout-logprobs excludes --use-tis",
        "rollout_logprobs_tis",
        launch("--use-rollout-logprobs"),
        launch("--use-rollout-logprobs", correction="none"),
    ),
    (
        "mismatch metrics need a custom TIS function",
        "mismatch_metrics",
        launch("--get-mismatch-metrics"),
        launch("--get-mismatch-metrics", correction="icepop"),
    ),
    (
        "dynamic batch needs max tokens",
        "dynamic_batch_tokens",
        launch(without=("--max-tokens-per-gpu",)),
        launch(without=("--max-tokens-per-gpu", "--use-dynamic-batch-size")),
    ),
    (
        "balance by FLOPs needs dynamic batch",
        "balance_flops",
        launch("--balance-by-flops", without=("--use-dynamic-batch-size",)),
        launch("--balance-by-flops"),
    ),
    (
        "an eval interval needs eval data",
        "eval",
        launch("--eval-interval", "20"),
        launch("--eval-interval", "20", "--eval-prompt-data", "aime", "/a.jsonl"),
    ),
    ("a save interval needs --save", "path_empty", launch(save_path=""), launch(save_path="/s")),
    (
        "over-sampling >= rollout batch",
        "over_sampling",
        launch(sampling={"over_sampling": 7}),
        launch(sampling={"over_sampling": 8}),
    ),
    (
        "steps per rollout fix the global batch",
        "steps_per_rollout",
        launch("--num-steps-per-rollout", "2"),
        launch("--num-steps-per-rollout", "2", optimizer={"steps_per_round": 2}),
    ),
    (
        "rounds or epochs must be given",
        "rounds_missing",
        launch(without=("--num-rollout",)),
        launch("--num-epoch", "1", without=("--num-rollout",)),
    ),
    (
        "epochs need the global dataset",
        "epochs_dataset",
        launch("--num-epoch", "1", "--disable-rollout-global-dataset", without=("--num-rollout",)),
        launch("--num-epoch", "1", "--disable-rollout-global-dataset"),
    ),
    (
        "max prompt <= max context - 1",
        "prompt_length",
        launch("--rollout-max-prompt-len", "1024", "--rollout-max-context-len", "1024"),
        launch("--rollout-max-prompt-len", "1023", "--rollout-max-context-len", "1024"),
    ),
    (
        "delta -> disk transport",
        "delta_transport",
        launch("--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "/n", **SEPARATE),
        launch(**DELTA),
    ),
    ("delta -> not colocated", "delta_colocate", launch(**{**DELTA, "layout": "colocate"}), launch(**DELTA)),
    ("delta -> local directory", "delta_local", launch(**{**DELTA, "local_weight_dir": ""}), launch(**DELTA)),
    ("disk -> directory", "disk_dir", launch(**{**DISK, "weight_dir": ""}), launch(**DISK)),
    ("release-train -> disk", "release_train", launch("--release-train"), launch("--release-train", **DISK)),
    ("release-train -> full", "release_train", launch("--release-train", **DELTA), launch("--release-train", **DISK)),
    (
        "release-train -> no critic",
        "release_train",
        launch("--release-train", "--advantage-estimator", "ppo", **DISK),
        launch("--advantage-estimator", "ppo", **DISK),
    ),
    (
        "release-train -> no old actor",
        "release_train",
        launch("--release-train", "--keep-old-actor", **DISK),
        launch("--keep-old-actor", **DISK),
    ),
    ("OPD needs a type", "opd_type", launch("--use-opd"), launch("--use-opd", "--opd-type", "sglang")),
    (
        "OPD megatron needs a teacher",
        "opd_type",
        launch("--use-opd", "--opd-type", "megatron"),
        launch("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "/t"),
    ),
    (
        "OPD sglang forbids a teacher",
        "opd_type",
        launch("--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "/t"),
        launch("--use-opd", "--opd-type", "sglang"),
    ),
    ("a teacher without OPD", "opd_type", launch("--opd-teacher-load", "/t"), launch()),
    (
        "SGLang dp > 1 needs DP attention",
        "sglang_dp",
        launch("--sglang-dp-size", "2", model="dense"),
        launch("--sglang-dp-size", "2", "--sglang-enable-dp-attention", model="dense"),
    ),
    (
        "engine GPUs divisible by SGLang PP",
        "sglang_pp",
        launch("--sglang-pp-size", "3"),
        launch("--sglang-pp-size", "2"),
    ),
    (
        "prefill servers exclude external engines",
        "prefill_servers",
        launch("--prefill-num-servers", "1", layout="external", external_addrs="h:1"),
        launch("--prefill-num-servers", "1"),
    ),
    (
        "prefill servers exclude --sglang-config",
        "prefill_servers",
        launch("--prefill-num-servers", "1", pd=True, rdma_device="d", rollout_gpus=16, **SEPARATE),
        launch(pd=True, rdma_device="d", rollout_gpus=16, **SEPARATE),
    ),
    (
        "external engines exclude --sglang-config",
        "external_pd",
        launch("--sglang-config", "x.yaml", layout="external", external_addrs="h:1"),
        launch("--sglang-config", "x.yaml"),
    ),
    (
        "groups sum to rollout GPUs",
        "pd_groups",
        launch("--rollout-num-gpus", "24", pd=True, rdma_device="d", rollout_gpus=16, **SEPARATE),
        launch(pd=True, rdma_device="d", rollout_gpus=16, **SEPARATE),
    ),
    (
        "--allgather-cp with CP > 1 only for sparse attention",
        "allgather_cp",
        launch("--allgather-cp", model="deepseek"),
        launch("--allgather-cp", model="glm5"),
    ),
    (
        "--allgather-cp without CP",
        "allgather_cp",
        launch("--allgather-cp", model="deepseek"),
        launch("--allgather-cp", "--context-parallel-size", "1", model="deepseek"),
    ),
    (
        "PP 1 forbids stage layer counts",
        "stage_layers",
        launch("--decoder-last-pipeline-num-layers", "20", model="dense"),
        launch("--decoder-last-pipeline-num-layers", "20", "--pipeline-model-parallel-size", "2", model="dense"),
    ),
    (
        "DeepEP needs the flex dispatcher",
        "deepep_dispatcher",
        launch("--moe-token-dispatcher-type", "alltoall"),
        launch("--moe-token-dispatcher-type", "alltoall", without=("--moe-enable-deepep",)),
    ),
    (
        "--rollout-batch-size is required",
        "rollout_batch_missing",
        launch(without=("--rollout-batch-size",)),
        launch(),
    ),
    (
        "a round fills a global batch",
        "global_batch",
        launch("--global-batch-size", "65"),
        launch("--global-batch-size", "64"),
    ),
    (
        "a remote reward needs its address",
        "reward_target",
        launch(reward={"kind": "remote", "url": ""}),
        launch(reward={"kind": "remote", "url": "http://rm:1"}),
    ),
    (
        "a Python reward needs its function",
        "reward_target",
        launch(reward={"kind": "python", "function": ""}),
        launch(reward={"kind": "python", "function": "my_rewards.score"}),
    ),
    (
        "a slice has brackets",
        "bad_slice",
        launch(data={"slice": "0:100"}),
        launch(data={"slice": "[0:100]"}),
    ),
    (
        "a slice of the path itself",
        "bad_slice",
        launch(data_path="/d.jsonl@0:5"),
        launch(data_path="/d.jsonl@[0:5]"),
    ),
    ("an unknown flag", "unknown_flag", launch("--log-passrates"), launch("--log-passrate")),
    ("a skipped flag", "flag_skipped", launch("--sglang-tp-size", "8"), launch("--sglang-pp-size", "2")),
    ("a wrong value", "flag_value", launch("--lr-decay-style", "cos"), launch("--lr-decay-style", "cosine")),
    ("a missing value", "flag_arity", launch("--wandb-group"), launch("--wandb-group", "g")),
    (
        "a later flag",
        "not_in_target",
        launch(sc=True, correction="none", slime_target="624b824a"),
        launch(sc=True, correction="none"),
    ),
]


@pytest.mark.parametrize(("code", "broken", "near"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_rule_of_slime_is_found_broken_alone_and_its_neighbour_is_fine(
    code: str, broken: Launch, near: Launch
) -> None:
    assert set(errors(broken)) == {code}
    assert errors(near) == []


@pytest.mark.parametrize("value", ["", "8"])
def test_tp_or_cp_needs_one_device_connection_unless_the_gpu_is_a_blackwell(value: str) -> None:
    base = launch()
    broken = base._replace(environment={**base.environment, "CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert errors(broken) == ["device_connections"]
    assert errors(broken._replace(is_blackwell=True)) == []
    alone = launch("--tensor-model-parallel-size", "1", "--context-parallel-size", "1")
    assert errors(alone._replace(environment={})) == []


def test_blackwell_is_read_from_the_catalogue() -> None:
    catalog = load_catalog()
    resolved = resolve(Experiment())
    model = find_model(catalog, "flash")
    assert build_launch(resolved, model, find_gpu(catalog, "b200")).is_blackwell
    assert not build_launch(resolved, model, find_gpu(catalog, "h100")).is_blackwell


@pytest.mark.parametrize("algorithm", ["Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"])
def test_deterministic_mode_needs_a_known_nccl_algorithm(algorithm: str) -> None:
    base = launch(deterministic=True)
    assert errors(base._replace(environment={**base.environment, "NCCL_ALGO": algorithm})) == []
    assert errors(base._replace(environment={**base.environment, "NCCL_ALGO": "NVLS"})) == ["nccl_algo"]
    assert errors(launch("--deterministic-mode")) == ["nccl_algo"]


def test_all_groups_of_a_model_share_one_model_path() -> None:
    base = launch(pd=True, rdma_device="d", rollout_gpus=16, **SEPARATE)
    prefill, decode = base.server_groups
    other = decode._replace(overrides=(("model_path", "/other"),))
    assert errors(base._replace(server_groups=(prefill, other))) == ["group_model_path"]
    same = tuple(group._replace(overrides=(("model_path", "/m"),)) for group in (prefill, decode))
    assert errors(base._replace(server_groups=same)) == []


def test_groups_of_a_colocated_pool_sum_to_the_trainer_s_gpus() -> None:
    base = launch(pd=True, rdma_device="d", nodes=2)
    assert errors(base) == []
    smaller = (ServerGroup("prefill", 8, 8), ServerGroup("decode", 4, 8))
    assert errors(base._replace(server_groups=smaller)) == ["pd_groups"]


def test_n_of_one_turns_the_deviation_off_with_a_note() -> None:
    one = {"sampling": {"num_groups": 64, "group_size": 1}}
    assert notes(launch(**one)) == ["group_of_one"]
    assert notes(launch(sampling={"group_size": 2})) == []
    assert errors(launch(**one)) == []


def test_ppo_forces_train_offload_and_a_critic_of_the_actor_s_size() -> None:
    found = note_launch(launch("--advantage-estimator", "ppo", "--no-offload-train", nodes=2))
    assert [finding.code for finding in found] == ["ppo_critic"]
    assert "16 GPUs" in found[0].message
    assert "in spite of --no-offload-train" in found[0].message
    assert notes(launch("--no-offload-train")) == []


def test_zero_rollout_gpus_means_routers_only() -> None:
    assert notes(launch("--rollout-num-gpus", "0")) == ["routers_only"]
    assert notes(launch("--rollout-num-gpus", "8")) == []


def test_zero_rounds_with_an_eval_interval_only_evaluates() -> None:
    evaluated = launch(rounds=0, eval_mode="inline", eval_data="/e")
    assert notes(evaluated) == ["evaluate_only"]
    assert "evaluates once" in note_launch(evaluated)[0].message
    assert "trains nothing" in note_launch(launch(rounds=0))[0].message
    assert notes(launch(rounds=1, eval_mode="inline", eval_data="/e")) == []


def test_of_a_repeated_flag_the_last_one_counts() -> None:
    assert errors(launch("--rollout-temperature", "0", "--rollout-temperature", "1")) == []
    assert errors(launch("--rollout-temperature", "1", "--rollout-temperature", "0")) == ["temperature"]


def test_every_rule_has_a_docstring_that_says_it() -> None:
    assert all(rule.__doc__ for rule in (*RULES, *NOTES))


def test_the_rules_see_slime_args_of_an_experiment() -> None:
    catalog = load_catalog()
    model = find_model(catalog, "flash")
    experiment = resolve(Experiment.model_validate({"export": {"slime_args": ["--use-rollout-logprobs"]}}))
    (finding,) = check_argv(experiment, model)
    assert finding.code == "rollout_logprobs_tis"
    assert "correction" in finding.fields
    assert finding.message == (
        "--use-rollout-logprobs: takes the engine's logprobs as the old ones, so --use-tis would compare them with "
        "themselves [rollout_logprobs_tis]. Set correction to none, or leave out --use-rollout-logprobs."
    )


def test_choices_that_no_flag_carries_are_noted() -> None:
    catalog = load_catalog()
    model = find_model(catalog, "flash")

    def codes(**choices: Any) -> list[str]:
        return [finding.code for finding in note_argv(resolve(Experiment.model_validate(choices)), model)]

    assert codes(export={"publish": "s3://b/r"}) == ["publish_unused"]
    assert codes(export={"publish": "s3://b/r"}, **DELTA) == []
    assert codes(optimizer={"eps": 1e-6}) == ["adam_eps_unwritten"]
    assert codes(data={"held_out_rows": 64}) == ["held_out_unwritten"]
    assert codes() == []


def test_the_default_experiment_of_every_model_breaks_no_rule() -> None:
    catalog = load_catalog()
    for model in catalog.models.values():
        resolved = resolve(Experiment(model=model.id), catalog)
        assert check_argv(resolved, model, find_gpu(catalog, "h100")) == [], model.id
