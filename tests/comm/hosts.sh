# Hosts out of one machine, for the scripts that source this: network namespaces with a cable between them. Each host has a
# name, a /dev/shm and a folder for temporary files of its own. They share all other files, among them the folder /run/ebb.

skip() {
  echo "Skipped: $*"
  exit 77
}

# in_own_namespaces TOOL... -- COMMAND...: runs the command in a process and a mount namespace, in place of this script, so
# that nothing stays behind however it ends: neither processes nor namespaces nor files.
in_own_namespaces() {
  local inside=(unshare --mount --pid --fork --kill-child --mount-proc) error tools=(ip unshare)
  while [ "$1" != -- ]; do
    tools+=("$1")
    shift
  done
  shift
  [ "$(id -u)" -eq 0 ] || skip "only root may make network namespaces"
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || skip "there is no $tool"
  done
  error=$("${inside[@]}" sh -c 'mount -t tmpfs tmpfs /run && unshare --uts --net true' 2>&1) || skip "namespaces: $error"
  exec "${inside[@]}" "$@"
}

# The hosts ebb-a (192.0.2.1) and ebb-b (192.0.2.2).
make_hosts() {
  local name error
  mount -t tmpfs tmpfs /run
  mkdir -p /run/ebb /run/own
  ip netns add ebb-a
  ip netns add ebb-b
  error=$(ip -n ebb-a link add cable type veth peer name cable netns ebb-b 2>&1) ||
    skip "no cable between network namespaces: $error"
  # Addresses for documentation (RFC 5737), which no network has.
  ip -n ebb-a address add 192.0.2.1/24 dev cable
  ip -n ebb-b address add 192.0.2.2/24 dev cable
  for name in ebb-a ebb-b; do
    ip -n $name link set lo up
    ip -n $name link set cable up
  done
  printf '127.0.0.1 localhost\n192.0.2.1 ebb-a\n192.0.2.2 ebb-b\n' >/run/ebb/hosts
}

# on_host NAME COMMAND...: runs the command there, in place of the shell. Without a name server, which no host could reach, a
# name that is not in /etc/hosts is unknown at once.
on_host() {
  local name=$1
  shift
  exec ip netns exec "$name" unshare --mount --uts sh -c '
    mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run/own && export TMPDIR=/run/own &&
    mount --bind /run/ebb/hosts /etc/hosts && { [ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf; } &&
    hostname "$0" && exec "$@"
  ' "$name" "$@"
}
