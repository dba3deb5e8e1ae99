#!/usr/bin/env bash
# Trains a model from the disk, on any laptop. Its state is more than 20 times as large as the device memory that Ebb may use, and more than 5
# times as large as the RAM. Installs missing packages, builds, and trains a GPT of 114 M parameters (1.3 GiB of parameters, masters and
# optimizer states) with pools of 64 MiB on the device and 256 MiB in RAM. Then shows the memory of each tier, the traffic of a step, and both ratios.
#
#   examples/offload.sh [--disk FOLDER] [option of gpt...]       for example: --disk /mnt/nvme --steps 50 --data my.txt
#
# The swap files take 1.4 GB and are removed at the end. Without --disk they are under build/offload. FOLDER should be on a disk: in memory (tmpfs)
# the run works, but shows nothing. Results are written to build/offload: losses.csv, timeline.json, summary.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source cmake/packages.sh

results=build/offload
disk=$results/swap
if [ "${1:-}" = --disk ]; then
  disk=${2:?--disk takes a folder}
  shift 2
fi

install_packages
mkdir -p "$results" "$disk"
rm -f "$results/summary.json"
cmake --preset release -DEBB_TESTS=ON >build/offload.log 2>&1 || { cat build/offload.log >&2; exit 1; }
cmake --build --preset release --target gpt

build/release/bin/gpt --ranks 1 --layers 36 --width 512 --heads 8 --context 128 --batch 1 --accumulate 2 --recompute \
  --micro-batches-per-round all --offload-param nvme --offload-optimizer nvme --split-master --nvme-path "$disk" \
  --device-memory 64MiB --host-memory 256MiB --steps 8 --sample 0 \
  --losses "$results/losses.csv" --trace "$results/timeline.json" --summary "$results/summary.json" "$@"

rmdir "$results/swap" 2>/dev/null || true
[ -e "$results/summary.json" ] || exit 0  # nothing was trained: --help, --show-plan

# The states and the caps, from the summary.
awk -F '[:," ]+' '
  $2 == "class" { class = $3 }
  $2 == "tier" { tier = $3 }
  $2 == "resident" { class = tier = "" }  # the peak of the process, which is of neither
  $2 == "device_memory" { cap["device"] = $3 }
  $2 == "host_memory" { cap["cpu"] = $3 }
  $2 == "peak_bytes" {
    held[tier] += $3
    if (class == "parameter" || class == "master" || class == "optimizer") states += $3
  }
  END {
    mebi = 1024 * 1024
    printf "\nParameters, masters and optimizer states: %.1f MiB\n", states / mebi
    printf "device pools: %.1f MiB of at most %.1f; the states are %.1f times that\n", held["device"] / mebi, cap["device"] / mebi, states / cap["device"]
    printf "host pools:   %.1f MiB of at most %.1f; the states are %.1f times that\n", held["cpu"] / mebi, cap["cpu"] / mebi, states / cap["cpu"]
  }' "$results/summary.json"
echo "Timeline:    $results/timeline.json (open it at https://ui.perfetto.dev)"
