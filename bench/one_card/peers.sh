#!/usr/bin/env bash
# The programs that bench/one_card/run.py measures beside Ebb, DeepSpeed and RoundPipe (FSDP2 is PyTorch's own), as a folder of wheels,
# and the environment that is made of them. torch and transformers are those of PYTHON, which are not packed.
#
#   bench/one_card/peers.sh pack WHEELS [--device cpu|cuda] [--python PYTHON] [--ebb WHEEL] [--without-operators]
#   bench/one_card/peers.sh install WHEELS ENVIRONMENT [--device cpu|cuda] [--python PYTHON]
#
# pack downloads packages and compiles DeepSpeed's operators (CPUAdam, its disk transfers), for PYTHON's torch, this kind of CPU, and a GPU
# or none (--device, default cuda: PYTHON's torch has CUDA, and nvcc is in PATH or CUDA_HOME; no GPU is needed). Needs a compiler, and apt
# for libaio, which is packed too. PYTHON and its torch are of the versions of the machine that the wheels are for. --ebb adds Ebb's wheel.
# --without-operators: install compiles them, on the other machine.
# install needs no network. It loads the operators of both programs, and RoundPipe's is compiled there. ENVIRONMENT/bin/python is for run.py.
set -euo pipefail
usage() {
  while IFS= read -r line && [[ $line == \#* ]]; do
    [[ $line == '#!'* ]] || echo "${line#\# }"
  done <"$0" >&2
  exit 2
}

deepspeed=deepspeed==0.19.8
# With all that they need beside torch and transformers. Of setuptools DeepSpeed takes distutils.
others=(roundpipe==0.1.1 beartype==0.23.1 ninja==1.13.2 setuptools==80.9.0 py-cpuinfo==9.0.0 hjson==3.1.0 einops==0.8.2 msgpack==1.2.4)

[ $# -ge 2 ] || usage
what=$1
wheels=$(realpath -m "$2")
shift 2
environment=
if [ "$what" = install ]; then
  environment=$(realpath -m "${1:?peers.sh install WHEELS ENVIRONMENT}")
  shift
fi
device=cuda python=python3 ebb='' operators=1
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?} && shift ;;
    --python) python=${2:?} && shift ;;
    --ebb) ebb=${2:?} && shift ;;
    --without-operators) operators=0 ;;
    *) usage ;;
  esac
  shift
done

# An environment that finds the packages beside torch and transformers of PYTHON.
make_environment() { # FOLDER
  "$python" -m venv --clear "$1"
  "$python" - >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/of_python.pth" <<'PY'
import importlib.util, pathlib
folders = [pathlib.Path(importlib.util.find_spec(name).origin).parent.parent for name in ("torch", "transformers")]
print("\n".join(dict.fromkeys(map(str, folders))))
PY
}

# Runs with an environment's programs and libaio.
with() { # FOLDER WORDS...
  local folder=$1
  shift
  PATH=$folder/bin:$PATH CPATH=$folder/include LIBRARY_PATH=$folder/lib LD_LIBRARY_PATH=$folder/lib DS_ACCELERATOR=$device \
    TORCH_EXTENSIONS_DIR=$folder/extensions "$@"
}

add_libaio() { # FOLDER
  cp "$wheels/libaio.h" "$1/include/"
  cp "$wheels/libaio.so.1" "$1/lib/"
  ln -sf libaio.so.1 "$1/lib/libaio.so"
}

case $what in
  pack)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$wheels"
    make_environment "$work/environment"
    pip=("$work/environment/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" install --quiet --no-deps "${others[@]:1}" wheel
    library=$(apt-cache --names-only search '^libaio1(t64)?$' | cut -d' ' -f1 | head -1)
    (cd "$work" && apt-get -o APT::Sandbox::User=root download --quiet libaio-dev "$library" >/dev/null)
    for package in "$work"/libaio*.deb; do dpkg -x "$package" "$work/libaio"; done
    cp "$work/libaio/usr/include/libaio.h" "$wheels/"
    cp "$(find "$work/libaio" -name 'libaio.so.1*' -type f | head -1)" "$wheels/libaio.so.1"
    add_libaio "$work/environment"
    shared=$operators
    [ "$device" = cpu ] || shared=0  # sums between ranks on a CPU
    # Where there is no GPU, DeepSpeed links its disk transfers without libaio.
    with "$work/environment" env LDFLAGS="-Wl,--no-as-needed -laio" DS_BUILD_CPU_ADAM=$operators DS_BUILD_AIO=$operators DS_BUILD_PIN_MEMORY=$operators DS_BUILD_SHM_COMM=$shared \
      "${pip[@]}" wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$wheels" "$deepspeed"
    "${pip[@]}" download --quiet --no-deps --only-binary :all: --dest "$wheels" "${others[@]}"
    # pydantic names the one version of its core that it takes.
    "${pip[@]}" download --quiet --no-deps --only-binary :all: --dest "$wheels" psutil pydantic
    core=$(python3 -c 'import re, sys, zipfile
name = next(n for n in zipfile.ZipFile(sys.argv[1]).namelist() if n.endswith("METADATA"))
print(re.search(r"Requires-Dist: (pydantic[-_]core==\S+)", zipfile.ZipFile(sys.argv[1]).read(name).decode())[1])' "$wheels"/pydantic-*.whl)
    "${pip[@]}" download --quiet --no-deps --only-binary :all: --dest "$wheels" "$core" annotated-types typing-inspection typing-extensions
    [ -z "$ebb" ] || cp "$ebb" "$wheels"
    du -ch "$wheels"/* | awk '{print $1, $2}'
    ;;
  install)
    make_environment "$environment"
    "$environment/bin/python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile "$wheels"/*.whl
    add_libaio "$environment"
    with "$environment" "$environment/bin/python" - <<'PY'
import os
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

CPUAdamBuilder().load()
AsyncIOBuilder().load()
if os.environ["DS_ACCELERATOR"] == "cuda":
    from roundpipe.optim.optim_builder import load_optim_function

    load_optim_function("adam")
else:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()
PY
    ;;
  *) usage ;;
esac
