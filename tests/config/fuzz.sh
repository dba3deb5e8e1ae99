#!/usr/bin/env bash
# Fuzzes the reader of configurations with libFuzzer, address and undefined-behaviour sanitizer. Needs clang.
#
#   tests/config/fuzz.sh [SECONDS]     600 by default; exit code 0 if nothing was found
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/fuzz
mkdir -p "$build/corpus" "$build/include/ebb"
ln -sfn "$PWD/runtime" "$build/include/ebb/runtime"
flags=(-std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I"$build/include")
libraries=(absl_status absl_statusor absl_strings absl_str_format)
# shellcheck disable=SC2046
clang++ "${flags[@]}" tests/config/fuzz_config.cc runtime/{base,config}/*.cc \
  $(pkg-config --cflags --libs "${libraries[@]}") -o "$build/fuzz_config"
"$build/fuzz_config" -max_total_time="${1:-600}" -max_len=8192 -timeout=5 -print_final_stats=1 \
  -artifact_prefix="$build/" "$build/corpus" tests/config/corpus
