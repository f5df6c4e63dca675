"""From an experiment to the parts of its run: settings of engine and trainer, verifier, source, controller.

Owns: the translation of the experiment's sections into the ports' settings, and the check of all prompts against the
policy's context.

Promises: every key that support.py calls honoured is read here, in dataset.py or by the command. What is opened is
closed by the controller.
Does not do: reading experiments (experiment/load.py), making policies (models/builtin.py, called by the command).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotloop.engines.base import Engine, EngineInfo, EngineSettings, open_engine
from hotloop.errors import InputError
from hotloop.experiment.choices import Experiment
from hotloop.loop.checkpoint import LoopState
from hotloop.loop.collecting import Collector
from hotloop.loop.controller import Controller, LoopSettings, Parts
from hotloop.loop.dataset import Dataset, make_source
from hotloop.loop.evaluate import Evaluator
from hotloop.loop.progress import Progress
from hotloop.loop.queue import InMemoryQueue
from hotloop.loop.run_folder import RunFolder
from hotloop.loop.sampling import Sampler, find_longest_prompt
from hotloop.loop.scoring import JudgeVerifier
from hotloop.loop.weight_sync import InMemorySync, NoCopy, WeightSync
from hotloop.models.config import read_config
from hotloop.models.tokenizer import Tokenizer, open_tokenizer
from hotloop.trainers.base import LossSettings, OptimizerSettings, TrainerSettings, open_trainer
from hotloop.types import SamplingParams, Task
from hotloop.verifiers.base import Verifier
from hotloop.verifiers.registry import open_verifier as build_reward

CORRECTION_BOUNDS = {"none": (0.0, 2.0), "tis": (0.0, 2.0), "icepop": (0.5, 2.0)}
"""Lower and upper bound of the importance weight (slime's defaults for TIS and IcePop)."""


def make_loop_settings(experiment: Experiment) -> LoopSettings:
    """Take from the experiment what the rounds need."""
    laptop = experiment.laptop
    return LoopSettings(
        num_rounds=experiment.rounds,
        seed=laptop.seed,
        normalizes_std=experiment.algorithm.normalize_std,
        checkpoint_interval=laptop.checkpoint_interval,
        keep_checkpoints=laptop.keep_checkpoints,
        eval_interval=experiment.eval_interval,
    )


def make_trainer_settings(experiment: Experiment, policy_dir: Path) -> TrainerSettings:
    """Translate `[algorithm]`, `[optimizer]` and `[laptop]` for the trainer."""
    algorithm, optimizer, laptop = experiment.algorithm, experiment.optimizer, experiment.laptop
    assert algorithm.kind in ("grpo", "gspo", "cispo")  # support.py refuses the others
    low, high = CORRECTION_BOUNDS[experiment.correction]
    return TrainerSettings(
        policy_dir=str(policy_dir),
        device=laptop.device,
        threads=laptop.threads,
        seed=laptop.seed,
        loss=LossSettings(
            kind=algorithm.kind,
            eps_clip=algorithm.eps_clip,
            eps_clip_high=algorithm.eps_clip_high,
            dual_clip=algorithm.dual_clip,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
            entropy_coef=algorithm.entropy_coef,
            aggregation=algorithm.aggregation,
            correction=experiment.correction,
            correction_low=low,
            correction_high=high,
            temperature=experiment.sampling.temperature,
        ),
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            lr_decay_style=optimizer.lr_decay_style,
            lr_min_frac=optimizer.lr_min_frac,
            lr_warmup_steps=optimizer.lr_warmup_steps,
            total_steps=max(1, experiment.rounds * optimizer.steps_per_round),
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            steps_per_round=optimizer.steps_per_round,
            max_tokens_per_microbatch=optimizer.max_tokens_per_microbatch,
        ),
        exact_savings=laptop.exact_savings,
        replay_routed_experts=experiment.r3,
    )


def make_engine_settings(experiment: Experiment, policy_dir: Path, max_context: int) -> EngineSettings:
    """Translate `[laptop]` for the engine."""
    laptop = experiment.laptop
    return EngineSettings(
        policy_dir=str(policy_dir),
        device=laptop.device,
        dtype=laptop.dtype,
        threads=laptop.threads,
        max_slots=laptop.max_slots,
        max_context=max_context,
        merges_prefixes=laptop.exact_savings,
    )


def make_sampling_params(experiment: Experiment, dataset: Dataset, tokenizer: Tokenizer) -> SamplingParams:
    """Translate `[sampling]` for the engine."""
    sampling = experiment.sampling
    return SamplingParams(
        max_new_tokens=dataset.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=tokenizer.stop_ids,
        stop=sampling.stop,
    )


def open_verifier(experiment: Experiment, dataset: Dataset) -> Verifier:
    """Open the experiment's reward; a built-in task with several right answers judges `exact` itself.

    Raises:
        InputError: the reward cannot be opened.
    """
    if dataset.judge is not None and experiment.reward.kind == "exact":
        return JudgeVerifier(dataset.name, dataset.judge)
    return build_reward(experiment.reward)


def read_policy_config(policy_dir: Path) -> dict[str, Any]:
    """Read config.json of a policy.

    Raises:
        InputError: code `policy_not_found` or `policy_config`.
    """
    path = policy_dir / "config.json"
    if not path.is_file():
        raise InputError(
            "policy_not_found",
            "there is no config.json, so this is not a Hugging Face directory",
            where=f"laptop.policy = {str(policy_dir)!r}",
            do="Name a directory with config.json, safetensors and a tokenizer, or dense, or moe.",
        )
    return dict(read_config(policy_dir).hf)


def choose_context(
    tokenizer: Tokenizer, dataset: Dataset, config: dict[str, Any], *, applies_chat_template: bool
) -> int:
    """Choose the KV slots per sequence: the longest prompt and its answer, at most the policy's own limit.

    Raises:
        InputError: every prompt that leaves no room for one token, together (`prompt_too_long`).
    """
    limit = int(config.get("max_position_embeddings") or 1 << 30)
    tasks: list[Task] = [*dataset.train, *dataset.held_out]
    if dataset.is_builtin:  # one length of prompt, in characters and therefore in tokens
        tasks = [max(tasks, key=lambda task: len(str(task.prompt)))]
    longest = find_longest_prompt(tokenizer, tasks, applies_chat_template, limit)
    return min(limit, longest + dataset.max_new_tokens)


def open_sampler(
    experiment: Experiment, dataset: Dataset, policy_dir: Path, *, run_folder: RunFolder | None = None
) -> Sampler:
    """Open the tokenizer and an engine with a policy's weights.

    Args:
        run_folder: of a run whose rollouts come from a deployment; None opens an engine in this process.

    Raises:
        InputError: the policy cannot be used, or a prompt does not fit it.
    """
    tokenizer = open_tokenizer(policy_dir)
    applies_chat_template = experiment.data.apply_chat_template and not dataset.is_builtin
    config = read_policy_config(policy_dir)
    max_context = choose_context(tokenizer, dataset, config, applies_chat_template=applies_chat_template)
    settings = make_engine_settings(experiment, policy_dir, max_context)
    engine = open_engine(settings) if run_folder is None else open_deployment(experiment, settings, config, run_folder)
    return Sampler(
        engine,
        tokenizer,
        make_sampling_params(experiment, dataset, tokenizer),
        experiment.laptop.seed,
        max_context,
        applies_chat_template,
        returns_routed_experts=engine.info.num_experts > 0,
    )


def open_deployment(
    experiment: Experiment, settings: EngineSettings, config: dict[str, Any], folder: RunFolder
) -> Engine:
    """Prepare the deployment of a `separate` or `external` run; it is reached at the first load."""
    from hotloop.loop.deployment_process import DeploymentProcess
    from hotloop.loop.publishing import make_bucket_url
    from hotloop.loop.served_engine import ServedEngine

    info = EngineInfo(
        kind="deployment",
        vocab_size=int(config["vocab_size"]),
        max_context=settings.max_context,
        num_layers=int(config["num_hidden_layers"]),
        num_experts=int(config.get("num_experts") or 0),
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
    )
    laptop = experiment.laptop
    if experiment.layout == "external":
        return ServedEngine(info, None, url=laptop.service_url)
    engine = {
        "kind": "torch",
        "device": settings.device,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "max_slots": settings.max_slots,
        "max_context": settings.max_context,
    }
    bucket = make_bucket_url(choose_bucket(experiment, folder))
    return ServedEngine(info, DeploymentProcess(folder.root / "deployment", bucket, laptop.replicas, engine))


def choose_bucket(experiment: Experiment, folder: RunFolder) -> str:
    """Return the bucket that a run publishes into; a `separate` run without one uses a folder of its own."""
    if experiment.laptop.publish or experiment.layout != "separate":
        return experiment.laptop.publish
    return str(folder.root / "bucket")


def open_evaluator(experiment: Experiment, dataset: Dataset, policy_dir: Path) -> Evaluator:
    """Open an evaluator of its own engine; close it after use.

    Raises:
        InputError: code `no_held_out`, and those of `open_sampler` and `open_verifier`.
    """
    if not dataset.held_out:
        raise InputError(
            "no_held_out", "the run has no held-out items", where="data.held_out_path", do="Name a file with --set."
        )
    verifier = open_verifier(experiment, dataset)
    return Evaluator(open_sampler(experiment, dataset, policy_dir), verifier, dataset.held_out, experiment.eval_samples)


def assemble(
    experiment: Experiment,
    dataset: Dataset,
    folder: RunFolder,
    *,
    progress: Progress,
    began: float,
    checkpoint: tuple[LoopState, Path] | None = None,
) -> Controller:
    """Open everything a run needs; its policy lies in `folder.policy` already.

    Args:
        checkpoint: state and directory to continue from.

    Raises:
        InputError: the policy, the reward or the data cannot be used.
    """
    policy_dir = folder.policy
    verifier = open_verifier(experiment, dataset)
    is_served = experiment.layout != "colocate"
    sampler = open_sampler(experiment, dataset, policy_dir, run_folder=folder if is_served else None)
    trainer = open_trainer(make_trainer_settings(experiment, policy_dir))
    source = make_source(experiment, dataset)
    state = None
    if checkpoint is not None:
        state, directory = checkpoint
        trainer.load(directory)
        source.restore(state.cursor)
    sampling = experiment.sampling
    collector = Collector(
        source=source,
        sampler=sampler,
        verifier=verifier,
        queue=InMemoryQueue(),
        num_groups=sampling.num_groups,
        group_size=sampling.group_size,
        submission=sampling.over_sampling or sampling.num_groups,
        drops_zero_std=sampling.drop_zero_std,
        max_staleness=experiment.max_staleness,
        next_group_id=state.next_group_id if state else 0,
    )
    evaluator = None
    if experiment.eval_mode == "inline":
        evaluator = Evaluator(sampler, verifier, dataset.held_out, experiment.eval_samples)
    engine = sampler.engine
    sync: WeightSync = NoCopy() if is_served else InMemorySync(trainer, engine)
    publisher = None
    bucket = choose_bucket(experiment, folder)
    if bucket:
        from hotloop.loop.publishing import RunPublisher  # brings the bucket's client, which most runs do not need

        # The transport `disk` ships every version whole.
        full_every = 1 if experiment.transport == "disk" else experiment.laptop.publish_full_every
        publisher = RunPublisher(bucket, policy_dir, full_every=full_every)
    hot_load = None
    if is_served:
        from hotloop.loop.served_engine import ServedEngine

        assert isinstance(engine, ServedEngine)
        hot_load = engine.load
    parts = Parts(collector, trainer, engine, sync, evaluator, progress, publisher, hot_load)
    return Controller(make_loop_settings(experiment), parts, folder, state=state, began=began)
