#!/bin/sh
# Makes a virtual environment with the peers of footprint --peers: PyTorch's DDP and FSDP2, and DeepSpeed. DeepSpeed compiles
# its kernels in the first run, and its offload to NVMe needs libaio's headers (Debian: libaio-dev).
#
#   bench/footprint/peers_environment.sh FOLDER
#   build/release/bin/footprint --peers FOLDER/bin/python
set -eu
[ $# = 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
python3 -m venv "$1"
"$1/bin/pip" install --quiet torch numpy setuptools ninja
"$1/bin/pip" install --quiet --no-build-isolation deepspeed
