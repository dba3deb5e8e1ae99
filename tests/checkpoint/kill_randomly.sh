#!/usr/bin/env bash
# Kills a run of gpt at random instants over its saves and resumes it each time, for each tier: the newest whole checkpoint
# loads, and the last run ends with the bits of one that was never killed.
#
#   tests/checkpoint/kill_randomly.sh GPT [KILLS] [SEED]     KILLS of each tier, 5 unless given
set -euo pipefail
gpt=$1 kills=${2:-5} seed=${3:-1}
RANDOM=$seed
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
head -c 4000 "$0" >"$folder/text"

run() { # RANKS TIER SUMMARY MORE...
  local ranks=$1 tier=$2 summary=$3
  shift 3
  ${as:-} "$gpt" --data "$folder/text" --layers 2 --heads 2 --width 32 --context 16 --batch 2 --sample 0 --threads 1 --ranks "$ranks" \
    --stage 3 --offload-param "$tier" --offload-optimizer "$tier" --nvme-path "$folder" --steps 300 --summary "$folder/$summary" "$@"
}
digest() { sed -n 's/.*"parameter_digest": *"\([0-9a-f]*\)".*/\1/p' "$folder/$1"; }

for case in "1 none" "2 none" "2 cpu" "2 nvme"; do
  read -r ranks tier <<<"$case"
  run "$ranks" "$tier" unbroken.json >/dev/null 2>&1
  saves="$folder/saves-$ranks-$tier"
  done_=0
  for ((kill = 0; kill < kills; ++kill)); do
    # A killed run has got on; begin afresh before it is at its end.
    [ -e "$saves/latest" ] && [ "$(sed 's/step-0*//' "$saves/latest")" -gt 250 ] && rm -rf "$saves"
    as=exec run "$ranks" "$tier" killed.json --save "$saves" --save-every 1 --keep 2 --resume latest >"$folder/log" 2>&1 &
    sleep "0.$(printf '%03d' $((RANDOM % 700 + 50)))"
    kill -KILL $! 2>/dev/null || true
    code=0
    wait $! || code=$?
    case $code in
      0 | 137) done_=$((done_ + 1)) ;;
      *) echo "$case: kill $kill: exit $code" && cat "$folder/log" && exit 1 ;;
    esac
  done
  run "$ranks" "$tier" resumed.json --save "$saves" --save-every 50 --keep 2 --resume latest >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  [ "$(digest resumed.json)" = "$(digest unbroken.json)" ] || { echo "$case: other bits after $kills kills"; exit 1; }
  echo "$ranks ranks, tier $tier: $done_ kills, the same bits"
done
