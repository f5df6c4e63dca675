"""The built-in small policies: made here, warmed up by a short supervised run, cached by content.

Owns: the two sizes (dense in the Qwen3 architecture, mixture of experts in Qwen3-MoE), their initial weights, the
warm-up recipe, and the cache under `$XDG_CACHE_HOME/hotloop/policies`.

Promises: same kind, seed, items and recipe give the same weights on one kind of machine, whoever asks: the warm-up
takes one thread, since sums depend on how many there are, and these policies are too small for two. The result is an
ordinary Hugging Face directory with a `policy.json` that says how it was made; a cache entry appears whole or not at
all.

Does not do: tasks. The caller brings (prompt, answer) pairs for training and for the gate.

Shapes: B rows, T tokens, V vocabulary. The recipe was chosen by measurement on ten seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hotloop.errors import InputError, RunError
from hotloop.models.config import DecoderConfig, parse_config
from hotloop.models.decoder import compute_load_balancing_loss, compute_logits, forward
from hotloop.models.tokenizer import (
    BOS_ID,
    CHAR_VOCAB_SIZE,
    EOS_ID,
    PAD_ID,
    Tokenizer,
    build_char_tokenizer,
    char_tokenizer,
)
from hotloop.models.weights import Arena, write_policy

PolicyKind = Literal["dense", "moe"]
Pairs = Sequence[tuple[str, str]]
Progress = Callable[[int, int, "float | None"], None]
"""Called with step, most steps, and the sampled gate accuracy when it was just measured."""

_RECIPE = {
    "version": 2,
    "batch": 128,
    "lr": 3e-3,
    "lr_warmup_steps": 50,
    "betas": (0.9, 0.98),
    "clip_grad": 1.0,
    "init_std": 0.02,
    "gate_from_step": 30,
    "gate_every": 5,
    "load_balancing_coef": 0.01,
}


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """How a built-in policy came to be."""

    kind: str
    seed: int
    num_params: int
    warmup_steps: int
    gate_accuracy: float
    """Sampled exact match on the gate items at the last measurement; 0 when there was no warm-up."""
    reached_gate: bool
    """False when the step limit came first."""
    warmup_s: float
    content_hash: str
    from_cache: bool


def builtin_config(kind: PolicyKind, *, max_positions: int = 512) -> DecoderConfig:
    """Give the architecture: 100,736 parameters dense, 224,640 with 8 experts of which 2 are used per token."""
    hf: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": CHAR_VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if kind == "moe":
        hf |= {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return parse_config(hf)


def cache_root() -> Path:
    """Give the folder that holds made policies."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hotloop" / "policies"


def make_policy(
    out_dir: Path | str,
    *,
    kind: PolicyKind = "dense",
    seed: int = 0,
    items: Pairs = (),
    gate: Pairs = (),
    warmup_accuracy: float = 0.4,
    warmup_max_steps: int = 400,
    max_positions: int = 512,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> PolicyReport:
    """Make a policy, or copy the one that was made from the same inputs before.

    Args:
        out_dir: must not exist, or be empty.
        items: (prompt, answer) pairs to train on; none, or `warmup_max_steps` 0, leaves random weights.
        gate: pairs on which sampled accuracy is measured; they decide when the warm-up stops.
        warmup_accuracy: sampled exact match in 0..1 at which it stops.
        cache: folder of made policies; `cache_root()` when None.

    Raises:
        InputError: codes `policy_exists` (the folder holds something), `warmup_data` (no gate, or a pair that does not
            fit the context), `not_in_vocabulary`.
        RunError: code `policy_write_failed`.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("policy_exists", "there is already something here", where=str(out), do="Name a new folder.")
    if items and warmup_max_steps and not gate:
        raise InputError("warmup_data", "a warm-up needs gate items to know when to stop")
    config = builtin_config(kind, max_positions=max_positions)
    key = _content_hash(config, seed, items, gate, warmup_accuracy, warmup_max_steps)
    store = cache or cache_root()
    entry = store / f"{kind}-{key}"
    hit = (entry / "policy.json").is_file()
    if not hit:
        arena = Arena(config)
        _initialise(arena, seed)
        began = time.perf_counter()
        steps, accuracy, reached = 0, 0.0, not items or not warmup_max_steps
        if items and warmup_max_steps:
            with _one_thread():
                steps, accuracy, reached = _warm_up(
                    arena, char_tokenizer(), items, gate, seed, warmup_accuracy, warmup_max_steps, progress
                )
        report = PolicyReport(
            kind, seed, arena.num_params, steps, accuracy, reached, time.perf_counter() - began, key, False
        )
        _store(entry, config, arena, report)
    stored = json.loads((entry / "policy.json").read_text(encoding="utf-8"))
    _copy(entry, out)
    return PolicyReport(**{**stored, "from_cache": hit})


def _content_hash(config: DecoderConfig, seed: int, items: Pairs, gate: Pairs, accuracy: float, max_steps: int) -> str:
    """Hash everything that the weights follow from."""
    digest = hashlib.sha256()
    head = [dict(config.hf), seed, accuracy, max_steps, _RECIPE, str(torch.__version__)]
    digest.update(json.dumps(head, sort_keys=True).encode())
    for pairs in (items, gate):
        digest.update(f"{len(pairs)}\n".encode())
        for prompt, answer in pairs:
            digest.update(json.dumps([prompt, answer]).encode())
    return digest.hexdigest()[:20]


def _store(entry: Path, config: DecoderConfig, arena: Arena, report: PolicyReport) -> None:
    files = build_char_tokenizer()
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    files["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
    files["policy.json"] = (json.dumps(asdict(report), indent=2) + "\n").encode()
    made = entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}")
    write_policy(made, config, arena, files)
    try:
        os.rename(made, entry)
    except OSError as error:
        # Another process made the same policy meanwhile; equal inputs give equal weights, so keep its entry.
        shutil.rmtree(made, ignore_errors=True)
        if not (entry / "policy.json").is_file():
            raise RunError("policy_write_failed", f"cannot write ({error.strerror})", where=str(entry)) from error


def _copy(entry: Path, out: Path) -> None:
    """Copy a cache entry under a temporary name, then rename."""
    staging = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(entry, staging)
        if out.exists():
            out.rmdir()
        os.rename(staging, out)
    except OSError as error:
        raise RunError("policy_write_failed", f"cannot write the policy ({error.strerror})", where=str(out)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _initialise(arena: Arena, seed: int) -> None:
    """Fill matrices from normal(0, 0.02) and norm weights with 1."""
    generator = torch.Generator().manual_seed(seed)
    for name in arena.slots:
        view = arena.view(name)
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            view.copy_(torch.empty(view.shape).normal_(0.0, _number("init_std"), generator=generator))


def _number(name: str) -> float:
    value = _RECIPE[name]
    assert isinstance(value, int | float)
    return float(value)


@dataclass(slots=True)
class _Encoded:
    """Pairs as padded arrays: prompt, then answer and eos, then padding."""

    ids_NT: Tensor
    prompt_lengths_N: Tensor
    lengths_N: Tensor


def _encode(tokenizer: Tokenizer, pairs: Pairs, max_positions: int) -> _Encoded:
    prompts = [tokenizer.encode(prompt) for prompt, _ in pairs]
    answers = [[*tokenizer.encode(answer, add_special_tokens=False), EOS_ID] for _, answer in pairs]
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    if lengths.max() > max_positions:
        worst = int(lengths.argmax())
        raise InputError(
            "warmup_data",
            f"prompt and answer need {lengths.max()} tokens and the context is {max_positions}",
            where=f"item {worst}: {pairs[worst][0]!r}",
        )
    ids = np.full((len(pairs), int(lengths.max())), PAD_ID, dtype=np.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = [*prompt, *answer]
    return _Encoded(torch.from_numpy(ids), torch.tensor([len(prompt) for prompt in prompts]), torch.from_numpy(lengths))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm_up(
    arena: Arena,
    tokenizer: Tokenizer,
    items: Pairs,
    gate: Pairs,
    seed: int,
    wanted: float,
    max_steps: int,
    progress: Progress | None,
) -> tuple[int, float, bool]:
    """Train on the answers until sampled accuracy on the gate is reached; return steps, accuracy, reached."""
    config = arena.config
    whole = arena.enable_gradients()
    assert arena.grad is not None
    optimizer = torch.optim.AdamW([whole], lr=_number("lr"), betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=True)
    train, held = _encode(tokenizer, items, config.max_positions), _encode(tokenizer, gate, config.max_positions)
    batches = torch.Generator().manual_seed(seed + 1)
    draws = torch.Generator().manual_seed(seed + 2)
    accuracy = 0.0
    for step in range(1, max_steps + 1):
        rows = torch.randint(len(items), (int(_number("batch")),), generator=batches)
        loss = _compute_loss(arena, train.ids_NT[rows], train.prompt_lengths_N[rows], train.lengths_N[rows])
        arena.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        torch.nn.utils.clip_grad_norm_([whole], _number("clip_grad"))
        optimizer.param_groups[0]["lr"] = _number("lr") * min(1.0, step / _number("lr_warmup_steps"))
        optimizer.step()
        is_gate_step = step >= _number("gate_from_step") and step % _number("gate_every") == 0
        if is_gate_step:
            accuracy = _sample_accuracy(arena, held, draws)
        if progress is not None:
            progress(step, max_steps, accuracy if is_gate_step else None)
        if is_gate_step and accuracy >= wanted:
            return step, accuracy, True
    return max_steps, accuracy, False


def _compute_loss(arena: Arena, ids_BT: Tensor, prompt_lengths_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the answer tokens, plus the load-balancing term of a mixture of experts."""
    config = arena.config
    length = int(lengths_B.max())
    ids_BT = ids_BT[:, :length]
    columns = torch.arange(length)[None]
    mask_BT = columns < lengths_B[:, None]
    out = forward(
        config,
        arena.params,
        ids_BT,
        columns.expand_as(ids_BT),
        mask_BT=mask_BT,
        record_routes=config.num_experts > 0,
        return_router_logits=config.num_experts > 0,
    )
    is_target_BT = mask_BT[:, 1:] & (columns[:, 1:] >= prompt_lengths_B[:, None])
    logits = compute_logits(config, arena.params, out.hidden_BTD[:, :-1][is_target_BT])
    loss = F.cross_entropy(logits, ids_BT[:, 1:][is_target_BT])
    if out.router_logits is not None:
        assert out.routes_BTLK is not None
        balance = compute_load_balancing_loss(out.router_logits, out.routes_BTLK, mask_BT, config)
        loss = loss + _number("load_balancing_coef") * balance
    return loss


@torch.no_grad()
def _sample_accuracy(arena: Arena, held: _Encoded, generator: torch.Generator) -> float:
    """Sample one answer per gate item at temperature 1 and count the exact ones, end token included."""
    config, params = arena.config, arena.params
    rows = held.ids_NT.shape[0]
    prompt_length = int(held.prompt_lengths_N.max())
    answer_lengths_N = held.lengths_N - held.prompt_lengths_N
    columns = torch.arange(prompt_length)[None]
    seen = columns < held.prompt_lengths_N[:, None]
    out = forward(config, params, held.ids_NT[:, :prompt_length], columns.expand(rows, -1), mask_BT=seen)
    past = out.kv
    last = out.hidden_BTD[torch.arange(rows), held.prompt_lengths_N - 1]
    correct = torch.ones(rows, dtype=torch.bool)
    positions = held.prompt_lengths_N.clone()
    most = int(answer_lengths_N.max())
    for index in range(most):
        probs = torch.softmax(compute_logits(config, params, last), -1)
        drawn = torch.multinomial(probs, 1, generator=generator)[:, 0]
        target = held.ids_NT.gather(1, positions.clamp(max=held.ids_NT.shape[1] - 1)[:, None])[:, 0]
        correct &= (drawn == target) | (index >= answer_lengths_N)
        if index + 1 == most:
            break
        step = forward(config, params, drawn[:, None], positions[:, None], past=past, past_mask_BS=seen)
        past = [(torch.cat((k, nk), 1), torch.cat((v, nv), 1)) for (k, v), (nk, nv) in zip(past, step.kv, strict=True)]
        seen = torch.cat((seen, torch.ones(rows, 1, dtype=torch.bool)), 1)
        last = step.hidden_BTD[:, 0]
        positions = positions + 1
    return float(correct.float().mean())
