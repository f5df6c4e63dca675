"""The JSON Schemas of what clients send and get, for the OpenAPI document.

Owns: one schema per request field that the parsers honour, and the bodies of the answers.
Promises: the fields are exactly those of `rollout_request` and `hot_load_api`; `build_schemas` fails on a difference.
Does not do: checking requests: the parsers do, and they say more in plain words.
"""

from __future__ import annotations

from typing import Any

from hotloop.service.hot_load_api import INCREMENTAL_FIELDS, LOAD_FIELDS
from hotloop.service.rollout_request import (
    EXTRA_FIELDS,
    HONOURED,
    HONOURED_NVEXT,
    MAX_COMPLETIONS,
    MAX_SALT_CHARS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_TEMPERATURE,
)
from hotloop.service.wire_errors import STATUS_OF_CODE
from hotloop.snapshots.layout import MAX_POLICY_VERSION

Schema = dict[str, Any]
IDENTITY_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_LARGEST_INT32 = 2**31 - 1


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


_TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": ["boolean", "null"]}
_TOKEN_IDS: Schema = {"type": "array", "items": _integer(0, _LARGEST_INT32), "minItems": 1}
_VERSION = _integer(0, MAX_POLICY_VERSION)
_PIN: Schema = {
    "type": "object",
    "description": "What the weights must be: at least, or exactly, this policy version.",
    "properties": {"min_version": _VERSION, "exact_version": _VERSION},
    "minProperties": 1,
    "additionalProperties": False,
}
_NVEXT_FIELDS: Schema = {
    "extra_fields": {"type": "array", "items": _TEXT, "description": f"Known: {', '.join(sorted(EXTRA_FIELDS))}."},
    "token_data": {**_TOKEN_IDS, "description": "Replaces the tokenised prompt."},
    "cache_salt": {"type": "string", "maxLength": MAX_SALT_CHARS},
    "session_control": {"type": "object", "properties": {"session_id": _TEXT}},
    "weight_version": _PIN,
    "top_logprobs_kind": {"enum": ["sampling", "raw", None]},
    "engine_data_encoding": {"enum": ["list", "base64", None]},
    "routed_experts_layers": {"enum": ["all", "moe", None]},
}
_PROMPT: Schema = {
    "oneOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _TEXT,
        "content": {
            "oneOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
            ]
        },
    },
}
_ROLLOUT_FIELDS: Schema = {
    "model": {**_TEXT, "description": "The served name; NAME@IDENTITY pins a snapshot."},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": _PROMPT,
    "max_tokens": _or_null(_integer(1, _LARGEST_INT32)),
    "max_completion_tokens": _or_null(_integer(1, _LARGEST_INT32)),
    "temperature": {
        "type": ["number", "null"],
        "minimum": 0,
        "maximum": MAX_TEMPERATURE,
        "description": f"0, or at least {MIN_TEMPERATURE:g}.",
    },
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _or_null(_integer(-1, _LARGEST_INT32)),
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "n": _or_null(_integer(1, MAX_COMPLETIONS)),
    "stream": _BOOLEAN,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _BOOLEAN}},
    "stop": {"oneOf": [_TEXT, {"type": "array", "items": {**_TEXT, "minLength": 1}, "maxItems": 16}]},
    "stop_token_ids": {**_TOKEN_IDS, "minItems": 0},
    "seed": _or_null(_integer(-(2**63), 2**64 - 1)),
    "logprobs": {
        "oneOf": [_BOOLEAN, _integer(0, MAX_TOP_LOGPROBS)],
        "description": "An integer is for text completions only.",
    },
    "top_logprobs": _or_null(_integer(0, MAX_TOP_LOGPROBS)),
    "echo": _BOOLEAN,
    "echo_last": _or_null(_integer(0, _LARGEST_INT32)),
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "user": {**_TEXT, "description": "The last affinity key that is looked at."},
    "nvext": {"type": ["object", "null"], "properties": _NVEXT_FIELDS},
    "weight_version": _PIN,
    "raw_output": _BOOLEAN,
    "include_routing_matrix": _BOOLEAN,
    "return_tokens_as_token_ids": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
}
_INCREMENTAL: Schema = {
    "previous_snapshot_identity": {"type": ["string", "null"], "pattern": IDENTITY_PATTERN},
    "compression_format": {"type": ["string", "null"]},
    "checksum_format": {"type": ["string", "null"]},
}
_LOAD: Schema = {
    "identity": {"type": "string", "pattern": IDENTITY_PATTERN},
    "incremental_snapshot_metadata": {
        "type": ["object", "null"],
        "properties": _INCREMENTAL,
        "additionalProperties": False,
    },
    "policy_version": _or_null(_VERSION),
    "reset_prompt_cache": {"enum": ["all", "new_session", "none", True, False, None]},
    "transition": {"enum": ["ASYNC", "SYNC", None]},
    "allow_rewind": {"type": "boolean"},
    "validation": {
        "type": ["object", "null"],
        "properties": {"extra_fields_ignore": {"type": ["array", "null"], "items": _TEXT}},
        "additionalProperties": False,
    },
}
_NAME_OR_NULL: Schema = {"type": ["string", "null"]}
_STAGES = ["idle", "pending", "downloading", "verifying", "staged", "loading", "done", "ready", "error"]


def _object(properties: Schema, *, optional: Schema | None = None) -> Schema:
    """An answer that has all of these members and may have the optional ones."""
    return {"type": "object", "required": sorted(properties), "properties": {**properties, **(optional or {})}}


_ERROR = _object(
    {
        "error": _object(
            {
                "type": _TEXT,
                "code": {"type": "string", "enum": sorted(STATUS_OF_CODE)},
                "message": _TEXT,
                "param": _NAME_OR_NULL,
                "identity": _NAME_OR_NULL,
                "details": {"type": "object"},
                "retryable": {"type": "boolean"},
            }
        )
    }
)
_LOADING_STATE = _object(
    {
        "stage": {"type": "string", "enum": _STAGES},
        "target_snapshot_identity": _NAME_OR_NULL,
        "bytes_done": _integer(0, 2**63 - 1),
        "bytes_total": _integer(0, 2**63 - 1),
        "chain": {"type": "array", "items": _TEXT},
        "step": _integer(0, 128 + 1),
        "started_at": _TEXT,
        "updated_at": _TEXT,
    },
    optional={"reason": _TEXT, "message": _TEXT, "details": {"type": "object"}, "retryable": {"type": "boolean"}},
)
_REPLICA_STATUS = _object(
    {
        "replica_id": _TEXT,
        "readiness": {"type": "boolean"},
        "current_snapshot_identity": _NAME_OR_NULL,
        "policy_version": {"type": ["integer", "null"]},
        "loading_state": _LOADING_STATE,
    },
    optional={"reason": _TEXT},
)
_STATUS = _object(
    {
        "ready": {"type": "boolean"},
        "target_snapshot_identity": _NAME_OR_NULL,
        "queued_snapshot_identity": _NAME_OR_NULL,
        "replicas": {"type": "array", "items": _REPLICA_STATUS},
    }
)
_LOAD_REPLY = _object(
    {
        "accepted": {"const": True},
        "identity": _TEXT,
        "already_current": {"type": "boolean"},
        "joined": {"type": "boolean"},
        "queued": {"type": "boolean"},
        "superseded": _NAME_OR_NULL,
        "current_snapshot_identity": _NAME_OR_NULL,
        "target_snapshot_identity": _NAME_OR_NULL,
        "policy_version": {"type": ["integer", "null"]},
    }
)
_LEDGER_ENTRY = _object(
    {
        "identity": _TEXT,
        "kind": {"enum": ["anchor", "delta", ""]},
        "parent": _NAME_OR_NULL,
        "policy_version": {"type": ["integer", "null"]},
        "manifest_digest": _TEXT,
        "formats": {"type": "object"},
        "requested_at": _TEXT,
        "finished_at": _NAME_OR_NULL,
        "state": {"enum": ["loading", "done", "error", "superseded", "canceled"]},
        "reason": _TEXT,
        "replicas": {"type": "object"},
        "hints": {"type": "object"},
    }
)
_LEDGER = _object(
    {
        "schema": {"const": 1},
        "base": {"type": ["object", "null"]},
        "entries": {"type": "array", "items": _LEDGER_ENTRY},
    }
)
_MODELS = _object(
    {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": _object({"id": _TEXT, "object": {"const": "model"}, "created": _integer(0, 0), "owned_by": _TEXT}),
        },
    }
)
_COUNT = _integer(0, 2**63 - 1)
_COMPLETION = _object(
    {
        "id": _TEXT,
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": _COUNT,
        "model": _TEXT,
        "choices": {
            "type": "array",
            "items": _object({"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "abort"]}}),
        },
        "usage": _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}),
    },
    optional={"nvext": {"type": "object"}},
)


def _request(fields: Schema, *, required: list[str], is_closed: bool) -> Schema:
    schema: Schema = {"type": "object", "properties": fields, "required": required}
    return {**schema, "additionalProperties": False} if is_closed else schema


def build_schemas() -> dict[str, Schema]:
    """Return `components.schemas`.

    Raises:
        AssertionError: a schema's fields are not those of its parser; a bug of ours.
    """
    for fields, known in (
        (_ROLLOUT_FIELDS, HONOURED),
        (_NVEXT_FIELDS, HONOURED_NVEXT),
        (_LOAD, LOAD_FIELDS),
        (_INCREMENTAL, INCREMENTAL_FIELDS),
    ):
        assert set(fields) == known, sorted(set(fields) ^ known)
    chat = {name: schema for name, schema in _ROLLOUT_FIELDS.items() if name != "prompt"}
    text = {name: schema for name, schema in _ROLLOUT_FIELDS.items() if name != "messages"}
    hint = {"identity": _LOAD["identity"], "files": {"type": ["array", "null"], "items": _TEXT}}
    return {
        "ChatRequest": _request(chat, required=[], is_closed=False),
        "TextRequest": _request(text, required=[], is_closed=False),
        "LoadRequest": _request(_LOAD, required=["identity"], is_closed=True),
        "HintRequest": _request(hint, required=["identity"], is_closed=True),
        "Completion": _COMPLETION,
        "Status": _STATUS,
        "LoadReply": _LOAD_REPLY,
        "Canceled": _object({"canceled": _TEXT}),
        "Accepted": _object({"accepted": {"const": True}}),
        "Ledger": _LEDGER,
        "Cleared": _object({"cleared": {"const": True}}),
        "Models": _MODELS,
        "Health": _object({"status": {"const": "ok"}}),
        "Ready": _object({"ready": {"const": True}}),
        "Document": {"type": "object", "required": ["openapi", "paths"]},
        "Error": _ERROR,
    }
