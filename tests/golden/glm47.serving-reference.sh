#!/usr/bin/env bash
# hotloop experiment: GLM-4.7, colocate, sync, bf16, correction tis.
# Recipe: scripts/run-glm4.7-355B-A32B.sh of slime 624b824a898ab0ec1fcb4d373004c7f3852bf515; sizes: slime docs, v0.4.0 (lab default).
# Written for slime v0.4.0.
# Every flag below is one that slime 624b824a also has.
# One engine of GLM-4.7 with the flags that slime gives it, for SGLang 0.5.15.post1.
set -euo pipefail

SERVER_ARGS=(
  --model-path '/data/models/GLM-4.7'
  --tp-size 32
  --trust-remote-code
  --mem-fraction-static 0.7
  --enable-dp-attention
  --dp-size 4
  --enable-dp-lm-head
  --moe-dense-tp-size 1
  --ep-size 32
)
SERVER_ARGS+=(--host "${SERVE_HOST:-0.0.0.0}" --port "${SERVE_PORT:-30000}")

# The engine spans 4 nodes: run this on each with its rank 0..3 and the address of rank 0.
if [[ -z "${SERVE_MASTER_ADDR:-}" ]]; then
  echo "serving-reference.sh: set SERVE_MASTER_ADDR to host:port of the node with rank 0" >&2
  exit 1
fi
if [[ ! "${SERVE_NODE_RANK:-}" =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((SERVE_NODE_RANK >= 4)); then
  echo "serving-reference.sh: set SERVE_NODE_RANK to 0..3, got '${SERVE_NODE_RANK:-}'" >&2
  exit 1
fi
SERVER_ARGS+=(--nnodes 4 --node-rank "$SERVE_NODE_RANK" --dist-init-addr "$SERVE_MASTER_ADDR")

exec python3 -m sglang.launch_server "${SERVER_ARGS[@]}" "$@"
