#!/usr/bin/env bash
# Installs what is missing, builds, and runs the tests.
#
#   tests/run.sh [release|cuda|asan|tsan] [--full] [--cluster] [--program NAME]... [-- argument of ctest...]
#   tests/run.sh python [--torch VERSION] [--without-cuda | --library FILE] [argument of pytest...]
#
# python: builds the wheel and runs tests/python in an environment of its own, with the newest torch or the one given.
# release: optimised, with CUDA and NCCL where they are found. cuda: the same, and an error where they are not. asan, tsan: debug builds
# with the address and undefined-behaviour, or the thread sanitizer. --full: the product of
# the bitwise matrix' main axes (the others are drawn) and many more random cases, instead of a covering selection.
# --cluster: installs Slurm and sshd too, for tests/gpt/cluster.sh, which is skipped without them. Their packages start services.
# --program: builds and runs only the test programs that are named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source cmake/packages.sh

if [ "${1:-}" = python ]; then
  shift
  exec tests/python/run.sh "$@"
fi
preset=release
ctest_arguments=()
programs=()
while [ $# -gt 0 ]; do
  case "$1" in
    release | cuda | asan | tsan) preset=$1 ;;
    --full) export EBB_FULL=1 ;;
    --cluster) add_cluster_packages ;;
    --program)
      programs+=("${2:?--program needs a name}")
      shift
      ;;
    --)
      shift
      ctest_arguments=("$@")
      break
      ;;
    *)
      echo "tests/run.sh: '$1' is not an option; usage: tests/run.sh [release|cuda|asan|tsan] [--full] [--cluster] [--program NAME]... [-- argument of ctest...], or tests/run.sh python" >&2
      exit 2
      ;;
  esac
  shift
done

add_test_packages
install_packages
cmake --preset "$preset"
if [ ${#programs[@]} -eq 0 ]; then
  cmake --build --preset "$preset"
else
  cmake --build --preset "$preset" --target "${programs[@]}"
  ctest_arguments+=(-L "^($(IFS='|' && echo "${programs[*]}"))\$")
fi
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}
log=build/$preset/Testing/Temporary/LastTest.log
rm -f "$log"
status=0
# One more than there are cores, because some tests mostly wait.
ctest --preset "$preset" -j "$(($(nproc) + 1))" --no-tests=error "${ctest_arguments[@]}" || status=$?
[ ! -e "$log" ] || awk -f tests/summary.awk "$log"
exit "$status"
