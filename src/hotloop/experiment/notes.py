"""Notes: what a user should know about the choices, without stopping anything.

Owns: one function per note of experiment.md 4.3, and the notes of X01.6, X04.4 and X06. A note names the number that
makes it true, where there is one.

Promises: no note blocks an export or a run. Does not do: errors (checks.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.experiment.catalog.load import find_model
from hotloop.experiment.choices import Experiment
from hotloop.experiment.load import flatten
from hotloop.experiment.records import Finding
from hotloop.experiment.resolve import effective_recipe, read_slime_arg, resolve
from hotloop.experiment.resume import compare_for_resume
from hotloop.experiment.rules import Facts, Say, make_finding, note_rule, run_rules, show
from hotloop.experiment.throughput import EAGLE_RUNNING_LIMIT, count_running_limit
from hotloop.units import GIB, format_bytes

SHORT_RUN_ROUNDS = 20
"""Save interval that the export writes; a run of fewer rounds saves once."""
SMALL_CHUNK_TOKENS = 1024


def find_notes(facts: Facts) -> tuple[Finding, ...]:
    """Return every note of an experiment."""
    return (*run_rules(facts, is_error=False), *_compare_resume(facts))


@note_rule("external_api", "layout")
def note_external_api(facts: Facts) -> Iterator[Say]:
    """External engines must speak more than text."""
    if facts.experiment.layout == "external":
        yield Say(
            "layout = external",
            "external engines are SGLang servers that take weight updates, not any text API; they must be up "
            "before the "
            "job is parsed",
            "Start them with serving-reference.sh.",
        )


@note_rule("straw_storage", "straw")
def note_straw_storage(facts: Facts) -> Iterator[Say]:
    """The queue is as durable as its file system."""
    if facts.experiment.straw:
        yield Say(
            "straw = on",
            "the persistent queue is as durable and as fast as the storage under it",
            "Measure that storage and write what you found into the declaration.",
        )


@note_rule("partial_mixes", "partial")
def note_partial_mixes(facts: Facts) -> Iterator[Say]:
    """A continued response has two versions."""
    if facts.experiment.partial:
        share = facts.staleness.mixed_version_frac
        yield Say(
            "partial = on",
            f"responses may hold tokens of more than one version, about {share:.0%} of them (estimate)",
            "Keep a correction on, or mask the prefix.",
        )


@note_rule("async_age", "schedule")
def note_async_age(facts: Facts) -> Iterator[Say]:
    """Async samples are old."""
    if facts.experiment.schedule == "async":
        yield Say(
            "schedule = async",
            f"samples are predicted to be {facts.staleness.predicted} versions old when trained (estimate)",
            "Watch staleness/mean and staleness/max.",
        )


@note_rule("no_correction", "correction", "schedule", "precision")
def note_no_correction(facts: Facts) -> Iterator[Say]:
    """Old or quantised rollouts without a correction are biased."""
    experiment = facts.experiment
    if experiment.correction != "none" or experiment.sc:
        return
    causes = []
    if experiment.schedule == "async":
        causes.append("an async schedule")
    if experiment.precision != "bf16":
        causes.append(f"{experiment.precision} rollouts")
    if causes:
        verb = "make" if len(causes) > 1 or facts.experiment.schedule == "sync" else "makes"
        yield Say(
            "correction = none",
            f"{' and '.join(causes)} {verb} the sampler's distribution differ from the trainer's, and nothing "
            "corrects it",
            'Set correction to "tis" or "icepop".',
        )


@note_rule("hybrid_kernels", "model")
def note_hybrid_kernels(facts: Facts) -> Iterator[Say]:
    """Recurrent layers need their own kernels."""
    if facts.model.arch.is_hybrid:
        yield Say(
            f"model = {facts.model.id}",
            f"its {facts.model.arch.linear_layers} recurrent layers need the FLA/GDN kernels in trainer and engine",
            "Check that the image has them.",
        )


@note_rule("hybrid_pool", "ssm_ratio", "concurrency")
def note_hybrid_pool(facts: Facts) -> Iterator[Say]:
    """State and KV share one pool."""
    if facts.model.arch.is_hybrid:
        rows = {row.item: row.bytes for row in facts.memory.rows if row.phase == "rollout"}
        yield Say(
            f"ssm_ratio = {facts.experiment.ssm_ratio if facts.experiment.ssm_ratio is not None else 'default 0.9'}",
            f"recurrent state takes {format_bytes(rows.get('recurrent state', 0))} and KV "
            f"{format_bytes(rows.get('KV cache', 0))} of each engine GPU; they run out together at a ratio of about "
            f"{facts.memory.balanced_state_ratio:.2g} (estimate)",
        )


@note_rule("sc_objective", "sc")
def note_sc_objective(facts: Facts) -> Iterator[Say]:
    """Score centering trains another objective."""
    if facts.experiment.sc:
        yield Say(
            "sc = on",
            "score centering changes the objective: no clip, no std division, loss per token, and a centre over the "
            "sampler's 128 most likely tokens",
            "Compare it with a run of its own, not with a clipped one.",
        )


@note_rule("hicache_host", "hicache")
def note_hicache_host(facts: Facts) -> Iterator[Say]:
    """The host cache is host memory."""
    if facts.experiment.hicache:
        release = (
            "--sglang-release-hicache of slime's patch frees it during training"
            if facts.experiment.layout == "colocate"
            else "it stays for the whole run"
        )
        size = format_bytes(facts.memory.hicache_bytes)
        yield Say("hicache = on", f"the host cache takes {size} of a node's memory; {release}")


@note_rule("eagle_limit", "eagle", "concurrency")
def note_eagle_limit(facts: Facts) -> Iterator[Say]:
    """Speculation has a lower default limit."""
    experiment = facts.experiment
    if experiment.eagle == "off" or read_slime_arg(experiment, "--sglang-max-running-requests") is not None:
        return
    limit = count_running_limit(experiment)
    if limit < experiment.concurrency:
        yield Say(
            f"concurrency = {experiment.concurrency}",
            f"with EAGLE and no limit of its own SGLang runs at most {EAGLE_RUNNING_LIMIT} requests at a time",
            "Add --sglang-max-running-requests to export.slime_args.",
        )


@note_rule("eagle_acceptance", "eagle")
def note_eagle_acceptance(facts: Facts) -> Iterator[Say]:
    """The gain depends on acceptance."""
    if facts.experiment.eagle != "off":
        yield Say(
            f"eagle = {facts.experiment.eagle}",
            f"the predicted speed-up of {facts.timings.speculation_speedup:.2f} assumes that 80 % of drafts are "
            "accepted",
            "Measure rollout/spec_accept_rate; it falls as the policy moves away from its draft.",
        )


def compute_prefill_chunk(facts: Facts) -> int:
    """Tokens of a prefill chunk on one rank: SGLang's default for the GPU, divided by DP attention."""
    asked = read_slime_arg(facts.experiment, "--sglang-chunked-prefill-size")
    if asked is not None and asked.isdecimal():
        chunk = int(asked)
    else:
        memory = facts.gpu.memory_bytes / GIB
        chunk = 2048 if memory < 35 else 4096 if memory < 60 else 8192 if memory < 160 else 16384
    return chunk // max(1, facts.layout.engine_dp)


@note_rule("prefill_chunk", "model", "gpu")
def note_prefill_chunk(facts: Facts) -> Iterator[Say]:
    """A tiny chunk makes prefill slow."""
    chunk = compute_prefill_chunk(facts)
    if chunk < SMALL_CHUNK_TOKENS:
        yield Say(
            f"DP attention {facts.layout.engine_dp}",
            f"SGLang divides the prefill chunk by it, which leaves {chunk} tokens per rank, under {SMALL_CHUNK_TOKENS}",
            "Add --sglang-chunked-prefill-size 131072 to export.slime_args, as slime's GLM-5 scripts do.",
        )


@note_rule("deterministic_engine", "deterministic")
def note_deterministic_engine(facts: Facts) -> Iterator[Say]:
    """Repeatable is not equal."""
    if facts.experiment.deterministic:
        yield Say(
            "deterministic = on",
            "the same run repeats itself; trainer and engine still compute different logprobs",
            "Keep a correction on.",
        )


@note_rule("cpu_adam_host", "cpu_adam")
def note_cpu_adam_host(facts: Facts) -> Iterator[Say]:
    """The CPU optimizer is host memory."""
    if facts.experiment.cpu_adam:
        size = format_bytes(facts.memory.cpu_optimizer_bytes)
        yield Say(
            "cpu_adam = on",
            f"the optimizer takes {size} of each node's host memory, before pinned transfer copies",
            "Check the nodes' memory.",
        )


@note_rule("recompute_off", "recompute")
def note_recompute_off(facts: Facts) -> Iterator[Say]:
    """Kept activations."""
    if not facts.experiment.recompute:
        size = sum(row.bytes for row in facts.memory.rows if row.phase == "train" and row.item == "activations")
        yield Say("recompute = off", f"activations take {format_bytes(size)} of each trainer GPU (estimate)")


@note_rule("fp8_training", "precision")
def note_fp8_training(facts: Facts) -> Iterator[Say]:
    """FP8 training is young."""
    if facts.experiment.precision == "fp8train":
        yield Say("precision = fp8train", "FP8 training is experimental", "Compare its loss with a BF16 run first.")


@note_rule("int4_beta", "precision")
def note_int4_beta(facts: Facts) -> Iterator[Say]:
    """INT4 rollouts are beta."""
    if facts.experiment.precision == "int4":
        yield Say(
            "precision = int4",
            "INT4 rollouts are beta; only the rollout is quantised, and the INT4 training variables of slime's scripts "
            "are not written",
        )


@note_rule("short_run", "rounds")
def note_short_run(facts: Facts) -> Iterator[Say]:
    """A short run saves once (E08)."""
    experiment = facts.experiment
    if 0 < experiment.rounds < SHORT_RUN_ROUNDS and not experiment.straw:
        yield Say(
            f"rounds = {experiment.rounds}",
            f"a run shorter than the save interval of {SHORT_RUN_ROUNDS} saves once, after its last round; "
            "interrupted, it "
            "saves nothing",
        )


@note_rule("deepscaler_tag", "reward", "task")
def note_deepscaler_tag(facts: Facts) -> Iterator[Say]:
    """deepscaler reads only what follows the think-end tag (X03)."""
    if facts.experiment.task == "math" and facts.experiment.reward.kind == "deepscaler":
        yield Say(
            "reward.kind = deepscaler",
            "reads the answer after the last think-end tag or ### Response marker, and gives 0 to a response "
            "with neither",
            "Look at a few responses of the model before GPU time: its chat template must produce one of them.",
        )


@note_rule("async_requeue", "slime_target", "schedule", "partial")
def note_async_requeue(facts: Facts) -> Iterator[Say]:
    """An aborted async group goes back with its tokens."""
    experiment = facts.experiment
    if experiment.slime_target == "624b824a" and experiment.schedule == "async" and not experiment.partial:
        yield Say(
            "partial = off",
            "slime 624b824a requeues an aborted async group with its tokens all the same, so mixed versions can appear",
        )


@note_rule("kv_capacity", "concurrency", "response_tokens")
def note_kv_capacity(facts: Facts) -> Iterator[Say]:
    """Fewer whole responses fit than are sent (X01.6)."""
    memory = facts.memory
    if facts.experiment.layout == "external" or memory.requests_capacity >= facts.experiment.concurrency:
        return
    if memory.requests_capacity < 1:
        return
    tokens = memory.prompt_tokens + memory.response_tokens
    yield Say(
        f"concurrency = {facts.experiment.concurrency}",
        f"an engine holds {memory.requests_capacity} whole responses of {tokens} tokens "
        f"({memory.kv_capacity_tokens:,} KV "
        "tokens); the rest wait or are evicted and prefilled again",
        f"Set concurrency to {memory.requests_capacity}.",
    )


@note_rule("memory_tight", "nodes", "gpu")
def note_memory_tight(facts: Facts) -> Iterator[Say]:
    """Under a tenth is left."""
    for total in facts.memory.totals:
        if total.verdict == "tight":
            left = format_bytes(total.capacity_bytes - total.bytes)
            yield Say(
                f"{total.phase} memory", f"only {left} of {format_bytes(total.capacity_bytes)} is left (estimate)"
            )


@note_rule("staleness_bound", "max_staleness")
def note_staleness_bound(facts: Facts) -> Iterator[Say]:
    """slime has no flag for a bound (X04.4)."""
    if facts.experiment.max_staleness is not None:
        yield Say(
            f"max_staleness = {facts.experiment.max_staleness}",
            "slime has no flag for it: the exported script carries it as a comment, and only hotloop's own loop "
            "enforces it",
        )


@note_rule("rollout_gpus_unused", "rollout_gpus", "layout")
def note_rollout_gpus_unused(facts: Facts) -> Iterator[Say]:
    """Colocated engines use the trainer's GPUs."""
    given = facts.given.rollout_gpus
    if facts.experiment.layout == "colocate" and given is not None and given != facts.layout.rollout_gpus:
        yield Say(
            f"rollout_gpus = {given}",
            f"is not used while colocated: the engines take the trainer's {facts.layout.rollout_gpus} GPUs",
        )


@note_rule("choice_unused", "layout", "pd", "eagle", "transport", "straw", "eval_mode", "task", "model")
def note_choice_unused(facts: Facts) -> Iterator[Say]:
    """A choice that was given and that nothing reads."""
    given, default = facts.given, Experiment()
    idle: dict[str, tuple[bool, str]] = {
        "external_addrs": (given.layout != "external", "layout is not external"),
        "prefill_gpus": (not given.pd, "pd is off"),
        "rdma_device": (not given.pd, "pd is off"),
        "eagle_steps": (given.eagle == "off", "eagle is off"),
        "draft_path": (given.eagle != "external", "eagle is not external"),
        "weight_dir": (given.transport == "nccl", "transport is nccl"),
        "local_weight_dir": (given.transport != "delta", "transport is not delta"),
        "straw_dir": (not given.straw, "straw is off"),
        "straw_run_id": (not given.straw, "straw is off"),
        "straw_declaration": (not given.straw, "straw is off"),
        "ssm_dtype": (not facts.model.arch.is_hybrid, f"{facts.model.id} has no recurrent layers"),
        "ssm_ratio": (not facts.model.arch.is_hybrid, f"{facts.model.id} has no recurrent layers"),
        "eval_data": (given.eval_mode == "off", "eval_mode is off"),
        "generate_hook": (given.task != "custom", "task is not custom"),
        "reward_hook": (given.task != "custom", "task is not custom"),
    }
    for name, (is_idle, why) in idle.items():
        if is_idle and getattr(given, name) != getattr(default, name):
            yield Say(f"{name} = {show(getattr(given, name))}", f"is not used: {why}", "", (name,))


@note_rule("rates_unknown", "gpu")
def note_rates_unknown(facts: Facts) -> Iterator[Say]:
    """A GPU without published rates."""
    if not facts.timings.has_rates:
        yield Say(
            f"gpu = {facts.gpu.id}", "its FLOP/s are not published, so compute times are left out of every estimate"
        )


@note_rule("resume_without_tracker", "resume_from")
def note_resume_without_tracker(facts: Facts) -> Iterator[Say]:
    """A folder without a tracker starts afresh (X06.2)."""
    if facts.experiment.resume_from and facts.resume_facts is not None and facts.resume_facts.latest_iteration is None:
        yield Say(
            f"resume_from = {facts.experiment.resume_from}",
            "holds no latest_checkpointed_iteration.txt: the run starts from train_path at round 0 with a fresh "
            "optimizer",
        )


@note_rule("resume_unread", "resume_from")
def note_resume_unread(facts: Facts) -> Iterator[Say]:
    """The plan does not read folders."""
    if facts.experiment.resume_from and facts.resume_facts is None:
        yield Say(
            f"resume_from = {facts.experiment.resume_from}",
            "was not read here, so where the run starts is not known",
            "Run hotloop resume-plan where the folder is.",
        )


_SIZES = ("tp", "pp", "cp", "ep", "etp", "engine_gpus")


def _compare_resume(facts: Facts) -> tuple[Finding, ...]:
    """Say what differs from the experiment that saved the checkpoint (X06.3)."""
    if facts.resume_facts is None or facts.resume_facts.before is None:
        return ()
    saved = resolve(facts.resume_facts.before, facts.catalog)
    before = dict(flatten(saved.model_dump(mode="json")))
    after = dict(flatten(facts.experiment.model_dump(mode="json")))
    # Where and how long the new run goes on is no difference between the two experiments.
    ignored = {"resume_from", "rounds", "rounds_more"}
    problems = compare_for_resume(
        {key: value for key, value in before.items() if key not in ignored},
        {key: value for key, value in after.items() if key not in ignored},
    )
    found = [
        make_finding(problem.code, Say(problem.where, problem.why, problem.do), (problem.where.split(":", 1)[0],))
        for problem in problems
    ]
    old = effective_recipe(saved, find_model(facts.catalog, saved.model))
    for name in _SIZES:
        sizes = getattr(old, name), getattr(facts.recipe, name)
        if sizes[0] != sizes[1]:
            why = "may change: checkpoints can be resharded"
            found.append(make_finding("resume_parallel", Say(f"{name}: {sizes[0]} -> {sizes[1]}", why), (name,)))
    return tuple(found)
