#!/usr/bin/env bash
# Fuzzes the readers of checkpoints and safetensors files (fuzz_readers.cc) with libFuzzer, address and
# undefined-behaviour sanitizer. Needs clang.
#
#   tests/checkpoint/fuzz.sh [SECONDS]     600 by default; exit code 0 if nothing was found
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/fuzz
mkdir -p "$build/checkpoint_corpus" "$build/include/ebb"
for folder in runtime optim offload sharding; do ln -sfn "$PWD/$folder" "$build/include/ebb/$folder"; done
flags=(-std=c++20 -g -O1 -fsanitize=address -fsanitize=undefined -fno-sanitize-recover=all -I"$build/include" -I.)
readers=(runtime/checkpoint/{file_access,json_text,manifest,model_files,rank_file,safetensors}.cc
  runtime/base/message.cc runtime/engine/training_state.cc runtime/device/{thread_team,wait_point}.cc runtime/trace/standard_streams.cc
  optim/checksum.cc)
# The targets read headers and no values, so what values are read with is not linked.
flags+=(-no-pie -Wl,--unresolved-symbols=ignore-all)
libraries=(absl_status absl_statusor absl_strings absl_str_format libhwy)
read -ra packages <<< "$(pkg-config --cflags --libs "${libraries[@]}")"
objects=()
for source in "${readers[@]}"; do
  object="$build/$(tr / _ <<< "${source%.cc}").o"
  clang++ "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source" -o "$object"
  objects+=("$object")
done
clang++ "${flags[@]}" tests/checkpoint/fuzz_seeds.cc "${objects[@]}" "${packages[@]}" -o "$build/fuzz_seeds"
"$build/fuzz_seeds" "$build/checkpoint_corpus"
clang++ "${flags[@]}" -fsanitize=fuzzer tests/checkpoint/fuzz_readers.cc "${objects[@]}" "${packages[@]}" -o "$build/fuzz_readers"
"$build/fuzz_readers" -max_total_time="${1:-600}" -max_len=4096 -timeout=5 -print_final_stats=1 \
  -artifact_prefix="$build/" "$build/checkpoint_corpus"
