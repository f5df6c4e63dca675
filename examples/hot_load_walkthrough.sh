#!/usr/bin/env bash
# A trainer publishes, a deployment follows: from an empty folder to a hot-loaded delta, with curl alone.
#
#   bash examples/hot_load_walkthrough.sh        (hotloop and curl on the PATH; about half a minute)
#
# 1 make a small policy      2 publish it as an anchor, name it for start-up      3 serve
# 4 ask for an answer        5 "train": change 1 % of the weights, publish a delta 6 load it, ask again
set -euo pipefail

work=$(mktemp -d)
server=""
cleanup() {
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

python=${PYTHON:-python3}
bucket="file://$work/bucket"
field() { "$python" -c 'import json,sys; value = json.load(sys.stdin)
for key in sys.argv[1].split("."): value = value[int(key)] if key.isdigit() else value[key]
print(value)' "$1"; }

echo "== 1. a small policy"
hotloop policy make --out "$work/step1" --seed 0

echo "== 2. an anchor in a bucket, named for start-up"
hotloop publish full --dir "$work/step1" --bucket "$bucket" --identity step000001 --policy-version 1
hotloop publish startup --bucket "$bucket" --identity step000001

echo "== 3. a deployment with one replica"
cat > "$work/config.yaml" <<YAML
bucket: $bucket
served_model_name: policy
state_dir: $work/state
cache_dir: $work/cache
YAML
hotloop serve "$work/config.yaml" --port 0 > "$work/address.json" &
server=$!
until [ -s "$work/address.json" ]; do
  kill -0 "$server" || { echo "the deployment ended before it listened"; exit 1; }
  sleep 0.1
done
url=$(field url < "$work/address.json")
hot_load="$url/hot_load/v1/models/hot_load"
echo "serving at $url"

wait_for() { # wait_for IDENTITY: until every replica is done with it
  for _ in $(seq 600); do
    status=$(curl -sf "$hot_load")
    if [ "$(field ready <<< "$status")" = True ] && [ "$(field target_snapshot_identity <<< "$status")" = "$1" ]; then
      echo "$1 is served"
      return
    fi
    if [ "$(field replicas.0.loading_state.stage <<< "$status")" = error ]; then
      echo "$status"
      exit 1
    fi
    sleep 0.1
  done
  echo "$1 was not served within a minute: $status"
  exit 1
}
ask() { # ask: one answer, and the version of the policy that made it
  curl -sf "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "policy", "max_tokens": 6, "temperature": 0,
    "messages": [{"role": "user", "content": "s52813="}],
    "nvext": {"extra_fields": ["engine_data"]}}' > "$work/answer.json"
  echo "answer $(field choices.0.message.content < "$work/answer.json"), policy_version" \
    "$(field nvext.engine_data.policy_version < "$work/answer.json")"
}

echo "== 4. the first version answers"
wait_for step000001
ask

echo "== 5. a training step, published as a delta"
"$python" - "$work/step1" "$work/step2" <<'PY'
import pathlib
import shutil
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

old, new = map(pathlib.Path, sys.argv[1:])
shutil.copytree(old, new)
rng = np.random.default_rng(0)
tensors = load_file(old / "model.safetensors")
for name, values in tensors.items():
    changed = rng.random(values.shape) < 0.01
    tensors[name] = np.where(changed, values * np.float32(1.01), values)
save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
PY
hotloop publish delta --dir "$work/step2" --base-dir "$work/step1" --bucket "$bucket" \
  --parent step000001 --identity step000002 --policy-version 2

echo "== 6. hot-load it"
curl -sf "$hot_load" -H 'content-type: application/json' -d '{"identity": "step000002"}' > "$work/reply.json"
echo "accepted: $(field accepted < "$work/reply.json")"
wait_for step000002
ask
echo "== done"
