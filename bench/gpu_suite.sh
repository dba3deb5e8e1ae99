#!/usr/bin/env bash
# Runs everything that needs a GPU: tests, compute-sanitizer over small cases, then benchmarks. Each part has its own time limit,
# and all parts end within 9 minutes. Needs a driver, bash, coreutils, python3, the built programs and a text, and PyTorch for
# the comparison:
#
#   bench/gpu_suite.sh OUT_DIR [COMMAND THAT STARTS A PROGRAM [MODE]]     e.g. bench/gpu_suite.sh results build/release/bin/
#
# The second argument is put before a program's name; if it ends in a slash, it is a folder. MODE gives the whole time to one kind
# of part: tests, sanitizers, benchmarks, or largest (the model that fills 128 GiB of RAM). Without MODE the first three run one
# after the other, and the last part, the comparison with PyTorch, gets the rest of the time. OUT_DIR gets a log of each part,
# results as JSON (suite.json: the parts), and summary.txt, the table at the end. Exit status: the number of parts that failed or
# did not run. A part has also failed if all its tests were skipped, or if it used the CPU.
#
# bench/gpu_pack.sh packs programs and a text for another machine. EBB_BENCH_TEXT: another text to train on. EBB_SUITE_DEVICE=cpu:
# tiny models on the CPU, to try the script. --programs, --limits MODE: prints the programs, or the parts with their limits.
set -uo pipefail

limit=540  # seconds for all parts of a mode; bench/gpu_suite_test.sh adds them up

# Seconds of a part among all parts, and if its kind has the whole time (-: not run); how it is run; its name (the program, and a
# suffix after a dash if a program has several parts); arguments. The first part also unpacks the programs.
parts() {
  cat <<'PARTS'
tests        25   30  test       cuda_start_test
tests        20   40  test       attention_test                  --gtest_filter=*/cuda_*
tests        10   20  test       layer_norm_test                 --gtest_filter=*/cuda_*
tests        15   30  test       kernels_test                    --gtest_filter=*/cuda_*
tests        15   30  test       matmul_test                     --gtest_filter=*/cuda_*
tests        15   30  test       layers_test                     --gtest_filter=*/cuda_*
tests        25   50  test       training_test                   --gtest_filter=*/cuda_*
tests        15   25  test       device_conformance_test         --gtest_filter=*/cuda*
tests        20   40  test       optim_kernels_test              --gtest_filter=*/cuda*
tests        15   30  test       shared_device_on_cuda_test
tests        50   80  test       engine_on_cuda_test             --gtest_filter=*local*
tests         8   20  gpt        gpt-digest                      --cuda-graphs off --products default
tests         8   20  same       gpt-digest_again                --cuda-graphs off --products default
tests         8   20  same       gpt-digest_graphs               --cuda-graphs on --products default
tests         8   20  same       gpt-digest_states_in_ram        --offload-optimizer cpu --products default
tests        45   50  test       engine_on_cuda_test-nccl        --gtest_filter=*Pairs*/nccl_?:*Pairs*/nccl_1?
sanitizers   22   59  memcheck   optim_kernels_test              --gtest_filter=*/cuda*
sanitizers   22   59  racecheck  layer_norm_test                 --gtest_filter=*/cuda_bf16
sanitizers   22   59  memcheck   attention_test                  --gtest_filter=*/cuda_bf16
sanitizers   22    -  racecheck  attention_test                  --gtest_filter=*ForwardAgrees*/cuda_bf16
sanitizers    -   59  racecheck  attention_test                  --gtest_filter=*/cuda_bf16
sanitizers    -   59  racecheck  optim_kernels_test              --gtest_filter=*/cuda*
sanitizers    -   59  memcheck   kernels_test                    --gtest_filter=*/cuda_*
sanitizers    -   59  memcheck   layers_test                     --gtest_filter=*/cuda_*
sanitizers    -   59  racecheck  layers_test                     --gtest_filter=*/cuda_bf16
sanitizers    -   59  memcheck   engine_on_cuda_test             --gtest_filter=*local_?
benchmarks   20   25  kernels    gpu_kernels_bench
benchmarks   25   30  engine     engine_bench-124M               --benchmark_filter=OnGpu/layers:12/
benchmarks   45   60  engine     engine_bench-1.5B               --benchmark_filter=OnGpu/layers:48/
benchmarks   55  420  compare    gpu_against_torch
largest       -  535  compare    gpu_against_torch-largest       --largest
PARTS
}

mode_of() { # MODE: its parts, their limits before their names
  local kind all alone
  while read -r kind all alone part; do
    [ "$1" = all ] || all=$([ "$1" = "$kind" ] && echo "$alone" || echo -)
    [ "$all" = - ] || echo "$all $part"
  done < <(parts)
}

usage() {
  while IFS= read -r line && [[ $line == \#* ]]; do
    [[ $line == '#!'* ]] || echo "${line#\# }"
  done <"$0" >&2
  exit 2
}

case ${1:-} in
  --programs)
    while read -r _ _ _ how name _; do
      [ "$how" = compare ] || echo "${name%%-*}"
    done < <(parts) | sort -u
    exit
    ;;
  --limits)
    mode_of "${2:-all}" | while read -r seconds how name _; do echo "$seconds $how $name"; done
    exit
    ;;
  '' | -*) usage ;;
esac
out=$1
start=${2:-build/release/bin/}
mode=${3:-all}
device=${EBB_SUITE_DEVICE:-cuda}
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "$(mode_of "$mode")" ]; then
  echo "bench/gpu_suite.sh: the third argument is tests, sanitizers, benchmarks or largest, not $mode" >&2
  exit 2
fi
if ! command -v python3 >/dev/null; then
  echo "bench/gpu_suite.sh: python3 is not on PATH; install it, because it reads the results" >&2
  exit 2
fi

# The words of the command that starts a program.
program() { # NAME
  case $start in
    */) words=("$start$1") ;;
    *) read -ra words <<<"$start $1" ;;
  esac
}

# The text to train on: packed beside the starting script, or this checkout's.
program ''
text=${EBB_BENCH_TEXT:-}
for candidate in "$(dirname "${words[0]}")/text.txt" "$here/../ARCHITECTURE.md"; do
  [ -n "$text" ] || [ ! -s "$candidate" ] || text=$candidate
done
if [ ! -s "$text" ]; then
  echo "bench/gpu_suite.sh: there is no text to train on${text:+, $text}: pack the programs and a text with bench/gpu_pack.sh," \
    "or set EBB_BENCH_TEXT to a file of 100 kB" >&2
  exit 2
fi
export EBB_BENCH_TEXT=$text
program gpt
if ! command -v "${words[0]}" >/dev/null; then
  echo "bench/gpu_suite.sh: ${words[0]} cannot be started; the second argument is a command, or a folder that ends in a slash" >&2
  exit 2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}  # docs/ranks.md

shape=(--layers 4 --heads 12 --width 768 --context 1024 --vocabulary 50304 --batch 4)
[ "$device" = cpu ] && shape=(--layers 2 --heads 2 --width 64 --context 64 --vocabulary 512 --batch 2)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
mkdir -p "$out"
rm -f "$out/suite.json"
failed=0
began=$SECONDS
child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null; exit 130' INT TERM

# Runs WORDS, and sets their exit status.
limited() { # SECONDS LOG WORDS...
  local seconds=$1 log=$2
  shift 2
  timeout --kill-after=5 "$seconds" "$@" >"$log" 2>&1 </dev/null &
  child=$!
  # A process that hangs in the driver cannot be killed. The other parts still run.
  timeout $((seconds + 10)) tail -s 0.1 --pid="$child" -f /dev/null &
  wait $! 2>/dev/null
  if kill -0 "$child" 2>/dev/null; then
    status=stuck
  else
    wait "$child" 2>/dev/null
    status=$?
  fi
  child=
}

part() { # SECONDS HOW NAME ARGUMENTS...
  local seconds=$1 how=$2 name=$3 left=$((limit - (SECONDS - began))) before=$SECONDS like=()
  shift 3
  # The last part gets the time that is left.
  if [ "$how" = compare ] || [ "$seconds" -gt "$left" ]; then seconds=$left; fi
  program "${name%%-*}"
  case $how in
    test)
      # For threads that share a device over NCCL, because the late load of a kernel waits for other threads' collectives.
      [[ $name != *nccl ]] || words=(env CUDA_MODULE_LOADING=EAGER "${words[@]}")
      words+=(--gtest_brief=1 "$@")
      ;;
    memcheck | racecheck)
      name=$how-$name
      words=("$sanitizer" --target-processes all --tool "$how" --error-exitcode 99 "${words[@]}" --gtest_brief=1 "$@")
      ;;
    gpt | same)
      words+=(--device "$device" --ranks 1 "${shape[@]}" --steps 8 --sample 0 --data "$text" --summary "$out/$name.json" "$@")
      [ "$how" = gpt ] || like=(--like gpt-digest)
      ;;
    kernels) words+=("$out/$name.json") ;;
    engine) words+=("--benchmark_out=$out/$name.json" --benchmark_out_format=json "$@") ;;
    compare)
      program gpt
      words=(python3 "$here/gpu_against_torch.py" --gpt "${words[*]}" --device "$device" --data "$text" --output "$out"
        --kernels "$out/gpu_kernels_bench.json" --time $((seconds - 10)) "$@")  # ends by itself, with a table
      ;;
  esac
  if [ "$left" -lt 5 ]; then
    status=late
  elif [ "${words[0]}" = "$sanitizer" ] && [ ! -x "$sanitizer" ]; then
    status=absent
  else
    limited "$seconds" "$out/$name.log" "${words[@]}"
  fi
  python3 "$here/gpu_part.py" "$out" "$name" "$status" $((SECONDS - before)) "${like[@]}" || failed=$((failed + 1))
}

timeout --kill-after=5 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader \
  >"$out/summary.txt" 2>/dev/null ||
  echo "nvidia-smi finds no GPU: parts that need one fail or are skipped" >"$out/summary.txt"
cat "$out/summary.txt"
while read -ru 3 -a row; do
  part "${row[@]}"
done 3< <(mode_of "$mode")

printf '\n== %s failed; logs in %s\n' "$failed" "$out"
cat "$out/summary.txt"
for table in gpu_kernels_bench.log engine_bench-124M.log engine_bench-1.5B.log gpu_against_torch.md; do
  [ -s "$out/$table" ] && printf '\n== %s\n' "$table" && cat "$out/$table"
done
exit "$failed"
