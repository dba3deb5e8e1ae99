#!/usr/bin/env bash
# Kills a run of gpt at random instants, while it saves beside its steps, and resumes it each time: for each tier, with threads
# and with processes as ranks. Each time the newest whole checkpoint loads, and the last run ends with the bits of a run that
# was never killed.
#
#   tests/checkpoint/kill_randomly.sh GPT [KILLS] [SEED]     KILLS of each of the seven cases, 5 unless given
set -euo pipefail
gpt=$1 kills=${2:-5} seed=${3:-1}
RANDOM=$seed
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
head -c 4000 "$0" >"$folder/text"
echo '{"ebb": {"timeout_seconds": 60}}' >"$folder/config.json"

arguments() { # TIER SUMMARY MORE...
  local tier=$1 summary=$2
  shift 2
  printf '%s\n' --config "$folder/config.json" --data "$folder/text" --layers 2 --heads 2 --width 32 --context 16 --batch 2 --sample 0 \
    --threads 1 --stage 3 --offload-param "$tier" --offload-optimizer "$tier" --nvme-path "$folder" --steps 200 \
    --summary "$folder/$summary" "$@"
}
# start RANKS HOW TIER SUMMARY MORE...: in the background; its processes are `started`.
start() {
  local ranks=$1 how=$2 all
  shift 2
  mapfile -t all < <(arguments "$@")
  started=()
  if [ "$how" = threads ]; then
    "$gpt" "${all[@]}" --ranks "$ranks" >"$folder/log" 2>&1 &
    started+=($!)
    return
  fi
  : >"$folder/log"
  local port=$((20000 + RANDOM % 10000))
  for ((rank = 0; rank < ranks; ++rank)); do
    RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$gpt" "${all[@]}" >>"$folder/log" 2>&1 &
    started+=($!)
  done
}
finish() { # waits for the end, which must be a success
  for process in "${started[@]}"; do wait "$process" || { cat "$folder/log"; exit 1; }; done
}
digest() { sed -n 's/.*"parameter_digest": *"\([0-9a-f]*\)".*/\1/p' "$folder/$1"; }

for case in "1 threads none" "2 threads none" "2 threads cpu" "2 threads nvme" "2 processes none" "2 processes cpu" "2 processes nvme"; do
  read -r ranks how tier <<<"$case"
  start "$ranks" "$how" "$tier" unbroken.json
  finish
  saves="$folder/saves-$ranks-$how-$tier"
  killed=0
  for ((kill = 0; kill < kills; ++kill)); do
    # Killed runs make progress, so start anew before the end of the run.
    [ -e "$saves/latest" ] && [ "$(sed 's/step-0*//' "$saves/latest")" -gt 150 ] && rm -rf "$saves"
    start "$ranks" "$how" "$tier" killed.json --save "$saves" --save-every 1 --keep 2 --resume latest
    sleep "0.$(printf '%03d' $((RANDOM % 700 + 50)))"
    victim=$((RANDOM % ${#started[@]}))
    kill -KILL "${started[victim]}" 2>/dev/null || true
    for process in "${!started[@]}"; do
      code=0
      wait "${started[process]}" 2>/dev/null || code=$?
      case $code in
        0) ;;
        137) killed=$((killed + 1)) ;;
        # Ranks that live on name the one that died.
        *) [ "$process" != "$victim" ] && grep -q "rank $victim" "$folder/log" || { echo "$case: kill $kill: exit $code"; cat "$folder/log"; exit 1; } ;;
      esac
    done
  done
  start "$ranks" "$how" "$tier" resumed.json --save "$saves" --save-every 50 --keep 2 --resume latest
  finish
  [ "$(digest resumed.json)" = "$(digest unbroken.json)" ] || { echo "$case: other bits after $killed kills"; exit 1; }
  echo "$ranks ranks as $how, tier $tier: $killed kills, the same bits"
done
