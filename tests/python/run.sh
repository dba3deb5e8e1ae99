#!/usr/bin/env bash
# Builds the wheel, installs it into a virtual environment with torch, transformers and peft, and runs the tests of this folder.
#
#   tests/python/run.sh [--torch VERSION] [argument of pytest...]
#
# The environment is build/python/torch-VERSION ("newest" without one) and stays. Needs the network the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source cmake/packages.sh

version=newest
if [ "${1:-}" = --torch ]; then
  version=${2:?--torch needs a version}
  shift 2
fi

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
"$python" -m pip wheel --quiet --no-deps --wheel-dir build/python/wheel .
"$python" -m pip install --quiet --no-deps --force-reinstall build/python/wheel/ebb-*-py3-none-*.whl
"$python" -c 'import torch, ebb; print(f"ebb {ebb.__version__} from {ebb.__file__}, torch {torch.__version__}")'
exec "$python" -m pytest -q "$@"
