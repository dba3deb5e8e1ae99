#!/bin/sh
# The functions that LIBRARY exports are those that HEADER declares, 57 at most, and nothing else is exported. NCCL and MPI
# are opened when they are needed: it is not linked to them.
#
#   exports.sh NM LIBRARY HEADER
set -eu
exported=$("$1" -D --defined-only "$2" | awk '$2 != "A" { sub("@.*", "", $3); print $3 }' | sort)
declared=$(grep -o 'ebb_[a-z_0]*(' "$3" | tr -d '(' | sort -u)
[ "$exported" = "$declared" ] || {
  echo "exported:" $exported >&2
  echo "declared:" $declared >&2
  exit 1
}
[ "$(echo "$exported" | wc -l)" -le 57 ]
! ldd "$2" | grep -E 'libmpi|libnccl' >&2
