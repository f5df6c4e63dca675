#!/usr/bin/env bash
# hotloop experiment: GLM-4-9B (GLM-Z1-9B-0414), colocate, sync, bf16, correction tis.
# Recipe: scripts/run-glm4-9B.sh of slime 624b824a898ab0ec1fcb4d373004c7f3852bf515; sizes: slime docs, v0.4.0 (lab default).
# Written for slime v0.4.0.
# Every flag below is one that slime 624b824a also has.
# One engine of GLM-4-9B (GLM-Z1-9B-0414) with the flags that slime gives it, for SGLang 0.5.15.post1.
set -euo pipefail

SERVER_ARGS=(
  --model-path '/data/models/GLM-Z1-9B-0414'
  --tp-size 2
  --trust-remote-code
  --mem-fraction-static 0.7
)
SERVER_ARGS+=(--host "${SERVE_HOST:-0.0.0.0}" --port "${SERVE_PORT:-30000}")

exec python3 -m sglang.launch_server "${SERVER_ARGS[@]}" "$@"
