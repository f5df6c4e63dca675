"""The Engine port: token ids in, token records out.

Owns: the Protocol that every engine implements (torch, SGLang, vLLM, fake), its request and chunk records, and
`open_engine`, which imports an implementation when called so that nobody else names torch.

Promises (held by tests/contract/test_engine_contract.py on every implementation):
- every token carries its id, both logprobs and the policy version that produced it, recorded when it was drawn;
- a request with `n` completions prefills its prompt once; completions are told apart by `index`;
- same seed, prompt and weights give the same tokens whatever else runs beside the request;
- `pause` returns between decode steps and keeps requests and their KV; `resume` continues them; `write_weights` is only
  legal while paused and either installs everything or raises; tokens after it carry the new version;
- `abort` ends a request with finish_reason `abort` and all tokens drawn so far; aborting an unknown id does nothing.

Does not do: text, chat templates, tokenizing (models/tokenizer), routing or retries (service/).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from hotloop.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What `open_engine` needs to build an engine."""

    kind: Literal["torch", "fake", "sglang", "vllm"] = "torch"
    policy_dir: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer)."""
    device: str = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    threads: int = 1
    max_slots: int = 64
    """Sequences decoded at a time."""
    max_context: int = 0
    """KV slots per sequence in tokens; 0 means the policy's own limit."""
    prefix_cache_tokens: int = 0
    """Tokens of KV kept for prefix reuse; 0 turns it off."""
    url: str = ""
    """Address of a remote engine."""
    driver: Literal["inline", "thread"] = "inline"
    """Who steps an embedded engine: the caller's event loop (repeats exactly, blocks the loop for a step at a time), or
    a worker thread (a service that must answer while tokens are computed)."""
    merges_prefixes: bool = True
    """Completions of a request share one row until they differ: exact, and faster. False computes each by itself."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

    kind: str
    vocab_size: int
    max_context: int
    num_layers: int
    num_experts: int
    """0 for a dense policy."""
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, `n` completions."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    n: int = 1
    seeds: Sequence[int] | None = None
    """[n] one per completion; empty: derived from `params.seed` and the index, or random when that is None."""
    cache_namespace: str = ""
    """Prefixes are reused only inside one namespace."""
    top_logprobs: int = 0
    top_logprobs_kind: Literal["sampling", "raw"] = "sampling"
    return_support: bool = False
    return_routed_experts: bool = False
    return_prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one completion since its last chunk. Concatenated chunks are the whole record.

    `completion` holds the new tokens only; its version spans use absolute positions. `finish_reason` inside it is
    meaningful when `is_last`.
    """

    request_id: str
    index: int
    completion: Completion
    is_last: bool
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[float | None] | None = None
    """[prompt] raw logprobs of the prompt tokens, first None; on the first chunk when asked for."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """New bytes for absolute byte ranges of one checkpoint tensor."""

    name: str
    offsets: Any
    """int64 numpy array [R], byte offset of each range in the tensor's little-endian, C-order bytes."""
    lengths: Any
    """int64 numpy array [R]"""
    data: Any
    """bytes-like, the ranges' new bytes one after the other."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights to install: whole tensors, changed ranges, or a trainer's live parameters."""

    policy_version: int
    snapshot_identity: str = ""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Checkpoint name -> numpy array (or torch tensor for an in-process engine), any float dtype; cast on write."""
    ranges: Sequence[TensorRange] = ()
    """In the dtype of the checkpoint that the engine was opened from."""


class Engine(Protocol):
    """A program that turns tokens into tokens. Every method may be called from one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def policy_version(self) -> int: ...

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Chunk]:
        """Yield chunks as tokens come (`stream`), or one last chunk per completion.

        Raises:
            InputError: the prompt is empty, longer than the context, or holds an id outside the vocabulary.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def write_weights(self, update: WeightUpdate) -> None:
        """Install weights in place while paused.

        Raises:
            HotloopError: `policy_version` is then unchanged. Code `engine_error`: refused, the old weights are whole
                and serve on. Any other code: what the engine holds may be neither old nor new.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class PreparesWeights(Protocol):
    """An engine that does most of an install before the pause: what is left is to write memory.

    prepare_weights(update) --prepared--> swap_weights(prepared)
    while tokens are drawn                between two steps: write, new version
    """

    async def prepare_weights(self, update: WeightUpdate) -> Any:
        """Check an update and make it ready; nothing that serves changes. A prepared update may be dropped.

        Raises:
            HotloopError: `install_failed`, the update does not fit.
        """
        ...

    async def swap_weights(self, prepared: Any) -> float:
        """Pause, write and go on as one.

        Returns: seconds from the end of the step before the write to the start of the next.

        Raises:
            HotloopError: as `Engine.write_weights`; the engine then draws no more tokens until it is told to resume.
        """
        ...


async def collect(engine: Engine, request: GenerateRequest) -> list[Completion]:
    """Run one request to its end and return its `n` completions in index order."""
    found: dict[int, Completion] = {}
    async for chunk in engine.generate(request):
        found[chunk.index] = chunk.completion
    return [found[index] for index in range(request.n)]


def open_engine(settings: EngineSettings) -> Engine:
    """Build the engine that the settings name.

    Raises:
        MissingExtra: the implementation needs a package that is not installed.
        InputError: the policy directory or address is not usable.
    """
    from hotloop.engines.registry import build

    return build(settings)
