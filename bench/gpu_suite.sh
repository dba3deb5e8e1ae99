#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: tests, compute-sanitizer over small cases, then benchmarks; each part
# with a time limit of its own, most valuable first, all within 9 minutes. Needs the programs and a python3 with torch, no build:
#
#   bench/gpu_suite.sh OUT_DIR [COMMAND THAT STARTS A PROGRAM [tests|benchmarks]]     e.g. bench/gpu_suite.sh results build/release/bin/
#
# The second argument is put before a program's name; one that ends in a slash is a folder. The third one gives the whole time to
# tests with compute-sanitizer, or to benchmarks; without it the benchmarks of the long steps may find no time. OUT_DIR gets a log
# of each part, results as JSON, and summary.txt, which is the table at the end. Exit status: the number of parts that failed or
# did not run; a part whose tests were all skipped has failed, as this is where they run, and so has one that used the CPU.
# bench/gpu_pack.sh carries its programs there.
set -uo pipefail

programs=(attention_test cuda_start_test device_conformance_test engine_bench engine_on_cuda_test gpt gpu_kernels_bench
  kernels_test layer_norm_test layers_test matmul_test optim_kernels_test shared_device_on_cuda_test training_test)
if [ "${1:-}" = --programs ]; then
  printf '%s\n' "${programs[@]}"
  exit
fi
if [ $# -lt 1 ] || [ "${1:0:1}" = - ]; then
  sed -n '2,11p' "$0" >&2
  exit 2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}  # docs/ranks.md
out=$1
start=${2:-build/release/bin/}
only=${3:-all}
case $only in
  all | tests | benchmarks) ;;
  *)
    echo "bench/gpu_suite.sh: the third argument is tests or benchmarks, not $only" >&2
    exit 2
    ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
summary=$out/summary.txt
: >"$summary"
failed=0
began=$SECONDS
limit=540

say() { printf '%-44s %-22s %s\n' "$@" | tee -a "$summary"; }

# part NAME SECONDS COMMAND...
part() {
  local name=$1 seconds=$2 left=$((limit - (SECONDS - began))) status=0 before=$SECONDS
  shift 2
  if [ "$left" -lt 5 ]; then
    say "$name" "NOT RUN" "no time is left"
    failed=$((failed + 1))
    return
  fi
  [ "$seconds" -gt "$left" ] && seconds=$left
  timeout --kill-after=5 "$seconds" "$@" >"$out/$name.log" 2>&1 || status=$?
  local took="$((SECONDS - before)) s"
  local tests
  tests=$(grep -aE '^\[  (PASSED|SKIPPED|FAILED)  *\] [0-9]+ test' "$out/$name.log" | tr -d '[]' | tr -s ' ' | tr '\n' ',')
  # Tests that were all skipped, or that no filter let through, have shown nothing.
  if [ "$status" = 0 ] && grep -aq '^\[=*\] [0-9]* tests* from' "$out/$name.log" &&
    ! grep -aqE '^\[  PASSED  \] [1-9]' "$out/$name.log"; then
    status=78
  fi
  # Google Benchmark's status is 0 whatever it says; gpt trains on the CPU where it finds no GPU, and says so.
  [ "$status" = 0 ] && grep -aq 'ERROR OCCURRED' "$out/$name.log" && status=79
  [ "$status" = 0 ] && grep -aq 'training uses the CPU' "$out/$name.log" && status=80
  case $status in
    0) say "$name" "ok, $took" "$tests" ;;
    77) say "$name" "SKIPPED" "$(tail -1 "$out/$name.log")" ;;
    78) say "$name" "NOTHING RAN" "$tests" ;;
    79) say "$name" "FAILED, $took" "$(grep -am1 'ERROR OCCURRED' "$out/$name.log")" ;;
    80) say "$name" "USED THE CPU" "$(grep -am1 'training uses the CPU' "$out/$name.log")" ;;
    124 | 137) say "$name" "TIME OUT after $took" "$tests" ;;
    *) say "$name" "FAILED ($status), $took" "$tests" ;;
  esac
  [ "$status" = 0 ] || failed=$((failed + 1))
}

program() { # NAME: the words that start it
  case " ${programs[*]} " in
    *" $1 "*) ;;
    *) echo "bench/gpu_suite.sh: $1 is not among its programs" >&2 ;;
  esac
  case $start in
    */) printf '%s%s' "$start" "$1" ;;
    *) printf '%s %s' "$start" "$1" ;;
  esac
}

# test_part PROGRAM SECONDS ARGUMENTS...
test_part() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2046  # several words on purpose
  part "$name" "$seconds" $(program "$name") --gtest_brief=1 "$@"
}

# sanitizer_part TOOL PROGRAM SECONDS ARGUMENTS...
sanitizer_part() {
  local tool=$1 name=$2 seconds=$3 sanitizer
  shift 3
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ ! -x "$sanitizer" ]; then
    say "$tool of $name" "skipped" "no compute-sanitizer on this machine"
    return
  fi
  # shellcheck disable=SC2046
  part "$tool-$name" "$seconds" "$sanitizer" --target-processes all --tool "$tool" --error-exitcode 99 \
    $(program "$name") --gtest_brief=1 "$@"
}

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
  echo "bench/gpu_suite.sh: no GPU here that nvidia-smi sees" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>&1 | tee "$out/device.txt" | tee -a "$summary"

# gpt_part NAME SECONDS ARGUMENTS...: a short training, whose summary is in OUT_DIR/NAME.json
gpt_part() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2046
  part "$name" "$seconds" $(program gpt) --device cuda --ranks 1 --layers 4 --heads 12 --width 768 --context 1024 \
    --vocabulary 50304 --batch 4 --steps 8 --sample 0 --data "$here/../ARCHITECTURE.md" --summary "$out/$name.json" "$@"
}

digest() { sed -n 's/.*"parameter_digest": "\([0-9a-f][0-9a-f]*\)".*/\1/p' "$out/$1.json" 2>/dev/null; }

# The same parameters, bit for bit, when a training runs again, as CUDA graphs, and wherever its states live.
same_digest() {
  local first other
  gpt_part gpt_digest 40 --cuda-graphs off
  gpt_part gpt_digest_again 40 --cuda-graphs off
  gpt_part gpt_digest_graphs 40 --cuda-graphs on
  gpt_part gpt_digest_states_in_ram 40 --offload-optimizer cpu
  first=$(digest gpt_digest)
  for other in gpt_digest_again gpt_digest_graphs gpt_digest_states_in_ram; do
    if [ -n "$first" ] && [ "$first" = "$(digest "$other")" ]; then
      say "$other: same digest" "ok" "${first:0:16}"
    else
      say "$other: same digest" "FAILED" "${first:0:16} and $(digest "$other" | cut -c1-16)"
      failed=$((failed + 1))
    fi
  done
}

tests() {
  test_part cuda_start_test 20
  local ops
  for ops in attention_test layer_norm_test kernels_test matmul_test layers_test; do
    test_part "$ops" 30 --gtest_filter='*/cuda_*'
  done
  test_part training_test 60 --gtest_filter='*/cuda_*'
  test_part device_conformance_test 40 --gtest_filter='*/cuda*'
  test_part optim_kernels_test 40
  test_part shared_device_on_cuda_test 40
  test_part engine_on_cuda_test 100 --gtest_filter='*local*'
  same_digest
  # Before version 2.30 NCCL takes one rank a device, which this says.
  # shellcheck disable=SC2046
  part engine_on_cuda_test-nccl 60 $(program engine_on_cuda_test) --gtest_brief=1 --gtest_filter='*nccl*'
}

sanitizers() {
  sanitizer_part memcheck attention_test 40 --gtest_filter='*/cuda_*'
  sanitizer_part racecheck attention_test 40 --gtest_filter='*/cuda_bf16'
  sanitizer_part memcheck kernels_test 40 --gtest_filter='*/cuda_*'
  sanitizer_part racecheck layer_norm_test 40 --gtest_filter='*/cuda_bf16'
  sanitizer_part memcheck optim_kernels_test 60 --gtest_filter='*uda*'
  sanitizer_part racecheck optim_kernels_test 60 --gtest_filter='*uda*'
  sanitizer_part memcheck layers_test 40 --gtest_filter='*/cuda_*'
  sanitizer_part memcheck engine_on_cuda_test 60 --gtest_filter='*local_0:*local_1:*local_2'
  sanitizer_part racecheck layers_test 40 --gtest_filter='*/cuda_bf16'
}

# SECONDS: for the comparison with PyTorch
benchmarks() {
  local seconds=$1 left
  # shellcheck disable=SC2046
  part engine_bench 90 $(program engine_bench) --benchmark_filter=Gpu --benchmark_out="$out/engine_bench.json" \
    --benchmark_out_format=json
  # shellcheck disable=SC2046
  part gpu_kernels_bench 40 $(program gpu_kernels_bench) "$out/gpu_kernels.json"
  left=$((limit - (SECONDS - began)))
  [ "$seconds" -gt "$left" ] && seconds=$left
  # It ends by itself before its limit, with a table of what it has.
  part gpu_against_torch "$seconds" python3 "$here/gpu_against_torch.py" --gpt "$(program gpt)" --output "$out" \
    --time $((seconds - 10))
}

case $only in
  all)
    tests
    benchmarks 330
    sanitizers
    ;;
  tests)
    tests
    sanitizers
    ;;
  benchmarks) benchmarks "$limit" ;;
esac

echo
echo "== $failed failed; logs in $out"
cat "$summary"
for table in engine_bench.log gpu_kernels_bench.log gpu_against_torch.md; do
  [ -s "$out/$table" ] && printf '\n== %s\n' "$table" && cat "$out/$table"
done
exit "$failed"
