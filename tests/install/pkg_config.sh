#!/bin/sh
# Builds and runs a source with nothing but a compiler and pkg-config: with --static, and without, as Ebb's libraries are
# static in any case.
#
#   pkg_config.sh COMPILER PREFIX SOURCE WORK_DIR
set -eu
compiler=$1 prefix=$2 source=$3 work_dir=$4
mkdir -p "$work_dir"
pc=$(find "$prefix" -name ebb.pc)
export PKG_CONFIG_PATH="${pc%/*}"
pkg-config --modversion ebb
"$compiler" -std=c++20 -c "$source" $(pkg-config --cflags ebb) -o "$work_dir/minimal.o"
for static in --static ''; do
  libraries=$(pkg-config --libs $static ebb)
  echo "$libraries"
  "$compiler" "$work_dir/minimal.o" $libraries -o "$work_dir/minimal"
  "$work_dir/minimal"
done
