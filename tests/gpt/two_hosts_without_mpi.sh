#!/usr/bin/env bash
# two_hosts_without_mpi.sh GPT TWO_HOSTS: four ranks that are started on two hosts as torchrun starts them all end with an
# error that says what they need (TWO_HOSTS is tests/comm/two_hosts.sh).
set -euo pipefail
gpt=$1 two_hosts=$2
# mpirun only reaches the hosts here. It would end all ranks with the first one that fails.
"$two_hosts" 2 2 bash -c '
  export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE MASTER_ADDR=192.0.2.1 MASTER_PORT=29421
  unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMIX_NAMESPACE
  if said=$("$0" --device cpu --threads 1 --layers 1 --width 32 --heads 2 --context 16 --steps 1 --sample 0 --data "$1" 2>&1)
  then
    echo "rank $RANK has trained: $said"
    exit 1
  fi
  case $said in
    *"on 2 hosts (ebb-a, ebb-b): CPU ranks on several hosts need MPI"*) ;;
    *)
      echo "rank $RANK says: $said"
      exit 1
      ;;
  esac
' "$gpt" "$(realpath "$0")"
