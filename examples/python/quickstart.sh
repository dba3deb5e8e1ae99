#!/usr/bin/env bash
# Installs missing packages, builds the Python package and installs it into a virtual environment. Then trains a small Llama of transformers on
# 2 ranks, with parameters and optimizer states on the disk, and prints its losses beside those of plain torch.
#
#   examples/python/quickstart.sh
#
# For Debian 12 and Ubuntu 24.04. The first run needs the network. The environment is build/python/torch-newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source cmake/packages.sh

add_python_packages
install_packages
environment=build/python/torch-newest
[ -x "$environment/bin/python" ] || python3 -m venv "$environment"
"$environment/bin/python" -m pip install --quiet torch numpy transformers
"$environment/bin/python" -m pip install --quiet .
OMP_NUM_THREADS=1 "$environment/bin/torchrun" --nproc-per-node 2 examples/python/loop.py --steps 20 --beside-torch
