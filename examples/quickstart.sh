#!/usr/bin/env bash
# Trains a model on a fresh Debian or Ubuntu machine: installs missing packages, builds, and trains a byte-level GPT of 10.8 M parameters on
# two ranks with ZeRO-3, in bf16 with fp32 masters, on the licence texts that every Debian has.
#
#   examples/quickstart.sh [option of gpt...]       for example: --data my.txt --steps 500 --ranks 4
#
# Results are written to build/quickstart: losses.csv, losses.svg, timeline.json (open it at ui.perfetto.dev), summary.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source cmake/packages.sh

install_packages
mkdir -p build
# Kernels of one architecture, and PTX for later ones, run on every GPU that Ebb supports. Each other one takes half a minute.
options=(-DEBB_TESTS=ON)
[ -e build/release/CMakeCache.txt ] || options+=(-DCMAKE_CUDA_ARCHITECTURES=80)
cmake --preset release "${options[@]}" >build/quickstart.log 2>&1 || { cat build/quickstart.log >&2; exit 1; }
cmake --build --preset release --target gpt

results=build/quickstart
mkdir -p "$results"
rm -f "$results/summary.json"
build/release/bin/gpt --losses "$results/losses.csv" --curve "$results/losses.svg" \
  --trace "$results/timeline.json" --summary "$results/summary.json" "$@"
[ -e "$results/summary.json" ] || exit 0  # nothing was trained: --help, --show-plan
echo
echo "Loss curve: $results/losses.svg and $results/losses.csv"
echo "Timeline:   $results/timeline.json (open it at https://ui.perfetto.dev)"
echo "Summary:    $results/summary.json"
