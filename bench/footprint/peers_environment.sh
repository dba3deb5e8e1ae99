#!/bin/sh
# A virtual environment with the peers of footprint --peers: PyTorch's DDP and FSDP2.
#
#   bench/footprint/peers_environment.sh FOLDER
#   build/release/bin/footprint --peers FOLDER/bin/python
set -eu
[ $# = 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
python3 -m venv "$1"
"$1/bin/pip" install --quiet torch numpy
