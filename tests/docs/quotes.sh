#!/bin/sh
# The blocks of PAGE whose fence says "cpp minimal" are SOURCE, all of it, empty lines apart.
#
#   quotes.sh PAGE SOURCE
set -eu
page=$1 source=$2
quoted=$(awk -v kind='cpp minimal' -f "${0%/*}/extract.awk" "$page" | grep -v '^$')
[ "$quoted" = "$(grep -v '^$' "$source")" ] || {
  echo "$page quotes something else than $source:" >&2
  printf '%s\n' "$quoted" | diff - "$source" >&2
  exit 1
}
