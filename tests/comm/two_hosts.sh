#!/usr/bin/env bash
# Runs a program with mpirun on two hosts that hosts.sh makes.
#
#   two_hosts.sh RANKS_ON_FIRST RANKS_ON_SECOND PROGRAM [ARGUMENT...]
#
# mpirun runs on the first and reaches the second through this script, which it takes for ssh. Ends as mpirun does, or with
# 77 (skipped) and the reason where it may not make hosts.
set -euo pipefail
script=$(realpath "$0")
source "$(dirname "$script")/hosts.sh"

case "${EBB_TWO_HOSTS:-}" in
  '') EBB_TWO_HOSTS=inside in_own_namespaces mpirun -- "$script" "$@" ;;
  shell)  # mpirun's: "two_hosts.sh HOST COMMAND LINE"
    host=$1
    shift
    on_host "$host" sh -c "$*"
    ;;
esac

first_ranks=$1 second_ranks=$2
shift 2
make_hosts
export EBB_TWO_HOSTS=shell
(on_host ebb-a mpirun --allow-run-as-root --oversubscribe --bind-to none --mca orte_tmpdir_base /run/ebb \
  --mca plm_rsh_agent "$script" --mca plm_rsh_no_tree_spawn 1 \
  --host "ebb-a:$first_ranks,ebb-b:$second_ranks" -n $((first_ranks + second_ranks)) "$@")
