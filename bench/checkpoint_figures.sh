#!/bin/sh
# All figures of checkpoints in one go, as a page for bench/results, in about five minutes on an idle machine:
#
#     bench/checkpoint_figures.sh FOLDER PYTHON >bench/results/DATE-checkpoints.md
#
# FOLDER: on the disk that is measured, with room for 12 GB. PYTHON: one that has torch, and deepspeed if it is to be
# compared. The build is build/release.
set -eu
folder=$1 python=$2
here=$(dirname "$0")
mkdir -p "$folder"

# What is run, under its name, and what it prints.
run() {
  printf '\n`%s`, load before: %s\n\n```\n' "$1" "$(cut -d' ' -f1-3 /proc/loadavg)"
  shift
  "$@"
  echo '```'
}
bench() {
  run "checkpoint_bench FOLDER $*" "$here/../build/release/bin/checkpoint_bench" "$folder" "$@"
}

echo "# Checkpoints, $(date +%Y-%m-%d)"
printf '\n%s, %s cores, %s GiB of memory, Linux %s, %s; the folder is on %s.\n' \
  "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)" "$(nproc)" \
  "$(awk '/MemTotal/ {printf "%.0f", $2 / 1048576}' /proc/meminfo)" "$(uname -r)" \
  "$(c++ --version | head -1)" "$(findmnt -no SOURCE,FSTYPE,OPTIONS -T "$folder" | tr -s ' ')"
printf '\n## Against the disk\n'
bench disk --turns 9
printf '\n## Beside steps\n'
bench ram --turns 7 --compute 600
bench nvme --units 12 --elements 4194304 --turns 5
bench nvme --units 12 --elements 4194304 --turns 5 --early
printf '\n## Against peers\n'
run 'checkpoint_against_peers.py FOLDER --python PYTHON' \
  "$here/checkpoint_against_peers.py" "$folder" --python "$python" --rounds 5
