#!/usr/bin/env bash
# Compiles kernels for CMake, and fails if the compiler gives any warning except for known register spills. Each line of LIST is a
# pattern of a kernel's mangled name, and the most bytes that the kernel may store.
#
#   cmake/known_spills.sh LIST COMMAND...
set -uo pipefail
list=$1
shift

known() { # KERNEL BYTES
  local kernel bytes
  while read -r kernel bytes; do
    if [[ $kernel != \#* && $1 =~ $kernel && $2 -le $bytes ]]; then return 0; fi
  done <"$list"
  return 1
}

said=$("$@" 2>&1)
status=$?
spill="spilled to local memory in function '([^']+)', ([0-9]+) bytes spill stores"
while IFS= read -r line; do
  if [[ $line =~ $spill ]]; then
    if known "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"; then continue; fi
    line+=" (those that are known: $list)"
  fi
  [ -z "$line" ] || echo "$line" >&2
  if [[ $line == *warning* && $status = 0 ]]; then status=1; fi
done <<<"$said"
exit "$status"
