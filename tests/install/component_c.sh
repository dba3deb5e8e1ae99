#!/bin/sh
# Installs the component "c", as docs/c.md says, and builds and runs a trainer in C with what was installed.
#
#   component_c.sh CMAKE BUILD_FOLDER PREFIX CC SOURCE
set -eu
cmake=$1 build=$2 prefix=$3 cc=$4 source=$5

rm -rf "$prefix"
"$cmake" --install "$build" --component c --prefix "$prefix" >/dev/null
library=$(find "$prefix" -name libebb.so.1)
"$cc" -std=c99 "$source" -I"$prefix/include" -o "$prefix/trainer" "$library" -Wl,-rpath,"${library%/*}" -lm
"$prefix/trainer"
