#!/usr/bin/env bash
# folder_of_each_host.sh GPT: two ranks in mount namespaces of their own, as on two hosts whose folders have the same names.
# --save into such a folder ends both before training, with exit code 2 and an error that names the rank that sees another
# folder; into a folder that both see it trains. Exit code 77 and the reason where it may not make namespaces.
set -euo pipefail
gpt=$1
work_dir=$(mktemp -d)
trap 'rm -rf "$work_dir"' EXIT
mkdir "$work_dir/each" "$work_dir/common"

# in_own_mounts COMMAND...: "$work_dir/each" is a folder of this command alone.
in_own_mounts() {
  unshare --mount --propagation private sh -c 'mount -t tmpfs tmpfs "$0" && exec "$@"' "$work_dir/each" "$@"
}
if ! error=$(in_own_mounts true 2>&1); then
  echo "Skipped: mount namespaces: $error"
  exit 77
fi

# start RANK FOLDER PORT: in the background.
start() {
  RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$3 in_own_mounts \
    "$gpt" --device cpu --threads 1 --layers 1 --width 32 --heads 2 --context 16 --steps 4 --sample 0 --data "$0" \
    --save "$2" >"$work_dir/rank$1" 2>&1 &
}
# train FOLDER EXIT_CODE: both ranks end with it.
train() {
  local port=$((20000 + RANDOM % 10000)) rank status
  start 0 "$1" $port
  local first=$!
  start 1 "$1" $port
  local second=$!
  for rank in 0 1; do
    status=0
    wait $((rank == 0 ? first : second)) || status=$?
    if [ $status -ne "$2" ]; then
      echo "rank $rank has ended with $status instead of $2:" >&2
      cat "$work_dir/rank$rank" >&2
      exit 1
    fi
  done
}

train "$work_dir/common" 0
[ -e "$work_dir/common/latest" ]
grep -q "loss" "$work_dir/rank0"  # as below, a rank that trains says
train "$work_dir/each/run" 2
for rank in 0 1; do
  grep -q "^gpt: --save .*: ranks have different folders: .*(rank 0) is another one than that of rank 1 on host '.*Name a folder that all hosts share" "$work_dir/rank$rank" ||
    { cat "$work_dir/rank$rank" >&2; exit 1; }
  ! grep -q "^step\|loss" "$work_dir/rank$rank" || { echo "rank $rank has trained" >&2; exit 1; }
done
