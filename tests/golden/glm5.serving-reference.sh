#!/usr/bin/env bash
# hotloop experiment: GLM-5.3, colocate, sync, fp8, correction tis.
# Recipe: scripts/run-glm5.2-744B-A40B.sh of slime 624b824a898ab0ec1fcb4d373004c7f3852bf515; sizes: slime docs, v0.4.0 (lab default).
# Written for slime v0.4.0.
# Every flag below is one that slime 624b824a also has.
# One engine of GLM-5.3 with the flags that slime gives it, for SGLang 0.5.15.post1.
# SGLang 0.5.23 and later have other names for these flags; replace them there:
#   --nsa-prefill-backend -> --dsa-prefill-backend
#   --nsa-decode-backend -> --dsa-decode-backend
set -euo pipefail

SERVER_ARGS=(
  --model-path '/data/models/GLM-5.3'
  --tp-size 64
  --trust-remote-code
  --mem-fraction-static 0.7
  --enable-dp-attention
  --dp-size 64
  --enable-dp-lm-head
  --moe-dense-tp-size 1
  --ep-size 64
  --moe-a2a-backend 'deepep'
  --deepep-mode 'auto'
  --page-size 64
  --nsa-prefill-backend 'flashmla_sparse'
  --nsa-decode-backend 'flashmla_kv'
  --disable-overlap-schedule
  --kv-cache-dtype 'fp8_e4m3'
)
SERVER_ARGS+=(--host "${SERVE_HOST:-0.0.0.0}" --port "${SERVE_PORT:-30000}")

# The engine spans 8 nodes: run this on each with its rank 0..7 and the address of rank 0.
if [[ -z "${SERVE_MASTER_ADDR:-}" ]]; then
  echo "serving-reference.sh: set SERVE_MASTER_ADDR to host:port of the node with rank 0" >&2
  exit 1
fi
if [[ ! "${SERVE_NODE_RANK:-}" =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((SERVE_NODE_RANK >= 8)); then
  echo "serving-reference.sh: set SERVE_NODE_RANK to 0..7, got '${SERVE_NODE_RANK:-}'" >&2
  exit 1
fi
SERVER_ARGS+=(--nnodes 8 --node-rank "$SERVE_NODE_RANK" --dist-init-addr "$SERVE_MASTER_ADDR")

exec python3 -m sglang.launch_server "${SERVER_ARGS[@]}" "$@"
