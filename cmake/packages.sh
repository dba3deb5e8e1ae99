# The packages that Ebb is built from, on Debian 12 and Ubuntu 24.04; sourced by the scripts that set up a machine.
#
# ocl-icd-opencl-dev: libdnnl-dev's own CMake file asks for OpenCL, and Debian does not install it with that.
# install_packages asks apt only for missing packages. If none is missing, it needs no network and no root.

ebb_packages=(
  g++ cmake ninja-build pkg-config
  libabsl-dev nlohmann-json3-dev libspdlog-dev libhwy-dev
  libopenmpi-dev openmpi-bin liburing-dev
  libdnnl-dev ocl-icd-opencl-dev libcli11-dev libssl-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)

# For the tests: tests/config/schema_test.py is skipped without jsonschema. A python3 on PATH that has it needs no package.
add_test_packages() {
  if ! python3 -c 'import jsonschema' 2>/dev/null; then
    ebb_packages+=(python3-jsonschema)
  fi
}

# For tests/gpt/cluster.sh.
add_cluster_packages() {
  ebb_packages+=(iproute2 munge openssh-server slurm-client slurmctld slurmd)
}

# For the Python package: a virtual environment needs ensurepip, which Debian packages separately.
add_python_packages() {
  if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    ebb_packages+=(python3 python3-venv)
  fi
}

install_packages() {
  local missing=()
  local package
  for package in "${ebb_packages[@]}"; do
    if ! dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
      missing+=("$package")
    fi
  done
  if [ ${#missing[@]} -eq 0 ]; then
    return 0
  fi
  echo "Installing: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "These packages are missing, and there is no sudo to install them: ask root to install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
