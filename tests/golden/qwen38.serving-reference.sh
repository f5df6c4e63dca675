#!/usr/bin/env bash
# hotloop experiment: Qwen3.8-27B, colocate, sync, bf16, correction tis.
# Recipe: scripts/run-qwen3.5-27B.sh of slime 624b824a898ab0ec1fcb4d373004c7f3852bf515; sizes: slime docs, v0.4.0 (lab default).
# Written for slime v0.4.0.
# Every flag below is one that slime 624b824a also has.
# One engine of Qwen3.8-27B with the flags that slime gives it, for SGLang 0.5.15.post1.
# SGLang 0.5.23 and later have other names for these flags; replace them there:
#   --mamba-scheduler-strategy -> --mamba-radix-cache-strategy
set -euo pipefail

SERVER_ARGS=(
  --model-path '/data/models/Qwen3.8-27B'
  --tp-size 2
  --trust-remote-code
  --mem-fraction-static 0.7
  --mamba-scheduler-strategy 'extra_buffer'
)
SERVER_ARGS+=(--host "${SERVE_HOST:-0.0.0.0}" --port "${SERVE_PORT:-30000}")

exec python3 -m sglang.launch_server "${SERVER_ARGS[@]}" "$@"
