#!/usr/bin/env bash
# Tests bench/gpu_suite.sh with scripts as programs: they pass, fail, skip, crash or use the CPU. Also checks that the limits of
# each mode add up to less than 9 minutes.
#
#   bench/gpu_suite_test.sh [FOLDER OF BUILT PROGRAMS]     77: there is no python3
set -euo pipefail
unset EBB_BENCH_TEXT EBB_SUITE_DEVICE
command -v python3 >/dev/null || exit 77
here=$(cd "$(dirname "$0")" && pwd)
suite=$here/gpu_suite.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
  echo "gpu_suite_test: $*" >&2
  exit 1
}

for mode in tests sanitizers benchmarks largest all; do
  sum=0
  while read -r seconds _; do
    sum=$((sum + seconds))
  done < <("$suite" --limits "$mode")
  [ "$sum" -gt 0 ] && [ "$sum" -lt 540 ] || fail "the limits of $mode add up to $sum s"
done
# The kinds run one after the other, and both tools of the sanitizers run.
kinds=$("$suite" --limits all | while read -r _ how _; do echo "$how"; done | uniq | sed 's/same/gpt/' | uniq | tr '\n' ' ')
[ "$kinds" = "test gpt test memcheck racecheck memcheck racecheck kernels engine compare " ] || fail "the order is $kinds"

if [ $# -gt 0 ]; then
  for name in $("$suite" --programs); do
    [ -x "$1/$name" ] || fail "there is no program $1/$name"
  done
fi

mkdir "$folder/packed"
cat >"$folder/packed/run" <<'RUN'
#!/usr/bin/env bash
passed() { printf '[==========] %s tests from 1 test suite ran.\n[  PASSED  ] %s tests.\n' "$1" "$1"; }
name=$1
summary=
while [ $# -gt 0 ]; do
  case $1 in
    --summary) summary=$2 ;;
    on) digest=2 ;;
    --gtest_filter=*nccl*) name=nccl ;;
  esac
  shift
done
case $name in
  attention_test) passed 3; echo '[  FAILED  ] 1 test, listed below:'; exit 1 ;;
  layer_norm_test) passed 0; echo '[  SKIPPED ] 2 tests, listed below:' ;;
  kernels_test) kill -SEGV $$ ;;
  matmul_test) echo 'no device'; exit 77 ;;
  nccl) passed 0 ;;
  gpt) printf '{"parameter_digest": "%s"}' "${digest:-1}" >"$summary" ;;
  training_test) passed 1; echo 'training uses the CPU: no device' ;;
  *) passed 4 ;;
esac
RUN
chmod +x "$folder/packed/run"

"$suite" "$folder/results" "$folder/nothing/" tests >"$folder/said" 2>&1 && fail "it succeeds without programs"
grep -q 'cannot be started' "$folder/said" || fail "it does not say that nothing can be started: $(cat "$folder/said")"
EBB_BENCH_TEXT=$folder/absent "$suite" "$folder/results" "$folder/packed/run" tests >"$folder/said" 2>&1 &&
  fail "it succeeds without a text"
grep -q 'no text to train on' "$folder/said" || fail "it does not say that there is no text"

echo 'a text' >"$folder/packed/text.txt"
status=0
"$suite" "$folder/results" "$folder/packed/run" tests >"$folder/said" 2>&1 || status=$?
[ "$status" = 7 ] || fail "its exit status is $status: $(cat "$folder/said")"
expect() { # PART VERDICT
  grep -qE "^$1 +$2 +[0-9]+ s" "$folder/results/summary.txt" || fail "$1 is not $2: $(cat "$folder/results/summary.txt")"
}
expect cuda_start_test ok
expect attention_test 'FAILED \(1\)'
expect layer_norm_test 'NOTHING RAN'
expect kernels_test 'FAILED \(SIGSEGV\)'
expect matmul_test SKIPPED
expect training_test 'USED THE CPU'
expect engine_on_cuda_test ok
expect engine_on_cuda_test-nccl 'NOTHING RAN'
expect gpt-digest_again ok
expect gpt-digest_graphs FAILED
python3 -c 'import json, sys; assert len(json.load(open(sys.argv[1]))) == 16' "$folder/results/suite.json"

# All tools of compute-sanitizer are one program.
mkdir "$folder/bin"
printf '#!/bin/sh\nwhile [ "$1" != 99 ]; do shift; done\nshift\nexec "$@"\n' >"$folder/bin/compute-sanitizer"
chmod +x "$folder/bin/compute-sanitizer"
status=0
PATH=$folder/bin:$PATH "$suite" "$folder/results" "$folder/packed/run" sanitizers >"$folder/said" 2>&1 || status=$?
[ "$status" = 4 ] || fail "with a sanitizer its exit status is $status: $(cat "$folder/said")"
expect memcheck-optim_kernels_test ok
expect racecheck-attention_test 'FAILED \(1\)'
expect racecheck-layers_test ok
