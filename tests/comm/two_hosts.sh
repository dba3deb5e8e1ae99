#!/usr/bin/env bash
# Runs a program with mpirun on two hosts that hosts.sh makes, each with process ids of its own.
#
#   two_hosts.sh RANKS_ON_FIRST RANKS_ON_SECOND PROGRAM [ARGUMENT...]
#
# mpirun runs on the first and reaches the second through this script, which it takes for ssh. Ends as mpirun does, or with
# 77 (skipped) and the reason where it may not make hosts.
set -euo pipefail
script=$(realpath "$0")
source "$(dirname "$script")/hosts.sh"

# The first process of a namespace is this shell, because it gets no signals of those in it. Its end is theirs, so that
# mpirun's daemon must not go into the background (--leave-session-attached).
own_processes=(unshare --pid --fork --kill-child --mount-proc sh -c '"$@"; exit $?' sh)

case "${EBB_TWO_HOSTS:-}" in
  '') EBB_TWO_HOSTS=inside in_own_namespaces mpirun -- "$script" "$@" ;;
  shell)  # mpirun's: "two_hosts.sh HOST COMMAND LINE"
    host=$1
    shift
    on_host "$host" "${own_processes[@]}" sh -c "$*"
    ;;
esac

first_ranks=$1 second_ranks=$2
shift 2
make_hosts
export EBB_TWO_HOSTS=shell
(on_host ebb-a "${own_processes[@]}" mpirun --allow-run-as-root --oversubscribe --bind-to none --mca orte_tmpdir_base /run/ebb \
  --mca plm_rsh_agent "$script" --mca plm_rsh_no_tree_spawn 1 --leave-session-attached \
  --host "ebb-a:$first_ranks,ebb-b:$second_ranks" -n $((first_ranks + second_ranks)) "$@")
