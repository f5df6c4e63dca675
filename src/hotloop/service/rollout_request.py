"""What a client asks for: an OpenAI body becomes token-id prompts, sampling parameters and wanted fields.

Owns: the fields of `/v1/chat/completions` and `/v1/completions` that we honour, those we refuse because leaving them
out would change the answer, and the list of those we ignore.
Promises: nothing is dropped silently: an ignored field is named in `x-hotloop-ignored`.
Does not do: version pins and affinity (routing.py, read at the gateway), answering (responses.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hotloop.errors import ServiceError
from hotloop.models.tokenizer import Tokenizer
from hotloop.service.token_ids_only import TokenIdsOnly, missing_tokenizer
from hotloop.types import SamplingParams

Kind = Literal["chat", "text"]
MAX_COMPLETIONS = 1024
"""Choices of one request: prompts times `n`."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
MAX_TOP_LOGPROBS = 128
MAX_SALT_CHARS = 128
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-5
"""Logits of a few hundred divided by less leave the range in which fp32 tells them apart."""
MAX_IGNORED_CHARS = 2000
DEFAULT_TEXT_MAX_TOKENS = 16

EXTRA_FIELDS = frozenset(
    {
        "engine_data",
        "completion_token_ids",
        "routed_experts",
        "prompt_logprobs",
        "worker_id",
        "timing",
        "stop_reason",
    }
)
HONOURED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stream",
        "stream_options",
        "stop",
        "stop_token_ids",
        "seed",
        "logprobs",
        "top_logprobs",
        "echo",
        "echo_last",
        "logit_bias",
        "user",
        "nvext",
        "weight_version",
        "raw_output",
        "include_routing_matrix",
        "return_tokens_as_token_ids",
        "return_token_ids",
    }
)
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "prompt_embeds": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
HONOURED_NVEXT = frozenset(
    {
        "extra_fields",
        "token_data",
        "cache_salt",
        "session_control",
        "weight_version",
        "top_logprobs_kind",
        "engine_data_encoding",
        "routed_experts_layers",
    }
)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One request, ready for an engine."""

    kind: Kind
    model: str
    prompts: list[list[int]]
    n: int
    params: SamplingParams
    """Its seed is set: drawn at random when the client gave none."""
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    top_logprobs_kind: Literal["sampling", "raw"]
    echo_tokens: int | None
    """Prompt tokens to put before the output; -1 means all, None none."""
    extra_fields: frozenset[str]
    encoding: Literal["list", "base64"]
    routed_experts_layers: Literal["all", "moe"]
    include_routing_matrix: bool
    raw_output: bool
    tokens_as_ids: bool
    cache_salt: str
    session_id: str
    ignored: tuple[str, ...]

    @property
    def wants_routes(self) -> bool:
        return self.include_routing_matrix or bool(self.extra_fields & {"engine_data", "routed_experts"})

    @property
    def wants_prompt_logprobs(self) -> bool:
        return "prompt_logprobs" in self.extra_fields or (self.echo_tokens is not None and self.logprobs)


def invalid(field: str, why: str, do: str = "") -> ServiceError:
    """Make the error of one field of a body."""
    return ServiceError("invalid_field", why, where=field, do=do, details={"param": field})


def parse_rollout_request(
    kind: Kind, body: Mapping[str, Any], headers: Mapping[str, str], tokenizer: Tokenizer
) -> RolloutRequest:
    """Turn a body into a request.

    Raises:
        ServiceError: `invalid_field` naming the field.
    """
    ignored = [name for name in body if name not in HONOURED and name not in _REFUSED_UNLESS]
    for name, allowed in _REFUSED_UNLESS.items():
        if name in body and body[name] not in allowed:
            raise invalid(name, "is not implemented here and would change the answer", "Leave it out.")
    nvext = _mapping(body, "nvext")
    ignored += [f"nvext.{name}" for name in nvext if name not in HONOURED_NVEXT]
    extra = nvext.get("extra_fields") or []
    if not isinstance(extra, list) or not all(isinstance(name, str) for name in extra):
        raise invalid("nvext.extra_fields", "must be a list of names")
    ignored += [f"nvext.extra_fields.{name}" for name in extra if name not in EXTRA_FIELDS]
    n = _integer(body, "n", 1, 1, MAX_COMPLETIONS)
    prompts = _prompts(kind, body, nvext, tokenizer)
    if len(prompts) * n > MAX_COMPLETIONS:
        raise invalid("prompt", f"{len(prompts)} prompts times n = {n} are more than {MAX_COMPLETIONS} completions")
    logprobs, top_logprobs = _logprobs(kind, body)
    control = _mapping(nvext, "session_control", "nvext.session_control")
    return RolloutRequest(
        kind=kind,
        model=read_model(body),
        prompts=prompts,
        n=n,
        params=_sampling(kind, body, tokenizer),
        stream=_boolean(body, "stream"),
        include_usage=_boolean(_mapping(body, "stream_options"), "include_usage", "stream_options.include_usage"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        top_logprobs_kind=_one_of(nvext, "top_logprobs_kind", ("sampling", "raw"), "nvext.top_logprobs_kind"),
        echo_tokens=_echo(body),
        extra_fields=frozenset(extra) & EXTRA_FIELDS,
        encoding=_one_of(nvext, "engine_data_encoding", ("list", "base64"), "nvext.engine_data_encoding"),
        routed_experts_layers=_one_of(nvext, "routed_experts_layers", ("all", "moe"), "nvext.routed_experts_layers"),
        include_routing_matrix=_boolean(body, "include_routing_matrix"),
        raw_output=_boolean(body, "raw_output") or _boolean(body, "return_token_ids") or has_vendor_header(headers),
        tokens_as_ids=_boolean(body, "return_tokens_as_token_ids"),
        cache_salt=_salt(nvext),
        session_id=str(headers.get("x-multi-turn-session-id") or control.get("session_id") or ""),
        ignored=tuple(ignored),
    )


def render_ignored(names: Sequence[str]) -> str:
    """Write the names of ignored fields as a header's value: printable ASCII, bounded, "..." where names are left out.

    The names come from the client, so nothing in them may end the header or split the list.
    """
    text = ""
    for name in names:
        safe = "".join(char if "!" <= char <= "~" and char != "," else "?" for char in name[:MAX_IGNORED_CHARS])
        if len(text) + len(safe) + 1 > MAX_IGNORED_CHARS:
            return f"{text},..." if text else "..."
        text = f"{text},{safe}" if text else safe
    return text


def has_vendor_header(headers: Mapping[str, str]) -> bool:
    """Say whether a request speaks the Fireworks dialect."""
    return "fireworks-model" in headers or "fireworks-deployment" in headers


def read_model(body: Mapping[str, Any]) -> str:
    """Read the model's name; absent means the served one.

    Raises:
        ServiceError: `invalid_field`.
    """
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "must be a text")
    return model or ""


def split_model_name(model: str, served_name: str) -> str:
    """Check the model's name and return the snapshot it pins, or "". A path before the name is ignored.

    Raises:
        ServiceError: `model_not_found`.
    """
    name, _, identity = model.rsplit("/", 1)[-1].partition("@")
    if model and name != served_name:
        raise ServiceError(
            "model_not_found",
            f"this deployment serves {served_name}, not {name}",
            where=f"model {model!r}",
            do=f'Send "model": "{served_name}".',
            details={"param": "model"},
        )
    return identity


def _prompts(kind: Kind, body: Mapping[str, Any], nvext: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    token_data = nvext.get("token_data")
    if token_data is not None:
        if not _is_ids(token_data):
            raise invalid("nvext.token_data", "must be a list of token ids")
        return [list(token_data)]
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise invalid("messages", "must be a list of at least one message")
        return [tokenizer.encode_chat([_message(message, i) for i, message in enumerate(messages)])]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if isinstance(prompt, list) and _is_ids(prompt):
        return [list(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [tokenizer.encode(item) for item in prompt]
        if all(_is_ids(item) for item in prompt):
            return [list(item) for item in prompt]
    raise invalid("prompt", "must be a text, a list of token ids, or a list of either")


def _message(message: Any, position: int) -> dict[str, str]:
    where = f"messages[{position}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(where, "must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise invalid(f"{where}.content", "only parts of type text are served")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise invalid(f"{where}.content", "must be a text")
    return {"role": message["role"], "content": content}


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value)
    )


def _sampling(kind: Kind, body: Mapping[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    default = DEFAULT_TEXT_MAX_TOKENS if kind == "text" else 2**31 - 1
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if stop and isinstance(tokenizer, TokenIdsOnly):
        raise missing_tokenizer("stop")
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(text, str) and text for text in stop):
        raise invalid("stop", "must be a text or a list of at most 16 texts, none empty")
    stop_ids = body.get("stop_token_ids") or []
    if stop_ids and not _is_ids(stop_ids):
        raise invalid("stop_token_ids", "must be a list of token ids")
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):
        raise invalid("seed", "must be a 64-bit integer")
    return SamplingParams(
        max_new_tokens=_integer(body, name, default, 1, 2**31 - 1),
        temperature=_temperature(body),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, low_open=True),
        top_k=_integer(body, "top_k", -1, -1, 2**31 - 1) or -1,
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        stop_token_ids=(*tokenizer.stop_ids, *stop_ids),
        stop=tuple(stop),
        seed=secrets.randbits(63) if seed is None else seed % 2**63,
        logit_bias=_logit_bias(body),
    )


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = _number(body, "temperature", 1.0, 0.0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid("temperature", f"{temperature!r} must be 0 or at least {MIN_TEMPERATURE:g}", "Send 0 for greedy.")
    return temperature


def _logit_bias(body: Mapping[str, Any]) -> dict[int, float]:
    raw = _mapping(body, "logit_bias")
    bias = {}
    for key, value in raw.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100
        if not _TOKEN_ID.fullmatch(key) or not is_number:
            raise invalid("logit_bias", f"{key[:40]!r}: {value!r} must map a token id to a number from -100 to 100")
        bias[int(key)] = float(value)
    return bias


def _logprobs(kind: Kind, body: Mapping[str, Any]) -> tuple[bool, int]:
    raw = body.get("logprobs")
    if isinstance(raw, int) and not isinstance(raw, bool):
        if kind == "chat" or not 0 <= raw <= MAX_TOP_LOGPROBS:
            raise invalid("logprobs", f"must be true or false, or in text completions 0 to {MAX_TOP_LOGPROBS}")
        return True, _integer(body, "top_logprobs", raw, 0, MAX_TOP_LOGPROBS)
    if raw not in (None, True, False):
        raise invalid("logprobs", "must be true or false")
    return bool(raw), _integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)


def _echo(body: Mapping[str, Any]) -> int | None:
    if body.get("echo_last") is not None:
        return _integer(body, "echo_last", 0, 0, 2**31 - 1)
    return -1 if _boolean(body, "echo") else None


def _salt(nvext: Mapping[str, Any]) -> str:
    salt = nvext.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARS or any(char in salt for char in "@/\\\0"):
        raise invalid(
            "nvext.cache_salt", f"must be a text of at most {MAX_SALT_CHARS} characters without @ / \\ or NUL"
        )
    return salt


def _mapping(body: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(path or name, "must be an object")
    return value


def _boolean(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    value = body.get(name)
    if value not in (None, True, False) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        raise invalid(path or name, "must be true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"{value!r} must be an integer from {low} to {high}")
    return value


def _number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float, *, low_open: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or (low_open and value == low):
        raise invalid(name, f"{value!r} must be a number {'above' if low_open else 'from'} {low:g} to {high:g}")
    return float(value)


def _one_of(body: Mapping[str, Any], name: str, allowed: tuple[Any, ...], path: str) -> Any:
    value = body.get(name)
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise invalid(path, f"{value!r} must be one of {', '.join(allowed)}")
    return value
