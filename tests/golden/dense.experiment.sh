#!/usr/bin/env bash
# hotloop experiment: GLM-4-9B (GLM-Z1-9B-0414), colocate, sync, bf16, correction tis.
# Recipe: scripts/run-glm4-9B.sh of slime 624b824a898ab0ec1fcb4d373004c7f3852bf515; sizes: slime docs, v0.4.0 (lab default).
# Written for slime v0.4.0.
# Every flag below is one that slime 624b824a also has.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: experiment.sh prepare | convert | check | train

  prepare   download the model and the data, and make the copies that serving and converting need
  convert   make the trainer's checkpoint; run it on one node
  check     test that everything the run reads is there
  train     submit the job to the Ray cluster that is already running

Run it in the root of a slime checkout, or set SLIME_DIR to one. It starts no Ray node and stops no process.
RAY_DASHBOARD overrides http://127.0.0.1:8265.
USAGE
}

MODEL_SCRIPT='scripts/models/glm4-9B.sh'
MEGATRON_PATH='/root/Megatron-LM'
SOURCE_DIR='/data/models/GLM-Z1-9B-0414'
BF16_DIR='/data/models/GLM-Z1-9B-0414'
SERVING_DIR='/data/models/GLM-Z1-9B-0414'
TRAIN_DIR='/data/models/GLM-Z1-9B-0414_torch_dist'
RUNTIME_ENV='{
  "env_vars": {
    "PYTHONPATH": "/root/Megatron-LM",
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVSHMEM_DISABLE_NCCL": "1",
    "NCCL_NVLS_ENABLE": "0"
  }
}'

LAYOUT_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
)
CHECKPOINT_ARGS=(
  --hf-checkpoint '/data/models/GLM-Z1-9B-0414'
  --ref-load '/data/models/GLM-Z1-9B-0414_torch_dist'
  --save '/data/checkpoints/GLM-Z1-9B-0414'
  --save-interval 20
)
ROLLOUT_ARGS=(
  --prompt-data '/data/dapo-math-17k/dapo-math-17k.jsonl'
  --input-key 'prompt'
  --label-key 'label'
  --apply-chat-template
  --rollout-shuffle
  --rm-type 'deepscaler'
  --num-rollout 3
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --global-batch-size 64
  --rollout-max-response-len 4096
  --rollout-temperature 1
  --rollout-top-p 1
  --rollout-top-k -1
)
OBJECTIVE_ARGS=(
  --advantage-estimator 'grpo'
  --eps-clip 0.2
  --eps-clip-high 0.28
  --kl-coef 0
  --entropy-coef 0
  --use-tis
  --tis-clip-low 0
  --tis-clip 2
)
PARALLEL_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 2
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  --recompute-granularity 'full'
  --recompute-method 'uniform'
  --recompute-num-layers 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4608
)
OPTIMIZER_ARGS=(
  --optimizer 'adam'
  --lr 1e-6
  --lr-decay-style 'constant'
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)
NUMERICS_ARGS=(
  --attention-dropout 0
  --hidden-dropout 0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend 'flash'
)
SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
  --sglang-server-concurrency 128
)

SCRATCH=()
cleanup() {
  if ((${#SCRATCH[@]})); then rm -f -- "${SCRATCH[@]}"; fi
}
trap cleanup EXIT

fail() {
  printf 'experiment.sh: %s\n' "$1" >&2
  exit 1
}

enter_slime() {
  if [[ ! -f train.py || ! -f $MODEL_SCRIPT ]]; then
    fail "$PWD is not a slime checkout with $MODEL_SCRIPT; run from its root or set SLIME_DIR"
  fi
}

load_model_args() {
  MODEL_ARGS=()
  # shellcheck source=/dev/null
  source "$MODEL_SCRIPT"
  if ((${#MODEL_ARGS[@]} == 0)); then fail "$MODEL_SCRIPT sets no MODEL_ARGS"; fi
}

download() {
  if command -v huggingface-cli >/dev/null 2>&1; then
    huggingface-cli download "$@"
  else
    hf download "$@"
  fi
}

# make_once DIR COMMAND...: run a command that fills DIR, unless an earlier run finished it.
make_once() {
  local dir=$1
  shift
  if [[ -e $dir/.hotloop-complete ]]; then
    printf 'already made: %s\n' "$dir"
    return
  fi
  "$@"
  mkdir -p -- "$dir"
  : >"$dir/.hotloop-complete"
}

prepare() {
  download 'zai-org/GLM-Z1-9B-0414' --local-dir "$SOURCE_DIR"
  download --repo-type dataset 'zhuzilin/dapo-math-17k' --local-dir '/data/dapo-math-17k'
}

CONVERT_ARGS=()
convert() {
  enter_slime
  load_model_args
  PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}" python -m torch.distributed.run --nproc-per-node 8 \
    tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" "${CONVERT_ARGS[@]}" \
    --hf-checkpoint "$BF16_DIR" --save "$TRAIN_DIR"
}

MISSING=0
need() {
  if [[ ! -f $2 ]]; then
    printf 'missing: %s: %s\n' "$1" "$2" >&2
    MISSING=1
  fi
}

check() {
  need "rollout config" "$SERVING_DIR/config.json"
  need "trainer checkpoint" "$TRAIN_DIR/latest_checkpointed_iteration.txt"
  need "prompts" '/data/dapo-math-17k/dapo-math-17k.jsonl'
  if ((MISSING)); then fail "something that the run reads is not there; prepare and convert make it"; fi
  printf 'everything that the run reads is there\n'
}

train() {
  enter_slime
  load_model_args
  local words=(
    python3 train.py
    "${MODEL_ARGS[@]}"
    "${LAYOUT_ARGS[@]}"
    "${CHECKPOINT_ARGS[@]}"
    "${ROLLOUT_ARGS[@]}"
    "${OBJECTIVE_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    "${OPTIMIZER_ARGS[@]}"
    "${NUMERICS_ARGS[@]}"
    "${SGLANG_ARGS[@]}"
  )
  ray job submit --address "${RAY_DASHBOARD:-http://127.0.0.1:8265}" \
    --runtime-env-json "$RUNTIME_ENV" -- "${words[@]}"
}

if (($# != 1)); then
  usage >&2
  exit 2
fi
if [[ -n "${SLIME_DIR:-}" ]]; then cd -- "$SLIME_DIR"; fi
case $1 in
  prepare) prepare ;;
  convert) convert ;;
  check) check ;;
  train) train ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
