#!/usr/bin/env bash
# Builds the wheel, installs it into a virtual environment with torch, transformers and peft, and runs the tests of this folder.
#
#   tests/python/run.sh [--torch VERSION] [--without-cuda | --library FILE] [argument of pytest...]
#
# --without-cuda: the wheel has no kernels for GPUs, which no test here uses; it is built in a third of the time. --library: no wheel;
# the package as it lies in the tree, over a libebb.so.1 that was built, such as build/release/runtime/c/libebb.so.1.
# The environment is build/python/torch-VERSION ("newest" without one) and stays. Needs the network the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source cmake/packages.sh

version=newest
options=()
library=
while [ $# -gt 0 ]; do
  case "$1" in
    --torch)
      version=${2:?--torch needs a version}
      shift
      ;;
    --without-cuda) options=(-C cmake.define.EBB_CUDA=OFF -C cmake.define.EBB_NCCL=OFF) ;;
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
[ -x "$python" ] || python3 -m venv "$environment"
if [ "$version" = newest ]; then
  torch=torch
else
  torch=torch==$version
fi
"$python" -m pip install --quiet "$torch" pytest numpy transformers peft safetensors
if [ -n "$library" ]; then
  export EBB_LIBRARY=$library PYTHONPATH=$PWD/runtime/python
else
  "$python" -m pip wheel --quiet --no-deps "${options[@]}" --wheel-dir build/python/wheel .
  "$python" -m pip install --quiet --no-deps --force-reinstall --no-index --find-links build/python/wheel ebb
fi
"$python" -c 'import torch, ebb; print(f"ebb {ebb.__version__} from {ebb.__file__}, torch {torch.__version__}")'
exec "$python" -m pytest -q "$@"
