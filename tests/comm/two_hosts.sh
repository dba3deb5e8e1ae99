#!/usr/bin/env bash
# Two hosts out of one: network namespaces with a cable between them, each with a host name and a /dev/shm of its own.
#
#   two_hosts.sh RANKS_ON_FIRST RANKS_ON_SECOND PROGRAM [ARGUMENT...]
#
# mpirun runs on the first and reaches the second through this script, which it takes for ssh. Ends as mpirun does, or with
# 77 (skipped) and the reason where it may not make namespaces. Everything happens in a process and a mount namespace, so
# that nothing stays behind however it ends: neither processes nor namespaces nor files.
set -euo pipefail
script=$(realpath "$0")

# On one of the hosts: "on_host NAME COMMAND...".
on_host() {
  local name=$1
  shift
  exec ip netns exec "$name" unshare --mount --uts sh -c '
    mount -t tmpfs tmpfs /dev/shm && mount --bind /run/ebb/hosts /etc/hosts && hostname "$0" && exec "$@"
  ' "$name" "$@"
}

skip() {
  echo "Skipped: $*"
  exit 77
}

case "${EBB_TWO_HOSTS:-}" in
  '')
    [ "$(id -u)" -eq 0 ] || skip "only root may make network namespaces"
    for tool in ip unshare mpirun; do
      command -v $tool >/dev/null || skip "there is no $tool"
    done
    inside=(unshare --mount --pid --fork --kill-child --mount-proc)
    error=$("${inside[@]}" sh -c 'mount -t tmpfs tmpfs /run && unshare --uts --net true' 2>&1) ||
      skip "namespaces: $error"
    EBB_TWO_HOSTS=inside exec "${inside[@]}" "$script" "$@"
    ;;
  shell)  # mpirun's: "two_hosts.sh HOST COMMAND LINE"
    host=$1
    shift
    on_host "$host" sh -c "$*"
    ;;
esac

first_ranks=$1 second_ranks=$2
shift 2
mount -t tmpfs tmpfs /run
mkdir /run/ebb
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

export EBB_TWO_HOSTS=shell
(on_host ebb-a mpirun --allow-run-as-root --oversubscribe --bind-to none --mca orte_tmpdir_base /run/ebb \
  --mca plm_rsh_agent "$script" --mca plm_rsh_no_tree_spawn 1 \
  --host "ebb-a:$first_ranks,ebb-b:$second_ranks" -n $((first_ranks + second_ranks)) "$@")
