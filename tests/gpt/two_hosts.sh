#!/usr/bin/env bash
# two_hosts.sh GPT TWO_HOSTS: trains the same model on two hosts with two ranks each (TWO_HOSTS is tests/comm/two_hosts.sh)
# and on four threads with the reduction group that several hosts have by default, and compares the parameters bit for bit.
set -euo pipefail
gpt=$1 two_hosts=$2
work_dir=$(mktemp -d)
trap 'rm -rf "$work_dir"' EXIT

# config FILE EBB: everything but EBB alike.
config() {
  cat >"$work_dir/$1" <<END
{
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "ebb": {$2}
}
END
}
config default.json ''
config explicit.json '"reduction_group": 2'
options=(--device cpu --threads 1 --layers 2 --width 64 --heads 2 --context 64 --steps 6 --sample 0 --data "$0")

# Leaves its exit code; 77: skipped.
status=0
"$two_hosts" 2 2 "$gpt" "${options[@]}" --config "$work_dir/default.json" --summary "$work_dir/hosts.json" || status=$?
[ $status -eq 0 ] || exit $status
"$gpt" --ranks 4 "${options[@]}" --config "$work_dir/explicit.json" --summary "$work_dir/threads.json"
"$gpt" --ranks 4 "${options[@]}" --config "$work_dir/default.json" --summary "$work_dir/world.json"

digest() {
  grep -o '"parameter_digest": *"[^"]*"' "$work_dir/$1.json"
}
echo "two hosts:                  $(digest hosts)"
echo "threads, reduction group 2: $(digest threads)"
echo "threads, all in one group:  $(digest world)"
if [ "$(digest hosts)" != "$(digest threads)" ]; then
  echo "the parameters differ" >&2
  exit 1
fi
# Otherwise the comparison would not depend on the order of sums.
if [ "$(digest hosts)" = "$(digest world)" ]; then
  echo "the reduction group makes no difference here" >&2
  exit 1
fi
