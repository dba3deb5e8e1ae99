#!/usr/bin/env bash
# Packs bench/gpu_suite.sh's programs for a machine that has a GPU, CUDA's libraries and python3, but no compiler. OUT_DIR gets
# one file with the stripped programs and their libraries, a text to train on, and a script that unpacks and starts a program.
#
#   cmake --preset cuda -B build/carried -DCMAKE_CUDA_ARCHITECTURES=90-real     for the GPU there
#   cmake --build build/carried
#   bench/gpu_pack.sh OUT_DIR build/carried/bin
#   there, with OUT_DIR and bench/:  bench/gpu_suite.sh results OUT_DIR/run
#
# A libnccl.so.2.xz in OUT_DIR is unpacked, too, and replaces the NCCL of that machine.
set -euo pipefail
if [ $# -ne 2 ]; then
  sed -n '2,11p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$1
binaries=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$out" "$folder/bin" "$folder/lib"

for name in $("$here/gpu_suite.sh" --programs); do
  if [ ! -x "$binaries/$name" ]; then
    echo "bench/gpu_pack.sh: there is no $binaries/$name; build it first" >&2
    exit 1
  fi
  install -m 755 -s "$binaries/$name" "$folder/bin/"
  # The other machine has its own C library, compiler run time and CUDA.
  ldd "$binaries/$name" | awk '$3 ~ /^\// {print $3}' |
    { grep -vE '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread|cuda|cudart|cublas(Lt)?|nccl|nvidia[^/]*))\.so' || true; } |
    while read -r library; do
      file="$folder/lib/$(basename "$library")"
      [ -e "$file" ] || install -m 644 -s "$(readlink -f "$library")" "$file"
    done
done
cat "$here/../ARCHITECTURE.md" "$here/../README.md" "$here"/../docs/*.md >"$out/text.txt"
tar -C "$folder" -cJf "$out/programs.tar.xz" bin lib

cat >"$out/run" <<'RUN'
#!/usr/bin/env bash
# run NAME ARGUMENTS...: a packed program (bench/gpu_pack.sh), with this machine's CUDA libraries.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# Unpacks to another folder, because the packed file's may be read-only. Only the first process unpacks.
unpacked=${EBB_UNPACKED:-${TMPDIR:-/tmp}/ebb-programs-$(id -u)-$(cksum <"$here/programs.tar.xz" | cut -d' ' -f1)}
python3 - "$here" "$unpacked" <<'PY'
import fcntl, lzma, os, shutil, sys, tarfile
here, unpacked = sys.argv[1:]
os.makedirs(unpacked, mode=0o700, exist_ok=True)
with open(os.path.join(unpacked, "lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(os.path.join(unpacked, "complete")):
        with tarfile.open(os.path.join(here, "programs.tar.xz")) as packed:
            packed.extractall(unpacked, filter="data")
        nccl = os.path.join(here, "libnccl.so.2.xz")
        if os.path.exists(nccl):
            with lzma.open(nccl) as source, open(os.path.join(unpacked, "lib", "libnccl.so.2"), "wb") as target:
                shutil.copyfileobj(source, target)
        open(os.path.join(unpacked, "complete"), "w").close()
PY
# PyTorch brings CUDA's libraries as packages.
cuda=$(python3 - <<'PY'
import glob, os, sys
folders = {os.path.dirname(path) for root in sys.path if root
           for path in glob.glob(os.path.join(root, "nvidia", "**", "lib*.so.*"), recursive=True)}
print(":".join(sorted(folders)))
PY
)
export LD_LIBRARY_PATH="$unpacked/lib:${cuda:+$cuda:}/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
name=$1
shift
exec "$unpacked/bin/$name" "$@"
RUN
chmod +x "$out/run"
du -ch "$out"/* | awk '{print $1, $2}'
