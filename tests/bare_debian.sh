#!/usr/bin/env bash
# README's two commands on a bare Debian 12: debootstrap's minbase and what cmake/packages.sh installs. A machine that is used for more has
# more on it, and hides what a test takes from there. Only root can run this; it takes debootstrap, git, the network and 6 GB of disk.
#
#   tests/bare_debian.sh [--root FOLDER] [--mirror URL] [--user] [-- COMMAND...]
#
# What is committed is cloned into the system, and uncommitted changes are not. --root: the folder of the system, which is kept; one that is
# there is used again, with a new clone. Without it the folder is one under /var/tmp, removed at the end. --mirror: where Debian's packages
# come from; without it, where this machine's apt has them from. --user: root installs the packages and a user without rights does the
# rest. COMMAND: what is run in the clone instead of the two commands, for example
#
#   tests/bare_debian.sh --root /var/tmp/bare -- tests/run.sh --program sharding_model_test
#
# Ends as the command does. All mounts are in a namespace of processes that ends with this script, so none is left however that ends.
set -euo pipefail
script=$(realpath "$0")
suite=bookworm
mark=etc/ebb_bare_debian  # in a system that this script has made

fail() {
  echo "tests/bare_debian.sh: $*" >&2
  exit 2
}

# In the namespace: makes the system if it is missing, and runs the command in it.
run_inside() {
  local root=$1 mirror=$2 user=$3
  shift 3
  if [ ! -e "$root/$mark" ]; then
    debootstrap --variant=minbase "$suite" "$root" "$mirror"
    # An installer writes this file; debootstrap does not.
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
    touch "$root/$mark"
  fi
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"

  local home=/root/ebb
  [ "$user" = root ] || home=/home/$user/ebb
  local as_user=(env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "HOME=${home%/*}" "USER=$user")
  if [ "$user" != root ]; then
    chroot "$root" id "$user" >/dev/null 2>&1 || chroot "$root" useradd --create-home "$user"
    as_user=(setpriv "--reuid=$user" "--regid=$user" --init-groups "${as_user[@]}")
  fi
  rm -rf "${root:?}$home"
  git clone --quiet --depth 1 "file://$(dirname "$(dirname "$script")")" "$root$home"
  if [ "$user" != root ]; then
    chroot "$root" chown -R "$user:" "$home"
    chroot "$root" sh -c "cd $home && bash -c 'source cmake/packages.sh && add_test_packages && install_packages'"
  fi
  chroot "$root" "${as_user[@]}" sh -c "cd $home && exec \"\$@\"" sh "$@"
}

if [ "${EBB_BARE_DEBIAN:-}" = inside ]; then
  unset EBB_BARE_DEBIAN
  run_inside "$@"
  exit
fi

root='' mirror='' user=root
while [ $# -gt 0 ]; do
  case "$1" in
    --root | --mirror)
      [ $# -gt 1 ] || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --user) user=ebb ;;
    --)
      shift
      break
      ;;
    *) fail "'$1' is not an option; usage: tests/bare_debian.sh [--root FOLDER] [--mirror URL] [--user] [-- COMMAND...]" ;;
  esac
  shift
done
[ $# -gt 0 ] || set -- sh -c 'examples/quickstart.sh && tests/run.sh'
[ "$(id -u)" -eq 0 ] || fail "only root can make a system of its own"
for tool in debootstrap git unshare; do
  command -v "$tool" >/dev/null || fail "there is no $tool: apt-get install $tool"
done
if [ -z "$mirror" ]; then
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $suite" 'Component: main' | sort -u | head -n 1)
  [ -n "$mirror" ] || fail "this machine's apt has no packages of Debian's $suite: name a mirror with --mirror URL"
fi

# The command runs in the background, so that a signal to this script ends it at once.
temporary='' inside=''
finish() {
  if [ -n "$inside" ]; then
    # The first process of the namespace ends all others, and unshare ends after them.
    local first=''
    read -r first <"/proc/$inside/task/$inside/children" || true
    kill -KILL "${first:-$inside}" 2>/dev/null || true
    wait "$inside" 2>/dev/null || true
  fi
  [ -z "$temporary" ] || rm -rf --one-file-system "$temporary"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
if [ -z "$root" ]; then
  temporary=$(mktemp -d /var/tmp/ebb-bare-debian-XXXXXX)
  root=$temporary/root
fi
mkdir -p "$root"
root=$(realpath "$root")
[ -e "$root/$mark" ] || [ -z "$(ls -A "$root")" ] || fail "$root is not empty, and no whole system that this script has made: remove it, or name another folder"
EBB_BARE_DEBIAN=inside env --default-signal=INT,QUIT unshare --mount --pid --fork --kill-child --propagation private --mount-proc \
  "$script" "$root" "$mirror" "$user" "$@" &
inside=$!
status=0
wait "$inside" || status=$?
inside=''
exit "$status"
