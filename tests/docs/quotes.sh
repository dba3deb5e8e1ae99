#!/bin/sh
# The blocks of PAGE whose fence says KIND are SOURCE, all of it, empty lines apart.
#
#   quotes.sh PAGE SOURCE KIND
set -eu
page=$1 source=$2 kind=$3
quoted=$(awk -v kind="$kind" -f "${0%/*}/extract.awk" "$page" | grep -v '^$')
[ "$quoted" = "$(grep -v '^$' "$source")" ] || {
  echo "$page quotes something else than $source:" >&2
  printf '%s\n' "$quoted" | diff - "$source" >&2
  exit 1
}
