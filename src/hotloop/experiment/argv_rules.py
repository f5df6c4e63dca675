"""slime's own argument rules, run on the vector that the export would pass: table 4.2 of the specification.

Owns: `check_launch` (errors) and `note_launch` (what slime changes silently), and `check_argv` and `note_argv` for an
experiment. One function per rule, each with a stable code.

Promises: pure; a rule reads the final vector, so it also sees `export.slime_args`. A rule that the choices can break
too has the code that checks.py gives it, so that a caller may drop doubles.

Does not do: files (`experiment.sh check`), a Hugging Face config (hf_config.py).

Source: slime 624b824a, the validate functions of utils, sglang_utils and megatron_utils arguments.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from hotloop.errors import render_message
from hotloop.experiment.argv import Launch, View, build_launch
from hotloop.experiment.catalog.records import Gpu, Model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import strip_slice
from hotloop.experiment.flags import check_flags
from hotloop.experiment.records import Finding

DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""NCCL algorithms that Megatron accepts in deterministic mode."""

ADAM_EPS = 1e-8
"""Megatron's default for Adam's epsilon, which no flag of flags.json changes."""

REINFORCE_PLUS_PLUS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


Rule = Callable[[View], Iterator[Finding]]


def _find(code: str, where: str, why: str, do: str, *fields: str) -> Finding:
    return Finding(code, render_message(code, why, where=where, do=do), fields or ("export.slime_args",))


def check_temperature(view: View) -> Iterator[Finding]:
    """Temperature > 0."""
    value = view.number("--rollout-temperature", 1.0)
    if value is not None and value <= 0:
        why = "must be above 0, because greedy decoding is no policy that can be reinforced"
        yield _find("temperature", f"--rollout-temperature {value:g}", why, "Set it to 1.", "sampling.temperature")


def check_kl_terms(view: View) -> Iterator[Finding]:
    """`kl-coef` and `kl-loss-coef` not both non-zero; a KL term needs a reference."""
    in_reward = view.number("--kl-coef", 0.0)
    in_loss = view.number("--kl-loss-coef", 0.0)
    fields = ("algorithm.kl_coef", "algorithm.kl_loss_coef")
    if in_reward and in_loss:
        why = f"the KL term is in the reward ({in_reward:g}) and in the loss ({in_loss:g}); slime takes one of them"
        yield _find("kl_both", "--kl-coef and --kl-loss-coef", why, "Set one of them to 0.", *fields)
    if (in_reward or view.has("--use-kl-loss")) and not view.text("--ref-load"):
        why = "a KL term compares with the reference policy, and no checkpoint is given for it"
        yield _find("kl_reference", "--ref-load", why, "Set train_path.", "train_path", *fields)


def check_normalize_advantages(view: View) -> Iterator[Finding]:
    """`reinforce_plus_plus` and its baseline need `--normalize-advantages`."""
    kind = view.text("--advantage-estimator")
    if kind in REINFORCE_PLUS_PLUS and not view.has("--normalize-advantages"):
        yield _find(
            "normalize_advantages",
            f"--advantage-estimator {kind}",
            "needs advantages normalised over the batch, because it has no division by a group's deviation",
            "Set algorithm.normalize_advantages to true.",
            "algorithm.normalize_advantages",
        )


def check_rollout_logprobs(view: View) -> Iterator[Finding]:
    """`--use-rollout-logprobs` excludes `--use-tis`; mismatch metrics need a custom TIS function."""
    if view.has("--use-rollout-logprobs") and view.has("--use-tis"):
        yield _find(
            "rollout_logprobs_tis",
            "--use-rollout-logprobs",
            "takes the engine's logprobs as the old ones, so --use-tis would compare them with themselves",
            "Set correction to none, or leave out --use-rollout-logprobs.",
            "correction",
            "export.slime_args",
        )
    if view.has("--get-mismatch-metrics") and not view.text("--custom-tis-function-path"):
        yield _find(
            "mismatch_metrics",
            "--get-mismatch-metrics",
            "are computed by a custom TIS function, and none is given",
            "Set correction to icepop, or add --custom-tis-function-path.",
            "correction",
            "export.slime_args",
        )


def check_dynamic_batch(view: View) -> Iterator[Finding]:
    """Dynamic batch needs max tokens; balance by FLOPs needs dynamic batch."""
    is_dynamic = view.has("--use-dynamic-batch-size")
    if is_dynamic and view.text("--max-tokens-per-gpu") is None:
        yield _find(
            "dynamic_batch_tokens",
            "--use-dynamic-batch-size",
            "packs samples up to a number of tokens, and none is given",
            "Add --max-tokens-per-gpu.",
        )
    if view.has("--balance-by-flops") and not is_dynamic:
        yield _find(
            "balance_flops",
            "--balance-by-flops",
            "balances dynamic micro-batches, and --use-dynamic-batch-size is not given",
            "Add --use-dynamic-batch-size.",
        )


def check_eval_data(view: View) -> Iterator[Finding]:
    """An eval interval needs eval data."""
    has_data = bool(view.text("--eval-prompt-data") or view.text("--eval-config"))
    values = [use for use in [view.text("--eval-interval")] if use is not None]
    if values and not has_data:
        why = "evaluates every so many rounds, and there is no evaluation data"
        yield _find("eval", f"--eval-interval {values[0]}", why, "Set eval_data.", "eval_data", "eval_mode")


def check_save_path(view: View) -> Iterator[Finding]:
    """A save interval needs `--save`."""
    if view.text("--save-interval") is not None and not view.text("--save"):
        yield _find("path_empty", "--save", "checkpoints are due and have no directory", "Set save_path.", "save_path")


def check_over_sampling(view: View) -> Iterator[Finding]:
    """Over-sampling >= rollout batch."""
    wanted = view.count("--rollout-batch-size", 0)
    asked = view.count("--over-sampling-batch-size", wanted)
    if asked < wanted:
        why = f"is below the rollout batch of {wanted} prompts, so a round could never fill it at once"
        do = f"Set sampling.over_sampling to {wanted} or more."
        yield _find("over_sampling", f"--over-sampling-batch-size {asked}", why, do, "sampling.over_sampling")


def check_steps_per_rollout(view: View) -> Iterator[Finding]:
    """With `--num-steps-per-rollout s` an explicit global batch must equal rollout batch x n // s."""
    steps = view.count("--num-steps-per-rollout", 0)
    given = view.count("--global-batch-size", 0)
    if steps <= 0 or not given:
        return
    expected = view.count("--rollout-batch-size", 0) * view.count("--n-samples-per-prompt", 1) // steps
    if given != expected:
        why = f"differs from rollout batch x n / steps = {expected} that --num-steps-per-rollout {steps} asks for"
        do = f"Set optimizer.steps_per_round to {steps} and leave out --num-steps-per-rollout."
        yield _find("steps_per_rollout", f"--global-batch-size {given}", why, do, "optimizer.steps_per_round")


def check_rounds(view: View) -> Iterator[Finding]:
    """Rounds or epochs must be given; epochs need the global dataset."""
    if view.text("--num-rollout") is not None:
        return
    if view.text("--num-epoch") is None:
        why = "neither rounds nor epochs are given"
        yield _find("rounds_missing", "--num-rollout", why, "Set rounds.", "rounds")
    elif view.has("--disable-rollout-global-dataset"):
        why = "counts passes over a dataset that --disable-rollout-global-dataset takes away"
        yield _find("epochs_dataset", "--num-epoch", why, "Set rounds in place of epochs.", "rounds")


def check_prompt_length(view: View) -> Iterator[Finding]:
    """Max prompt <= max context - 1."""
    prompt = view.number("--rollout-max-prompt-len")
    context = view.number("--rollout-max-context-len")
    if prompt is not None and context is not None and prompt > context - 1:
        why = f"leaves no token to answer with in a context of {context:g}"
        do = f"Set --rollout-max-prompt-len to {context - 1:g} or less."
        yield _find("prompt_length", f"--rollout-max-prompt-len {prompt:g}", why, do)


def check_disk_transport(view: View) -> Iterator[Finding]:
    """Delta -> disk transport, not colocated, local directory; disk -> directory."""
    transport = view.text("--update-weight-transport") or "nccl"
    if transport == "disk" and not view.text("--update-weight-disk-dir"):
        why = "writes policies where trainer and engines both see them, and no directory is given"
        yield _find("disk_dir", "--update-weight-disk-dir", why, "Set weight_dir.", "weight_dir", "transport")
    if view.text("--update-weight-mode") != "delta":
        return
    if transport != "disk":
        why = f"deltas travel on disk, and the transport is {transport}"
        yield _find("delta_transport", "--update-weight-mode delta", why, "Set transport to delta.", "transport")
    if view.has("--colocate"):
        why = "colocated weights go by a handle in one process, so there is nothing to make a delta of"
        yield _find(
            "delta_colocate", "--update-weight-mode delta", why, "Set layout to separate.", "layout", "transport"
        )
    if not view.text("--update-weight-local-checkpoint-dir"):
        why = "each engine host keeps the parent's bytes on a local disk, and no directory is given"
        do = "Set local_weight_dir."
        yield _find("delta_local", "--update-weight-local-checkpoint-dir", why, do, "local_weight_dir", "transport")


def check_release_train(view: View) -> Iterator[Finding]:
    """Release-train -> full + disk + `--save`, no critic, no old actor."""
    if not view.has("--release-train"):
        return
    broken = []
    if view.text("--advantage-estimator") == "ppo":
        broken.append("a critic (--advantage-estimator ppo)")
    if view.has("--keep-old-actor"):
        broken.append("--keep-old-actor")
    if not view.text("--save"):
        broken.append("no --save")
    if (view.text("--update-weight-mode") or "full") != "full":
        broken.append("weight mode delta")
    if (view.text("--update-weight-transport") or "nccl") != "disk":
        broken.append("weight transport nccl")
    if broken:
        why = f"restarts the trainer from disk every round, and cannot with {', '.join(broken)}"
        yield _find("release_train", "--release-train", why, "Set transport to disk, and save_path.", "transport")


def check_opd(view: View) -> Iterator[Finding]:
    """OPD: megatron needs a teacher checkpoint, sglang forbids one, and the type must be said."""
    kind = view.text("--opd-type")
    teacher = view.text("--opd-teacher-load")
    if not view.has("--use-opd"):
        if teacher is not None:
            why = "names a teacher, and on-policy distillation is off"
            yield _find("opd_type", "--opd-teacher-load", why, "Add --use-opd, or leave the teacher out.")
        return
    if kind is None:
        yield _find(
            "opd_type", "--use-opd", "needs to know where the teacher runs", "Add --opd-type sglang or megatron."
        )
    elif kind == "megatron" and teacher is None:
        why = "loads the teacher into the trainer, and no checkpoint is given"
        yield _find("opd_type", "--opd-type megatron", why, "Add --opd-teacher-load.")
    elif kind == "sglang" and teacher is not None:
        why = "asks a server for the teacher's logprobs, so a checkpoint to load has no place"
        yield _find("opd_type", "--opd-type sglang", why, "Leave out --opd-teacher-load.")


def check_sglang_sizes(view: View) -> Iterator[Finding]:
    """SGLang dp > 1 needs DP attention; engine GPUs divisible by SGLang PP."""
    dp = view.first_count(("--sglang-dp-size", "--sglang-data-parallel-size"), 1)
    if dp > 1 and not view.has("--sglang-enable-dp-attention"):
        why = "needs DP attention; slime stops on an assertion without text"
        yield _find("sglang_dp", f"--sglang-dp-size {dp}", why, "Add --sglang-enable-dp-attention.")
    pp = view.first_count(("--sglang-pp-size", "--sglang-pipeline-parallel-size"), 1)
    engine = view.count("--rollout-num-gpus-per-engine", 1)
    if pp > 1 and engine % pp:
        why = f"does not divide the engine's {engine} GPUs"
        yield _find("sglang_pp", f"--sglang-pp-size {pp}", why, "Choose a divisor of the engine's GPUs.")


def check_server_groups(view: View) -> Iterator[Finding]:
    """`--prefill-num-servers`, external engines and `--sglang-config` exclude each other; groups sum to the pool."""
    is_external = view.has("--rollout-external-engine-addrs")
    has_servers = view.text("--prefill-num-servers") is not None
    has_config = view.text("--sglang-config") is not None
    if has_servers and is_external:
        why = "splits engines that slime starts, and these are external"
        yield _find("prefill_servers", "--prefill-num-servers", why, "Leave it out.", "layout", "export.slime_args")
    if has_config and is_external:
        why = "describes engines that slime starts, and these are external"
        yield _find("external_pd", "--sglang-config", why, "Set pd to false.", "layout", "pd")
    if has_config and has_servers:
        why = "both --prefill-num-servers and --sglang-config split the engines"
        yield _find("prefill_servers", "--sglang-config", why, "Leave out --prefill-num-servers.", "pd")
    if has_config and view.launch.server_groups:
        yield from _check_groups(view)


def _check_groups(view: View) -> Iterator[Finding]:
    groups = view.launch.server_groups
    if view.has("--colocate") and not view.has("--rollout-num-gpus"):
        pool = view.count("--actor-num-nodes", 1) * view.count("--actor-num-gpus-per-node", 8)
    else:
        pool = view.count("--rollout-num-gpus", 0)
    total = sum(group.gpus for group in groups)
    if total != pool:
        why = f"the groups have {total} GPUs and the rollout pool has {pool}"
        yield _find(
            "pd_groups", "--sglang-config", why, "Let the groups sum to the pool.", "prefill_gpus", "rollout_gpus"
        )
    paths = {dict(group.overrides).get("model_path", "") for group in groups}
    if len(paths) > 1:
        why = f"the groups name {len(paths)} model paths, and the groups of one model share one"
        yield _find("group_model_path", "--sglang-config", why, "Name one model path.", "pd")


def check_allgather_cp(view: View) -> Iterator[Finding]:
    """`--allgather-cp` with CP > 1 only for DeepseekV32 and GlmMoeDsa."""
    cp = view.count("--context-parallel-size", 1)
    asked = view.has("--allgather-cp") or view.launch.has_allgather_cp
    if asked and cp > 1 and not view.launch.is_sparse_attention:
        why = f"with CP {cp} would scramble the token order of a model without sparse attention"
        do = "Leave out --allgather-cp; this model uses zigzag CP."
        yield _find("allgather_cp", "--allgather-cp", why, do, "model", "export.slime_args")


def check_single_stage(view: View) -> Iterator[Finding]:
    """PP 1 forbids first/last stage layer counts."""
    if view.count("--pipeline-model-parallel-size", 1) != 1:
        return
    for name in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
        if view.has(name):
            why = "sizes one stage of several, and there is one stage"
            yield _find("stage_layers", f"{name} {view.text(name)}", why, "Leave it out, or raise PP.")


def check_device_connections(view: View) -> Iterator[Finding]:
    """TP or CP > 1 needs `CUDA_DEVICE_MAX_CONNECTIONS=1` in the driver, unless the GPU is a Blackwell."""
    tp = view.count("--tensor-model-parallel-size", 1)
    cp = view.count("--context-parallel-size", 1)
    if max(tp, cp) == 1 or view.launch.is_blackwell:
        return
    found = view.launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if found != "1":
        why = f"is {found!r}, and TP {tp} x CP {cp} overlaps its messages only with 1"
        do = "Set CUDA_DEVICE_MAX_CONNECTIONS=1 in the job's environment."
        yield _find("device_connections", "CUDA_DEVICE_MAX_CONNECTIONS", why, do, "gpu")


def check_deterministic(view: View) -> Iterator[Finding]:
    """Deterministic mode needs `NCCL_ALGO` from Megatron's list."""
    if not view.has("--deterministic-mode"):
        return
    found = view.launch.environment.get("NCCL_ALGO", "")
    if found not in DETERMINISTIC_NCCL:
        why = f"is {found!r}, and deterministic mode needs one of {', '.join(DETERMINISTIC_NCCL)}"
        do = "Set deterministic to true, which sets NCCL_ALGO=Ring, or leave out --deterministic-mode."
        yield _find("nccl_algo", "NCCL_ALGO", why, do, "deterministic", "export.slime_args")


def check_deepep(view: View) -> Iterator[Finding]:
    """DeepEP needs the `flex` dispatcher."""
    dispatcher = view.text("--moe-token-dispatcher-type")
    if view.has("--moe-enable-deepep") and dispatcher != "flex":
        why = f"runs under the flex dispatcher, and the last one given is {dispatcher}"
        do = "Leave out --moe-enable-deepep, or write --moe-token-dispatcher-type flex after it."
        yield _find("deepep_dispatcher", "--moe-enable-deepep", why, do)


def check_rollout_batch(view: View) -> Iterator[Finding]:
    """`--rollout-batch-size` is the one flag that slime requires, and a round must fill a global batch."""
    if view.text("--rollout-batch-size") is None:
        why = "is the one flag that slime requires"
        yield _find(
            "rollout_batch_missing", "--rollout-batch-size", why, "Set sampling.num_groups.", "sampling.num_groups"
        )
        return
    rollouts = view.count("--rollout-batch-size", 0) * view.count("--n-samples-per-prompt", 1)
    batch = view.count("--global-batch-size", 0)
    if view.text("--global-batch-size") is not None and not 0 < batch <= rollouts:
        why = f"is not filled by the {rollouts} rollouts of a round, and slime's scheduler asserts that one is"
        do = "Raise sampling.num_groups or sampling.group_size, or lower optimizer.steps_per_round."
        yield _find(
            "global_batch", f"--global-batch-size {batch}", why, do, "sampling.num_groups", "optimizer.steps_per_round"
        )


def check_reward(view: View) -> Iterator[Finding]:
    """A remote reward needs its address, and a reward of this package its function or pattern."""
    if view.text("--rm-type") == "remote_rm" and not view.text("--rm-url"):
        why = "asks a service for every reward, and no address is given"
        yield _find("reward_target", "--rm-type remote_rm", why, "Set reward.url.", "reward.url")
    settings = json.loads(view.launch.environment.get("HOTLOOP_REWARD") or "{}")
    if settings.get("kind") == "python" and not re.fullmatch(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+", settings["function"]):
        why = "must be a dotted path to a function, such as my_rewards.score"
        yield _find("reward_target", f"reward.function = {settings['function']!r}", why, "Name it.", "reward.function")


def check_slice(view: View) -> Iterator[Finding]:
    """A row slice is written `[a:b]`; slime takes anything else for a part of the file's name."""
    path = view.text("--prompt-data") or ""
    if "@" in path and strip_slice(path) == path and re.search(r"@\S*:\S*$", path):
        why = "does not end in a slice of rows, so slime would look for a file of that whole name"
        yield _find(
            "bad_slice", f"--prompt-data {path}", why, "Write [a:b], as in [0:1000].", "data.slice", "data_path"
        )


RULES: tuple[Rule, ...] = (
    check_temperature,
    check_kl_terms,
    check_normalize_advantages,
    check_rollout_logprobs,
    check_dynamic_batch,
    check_eval_data,
    check_save_path,
    check_over_sampling,
    check_steps_per_rollout,
    check_rounds,
    check_prompt_length,
    check_disk_transport,
    check_release_train,
    check_opd,
    check_sglang_sizes,
    check_server_groups,
    check_allgather_cp,
    check_single_stage,
    check_device_connections,
    check_deterministic,
    check_deepep,
    check_rollout_batch,
    check_reward,
    check_slice,
)


def note_group_of_one(view: View) -> Iterator[Finding]:
    """n = 1 turns the division by the group's deviation off."""
    n = view.count("--n-samples-per-prompt", 1)
    if n == 1 and not view.has("--disable-grpo-std-normalization"):
        why = "slime turns the division by the group's deviation off, because one rollout has none"
        do = "With GRPO every advantage is then 0; set sampling.group_size to 8."
        yield _find("group_of_one", "--n-samples-per-prompt 1", why, do, "sampling.group_size")


def note_ppo(view: View) -> Iterator[Finding]:
    """PPO forces train offload, and its critic has the actor's GPU count."""
    if view.text("--advantage-estimator") != "ppo":
        return
    gpus = view.count("--actor-num-nodes", 1) * view.count("--actor-num-gpus-per-node", 8)
    ignored = " in spite of --no-offload-train" if view.has("--no-offload-train") else ""
    why = f"slime offloads the trainer between rounds{ignored} and gives the critic the actor's {gpus} GPUs"
    yield _find("ppo_critic", "--advantage-estimator ppo", why, "Plan host memory for both.")


def note_idle_sizes(view: View) -> Iterator[Finding]:
    """`rollout-num-gpus 0` = routers only; `num-rollout 0` with an eval interval = evaluate only."""
    if view.text("--rollout-num-gpus") is not None and view.count("--rollout-num-gpus", 1) == 0:
        why = "starts routers and no engines"
        yield _find("routers_only", "--rollout-num-gpus 0", why, "Raise it unless engines register by themselves.")
    if view.text("--num-rollout") is not None and view.count("--num-rollout", 1) == 0:
        if view.text("--eval-interval") is not None:
            why = "evaluates once and stops"
            yield _find("evaluate_only", "--num-rollout 0", why, "Raise rounds to train.", "rounds")
        else:
            why = "starts everything and trains nothing"
            yield _find("evaluate_only", "--num-rollout 0", why, "Raise rounds to train.", "rounds")


NOTES: tuple[Rule, ...] = (note_group_of_one, note_ppo, note_idle_sizes)


def check_launch(launch: Launch) -> list[Finding]:
    """Return every error of a launch: words that a parser would drop or refuse, then broken rules."""
    findings = [
        _find(problem.code, problem.flag or "the argument vector", problem.why, _ADVICE[problem.code])
        for problem in check_flags(launch.argv, launch.slime_target)
    ]
    view = View(launch)
    for rule in RULES:
        findings.extend(rule(view))
    return findings


_ADVICE = {
    "unknown_flag": "Correct the name; flags.json lists every flag.",
    "flag_arity": "Give it the number of values that it takes; a value may not start with a dash.",
    "flag_value": "Give a value of the right type.",
    "flag_skipped": "Leave it out; slime fills it in.",
    "not_in_target": "Set slime_target to v0.4.0, or turn the choice off.",
    "stray_word": "Put it after the flag that it belongs to.",
}


def note_launch(launch: Launch) -> list[Finding]:
    """Return what slime changes by itself in a launch."""
    view = View(launch)
    return [finding for rule in NOTES for finding in rule(view)]


def check_argv(choices: Experiment, model: Model, gpu: Gpu | None = None) -> list[Finding]:
    """Return every error of table 4.2 in the vector of a resolved experiment."""
    return check_launch(build_launch(choices, model, gpu))


def note_argv(choices: Experiment, model: Model, gpu: Gpu | None = None) -> list[Finding]:
    """Return every note of table 4.2 in the vector of a resolved experiment, and choices that no slime flag carries."""
    return [*note_launch(build_launch(choices, model, gpu)), *_note_unwritten(choices)]


def _note_unwritten(choices: Experiment) -> Iterator[Finding]:
    if choices.export.publish and choices.transport != "delta":
        why = f"is not used: with transport {choices.transport} the trainer writes no versions that could be published"
        do = "Set transport to delta, or leave export.publish empty."
        yield _find(
            "publish_unused", f"export.publish = {choices.export.publish}", why, do, "export.publish", "transport"
        )
    if choices.optimizer.eps != ADAM_EPS:
        why = f"is not exported: no verified slime flag sets it, so the cluster trains with {ADAM_EPS:g}"
        do = "Set it back, or accept the difference."
        yield _find("adam_eps_unwritten", f"optimizer.eps = {choices.optimizer.eps:g}", why, do, "optimizer.eps")
    if choices.data.held_out_rows and choices.task == "math":
        why = "is not exported: slime has no such flag, so the cluster trains on every row of the file"
        do = "Cut the rows with data.slice, or put the held-out rows into a file of their own."
        where = f"data.held_out_rows = {choices.data.held_out_rows}"
        yield _find("held_out_unwritten", where, why, do, "data.held_out_rows", "data.slice")
