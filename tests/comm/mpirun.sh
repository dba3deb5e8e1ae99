#!/usr/bin/env bash
# mpirun.sh RANKS PROGRAM [ARGUMENT...]: on this machine, with any number of cores, for any user. 77 (skipped) if
# there is no mpirun.
command -v mpirun >/dev/null || {
  echo "Skipped: there is no mpirun"
  exit 77
}
ranks=$1
shift
exec mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$ranks" "$@"
