"""Parameters in one flat arena, and Hugging Face directories in and out.

Owns: `Arena` (one tensor; every parameter is a view on it, addressed by its checkpoint name), `read_policy` and
`write_policy` (config.json, safetensors, tokenizer files), and the estimate that refuses a policy that does not fit.

Promises: names and shapes on disk are those of Hugging Face (a tied lm_head is left out); no pickles, no remote code;
a directory is written under a temporary name and renamed, so a crash leaves nothing half-written; fused matrices
(q, k, v; gate, up; all experts of a layer) are views, so a write by checkpoint name is seen by the forward pass.

Does not do: the forward pass (models/decoder.py), the layout's order (models/config.py).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hotloop.errors import InputError, Problem, RunError
from hotloop.models.config import DecoderConfig, iter_slots, read_config
from hotloop.models.decoder import DecoderParams, LayerParams
from hotloop.units import format_bytes, format_count

if TYPE_CHECKING:
    from hotloop.models.fallback import ForeignParams

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor lies in the arena, in elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class Arena:
    """All parameters of one policy in one flat tensor."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        shapes: Iterable[tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.config = config
        self.slots: dict[str, Slot] = {}
        offset = 0
        for name, shape in iter_slots(config) if shapes is None else shapes:
            slot = Slot(offset, tuple(shape))
            self.slots[name] = slot
            offset += slot.size
        self.flat = torch.zeros(offset, dtype=dtype, device=device)
        """[all parameters] the one buffer; writing to it changes the policy."""
        self.grad: Tensor | None = None
        """[all parameters] where gradients accumulate, after `enable_gradients`."""
        self._params: DecoderParams | None = None
        self._foreign: ForeignParams | None = None

    @property
    def num_params(self) -> int:
        """Elements in the arena; a tied head counts once."""
        return self.flat.numel()

    def view(self, name: str) -> Tensor:
        """Give the live tensor of a checkpoint name."""
        return self._span(self.flat, name, name, self.slots[name].shape)

    def grad_view(self, name: str) -> Tensor:
        """Give the live gradient of a checkpoint name; `enable_gradients` comes first."""
        assert self.grad is not None
        return self._span(self.grad, name, name, self.slots[name].shape)

    def tensors(self) -> dict[str, Tensor]:
        """Give every live tensor by checkpoint name."""
        return {name: self.view(name) for name in self.slots}

    @property
    def params(self) -> DecoderParams:
        """The fused views that `decoder.forward` takes; the same objects on every call."""
        if self._params is None:
            self._params = self._build_params()
        return self._params

    @property
    def forward_params(self) -> DecoderParams | ForeignParams:
        """What `decoder.forward` takes for any policy: the fused views, or a transformers model on this arena."""
        if self.config.is_native:
            return self.params
        if self._foreign is None:
            from hotloop.models.fallback import build_foreign

            self._foreign = build_foreign(self.config, {name: self._one(name) for name in self.slots})
        return self._foreign

    def enable_gradients(self) -> torch.nn.Parameter:
        """Make the fused views leaves whose gradients accumulate in one flat buffer.

        Returns:
            A flat parameter over the whole arena with `.grad` set, so that an optimizer or a norm sees one tensor.
            Zero the gradient in place (`arena.grad.zero_()`); setting it to None would cut the link.
        """
        self.grad = torch.zeros_like(self.flat)
        self._params = self._build_params() if self.config.is_native else None
        self._foreign = None
        whole = torch.nn.Parameter(self.flat)
        whole.grad = self.grad
        return whole

    def _span(self, base: Tensor, first: str, last: str, shape: Sequence[int]) -> Tensor:
        start = self.slots[first].offset
        stop = self.slots[last].offset + self.slots[last].size
        return base.detach()[start:stop].view(*shape)

    def _leaf(self, first: str, last: str, shape: Sequence[int]) -> Tensor:
        leaf = self._span(self.flat, first, last, shape)
        if self.grad is not None:
            leaf.requires_grad_()
            leaf.grad = self._span(self.grad, first, last, shape)
        return leaf

    def _one(self, name: str) -> Tensor:
        return self._leaf(name, name, self.slots[name].shape)

    def _build_params(self) -> DecoderParams:
        config = self.config
        if not config.is_native:
            raise RunError("policy_not_native", f"the lean decoder cannot run this policy: {config.unsupported}")
        embed = self._one("model.embed_tokens.weight")
        layers = [self._build_layer(index) for index in range(config.num_layers)]
        norm = self._one("model.norm.weight")
        head = embed if config.tied_embeddings else self._one("lm_head.weight")
        return DecoderParams(embed=embed, layers=layers, norm=norm, head=head)

    def _build_layer(self, index: int) -> LayerParams:
        config = self.config
        at = f"model.layers.{index}."
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attention = at + "self_attn."
        layer = LayerParams(
            input_norm=self._one(at + "input_layernorm.weight"),
            qkv=self._leaf(attention + "q_proj.weight", attention + "v_proj.weight", (rows, config.hidden_size)),
            o=self._one(attention + "o_proj.weight"),
            post_norm=self._one(at + "post_attention_layernorm.weight"),
        )
        if config.has_qkv_bias:
            layer.qkv_bias = self._leaf(attention + "q_proj.bias", attention + "v_proj.bias", (rows,))
        if config.has_o_bias:
            layer.o_bias = self._one(attention + "o_proj.bias")
        if config.has_qk_norm:
            layer.q_norm = self._one(attention + "q_norm.weight")
            layer.k_norm = self._one(attention + "k_norm.weight")
        if config.is_moe_layer(index):
            experts, width, last = config.num_experts, config.moe_intermediate_size, config.num_experts - 1
            expert = at + "mlp.experts."
            layer.router = self._one(at + "mlp.gate.weight")
            layer.experts_gate_up = self._leaf(
                f"{expert}0.gate_proj.weight",
                f"{expert}{last}.up_proj.weight",
                (experts, 2 * width, config.hidden_size),
            )
            layer.experts_down = self._leaf(
                f"{expert}0.down_proj.weight", f"{expert}{last}.down_proj.weight", (experts, config.hidden_size, width)
            )
        else:
            layer.gate_up = self._leaf(
                at + "mlp.gate_proj.weight",
                at + "mlp.up_proj.weight",
                (2 * config.intermediate_size, config.hidden_size),
            )
            layer.down = self._one(at + "mlp.down_proj.weight")
        return layer


def check_fits(num_bytes: int, *, where: str, device: str = "cpu") -> None:
    """Refuse to allocate more than the memory that is free now.

    Raises:
        InputError: code `policy_too_large`, before anything is allocated.
    """
    free = measure_free_bytes(device)
    if num_bytes > free:
        raise InputError(
            "policy_too_large",
            f"needs {format_bytes(num_bytes)} of memory and {format_bytes(free)} is free",
            where=where,
            do="Use a smaller policy, dtype bf16, or fewer slots and a shorter context.",
        )


def measure_free_bytes(device: str = "cpu") -> int:
    """Measure the bytes that can be allocated now: free memory, within the limit of the container if there is one."""
    if device.startswith("cuda"):
        free, _total = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text(encoding="ascii").strip()
        if text.isdigit():
            limits.append(max(0, int(text) - int(used.read_text(encoding="ascii"))))
    if not limits:  # macOS: no /proc; physical memory is the only number at hand
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits)


def read_policy(
    directory: Path | str, dtype: torch.dtype = torch.float32, *, device: str = "cpu"
) -> tuple[DecoderConfig, Arena]:
    """Read a Hugging Face directory into an arena, casting to `dtype`.

    Raises:
        InputError: codes `policy_not_found`, `policy_config`, `policy_weights` (files or tensors missing, unknown or of
            the wrong shape, all listed), `policy_pickle`, `policy_too_large`.
    """
    directory = Path(directory)
    config = read_config(directory)
    files = _weight_files(directory)
    shapes: list[tuple[str, tuple[int, ...]]] | None = None
    if not config.is_native:
        shapes = sorted((name, shape) for path in files for name, shape in _header(path).items())
    count = sum(int(np.prod(shape, dtype=np.int64)) for _, shape in (shapes or iter_slots(config)))
    check_fits(count * dtype.itemsize, where=f"{directory} ({format_count(count)} parameters)", device=device)
    arena = Arena(config, dtype, device, shapes)
    problems: list[Problem] = []
    found: set[str] = set()
    for path in files:
        found |= _read_file(path, arena, problems)
    missing = [name for name in arena.slots if name not in found]
    if missing:
        problems.append(
            Problem(
                "policy_weights",
                f"{len(missing)} tensors are missing: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}",
                where=str(directory),
                do="The weights and config.json must come from the same checkpoint.",
            )
        )
    if problems:
        raise InputError.of(problems)
    return config, arena


def read_checkpoint_dtypes(directory: Path | str) -> dict[str, torch.dtype]:
    """Read the dtype of every tensor on disk from the file headers.

    Raises:
        InputError: codes `policy_weights`, `policy_pickle`.
    """
    found: dict[str, torch.dtype] = {}
    for path in _weight_files(Path(directory)):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                label = file.get_slice(name).get_dtype()
                if label not in _FLOAT_DTYPES:
                    raise InputError("policy_weights", f"dtype {label} is not a float", where=f"{path.name}: {name}")
                found[name] = _FLOAT_DTYPES[label]
    return found


def write_policy(
    directory: Path | str,
    config: DecoderConfig,
    arena: Arena,
    tokenizer_from: Path | str | Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Hugging Face directory: `config.json`, `model.safetensors`, tokenizer files.

    Args:
        directory: replaced if it exists; never left half-written.
        tokenizer_from: a policy directory whose tokenizer files are copied, or file names and bytes.
        dtype: of the tensors on disk; the arena's own when None.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    staging.mkdir()
    try:
        wanted = dtype or arena.flat.dtype
        tensors = {name: view.detach().to("cpu", wanted).contiguous() for name, view in arena.tensors().items()}
        save_file(tensors, str(staging / "model.safetensors"), metadata={"format": "pt"})
        hf = {**config.hf, "dtype": str(wanted).removeprefix("torch.")}
        (staging / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in _tokenizer_files(tokenizer_from).items():
            (staging / name).write_bytes(content)
        for path in staging.iterdir():
            _sync(path)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(staging, directory)
        _sync(directory.parent)
    except OSError as error:
        raise RunError(
            "policy_write_failed", f"cannot write the policy ({error.strerror})", where=str(directory)
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tokenizer_files(source: Path | str | Mapping[str, bytes]) -> dict[str, bytes]:
    if isinstance(source, Mapping):
        return dict(source)
    return {name: (Path(source) / name).read_bytes() for name in TOKENIZER_FILES if (Path(source) / name).is_file()}


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise InputError("policy_weights", f"the index is not readable ({error!r})", where=str(index)) from error
        paths = sorted({directory / Path(name).name for name in weight_map.values()})
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise InputError(
                "policy_weights",
                f"the index names {len(paths)} shards and {len(absent)} are absent: {', '.join(absent[:3])}",
                where=str(index),
                do="Download the missing shards again.",
            )
        return paths
    whole = directory / "model.safetensors"
    if whole.is_file():  # other files beside it, such as a checkpoint's optimizer, are not weights
        return [whole]
    paths = sorted(directory.glob("*.safetensors"))
    if paths:
        return paths
    pickles = [path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if pickles:
        raise InputError(
            "policy_pickle",
            f"weights are only there as pickles ({', '.join(pickles[:3])}), which can run code when opened",
            where=str(directory),
            do="Convert them to safetensors where you trust them.",
        )
    raise InputError("policy_weights", "there is no *.safetensors file", where=str(directory))


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with _open(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # not a mapping


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as error:
        raise InputError("policy_weights", f"not a readable safetensors file ({error})", where=str(path)) from error


def _read_file(path: Path, arena: Arena, problems: list[Problem]) -> set[str]:
    """Copy every tensor of one file into the arena; note what does not belong."""
    found: set[str] = set()
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            slot = arena.slots.get(name)
            if slot is None:
                if name == "lm_head.weight" and arena.config.tied_embeddings:
                    continue  # some exporters write the tied head twice
                if name.endswith(".rotary_emb.inv_freq"):
                    continue  # old checkpoints store this constant
                problems.append(
                    Problem("policy_weights", "the policy has no such tensor", where=f"{path.name}: {name}")
                )
                continue
            shape = tuple(file.get_slice(name).get_shape())
            if shape != slot.shape:
                problems.append(
                    Problem(
                        "policy_weights",
                        f"shape {list(shape)} where config.json asks for {list(slot.shape)}",
                        where=f"{path.name}: {name}",
                    )
                )
            else:
                arena.view(name).copy_(file.get_tensor(name))
            found.add(name)
    return found
