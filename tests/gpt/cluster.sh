#!/usr/bin/env bash
# Runs gpt on a cluster as an operator would: Slurm with two nodes, and sshd for mpirun, on the hosts of
# tests/comm/hosts.sh.
#
#   cluster.sh SHOWS GPT      SHOWS: one of the functions below that begin with "shows_"
#
# Ends with 77 (skipped) and the reason where packages or rights are missing. "tests/run.sh --cluster" installs the packages.
# Those that take minutes, because Slurm counts time limits in minutes, run with EBB_FULL=1 only (tests/run.sh --full).
set -euo pipefail
source "$(dirname "$0")/../comm/hosts.sh"

shows=$1 gpt=$2
case $shows in
  time_limit | requeue) [ "${EBB_FULL:-}" = 1 ] || skip "it takes minutes; tests/run.sh --full runs it" ;;
esac
PATH=$PATH:/usr/sbin
if [ "${EBB_CLUSTER:-}" != inside ]; then
  EBB_CLUSTER=inside in_own_namespaces slurmctld slurmd srun munged sshd mpirun python3 -- "$0" "$@"
fi

start_slurm() {
  mkdir -p /run/munge /run/ebb/slurmctld
  (umask 077 && head -c 128 /dev/urandom >/run/ebb/munge.key)
  munged --force --key-file /run/ebb/munge.key --socket /run/munge/munge.socket.2 --pid-file /run/munge/munged.pid \
    --seed-file /run/munge/seed --log-file /run/ebb/munged.log
  # Four slots a node on any machine. A job that is requeued waits until its credentials have expired, and for the scheduler.
  cat >/run/ebb/slurm.conf <<'CONFIGURATION'
ClusterName=ebb
SlurmctldHost=ebb-a
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/run/ebb/slurmctld
SlurmdSpoolDir=/run/ebb/slurmd-%n
SlurmctldPidFile=/run/ebb/slurmctld.pid
SlurmdPidFile=/run/ebb/slurmd-%n.pid
SlurmctldLogFile=/run/ebb/slurmctld.log
SlurmdLogFile=/run/ebb/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=5
NodeName=ebb-a,ebb-b CPUs=4
PartitionName=all Nodes=ALL Default=YES
CONFIGURATION
  echo CgroupPlugin=cgroup/v1 >/run/ebb/cgroup.conf
  echo PMIxCliTmpDirBase=/run/own >/run/ebb/mpi.conf
  export SLURM_CONF=/run/ebb/slurm.conf
  on_host ebb-a slurmctld -D &>/run/ebb/slurmctld.out &
  on_host ebb-a slurmd -D -N ebb-a &>/run/ebb/slurmd-ebb-a.out &
  on_host ebb-b slurmd -D -N ebb-b &>/run/ebb/slurmd-ebb-b.out &
}

start_sshd() {
  mkdir -p /run/sshd
  ssh-keygen -q -t ed25519 -N '' -f /run/ebb/key
  printf '%s\n' 'HostKey /run/ebb/key' 'AuthorizedKeysFile /run/ebb/key.pub' 'StrictModes no' 'PermitRootLogin yes' \
    'UsePAM no' 'PidFile none' >/run/ebb/sshd_config
  printf '%s\n' 'IdentityFile /run/ebb/key' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' 'LogLevel ERROR' \
    >/run/ebb/ssh_config
  on_host ebb-b "$(command -v sshd)" -D -f /run/ebb/sshd_config &>/run/ebb/sshd.out &
  export OMPI_MCA_plm=rsh OMPI_MCA_plm_rsh_agent='ssh -F /run/ebb/ssh_config' OMPI_MCA_orte_tmpdir_base=/run/ebb
}

if [ "${EBB_CLUSTER_HOST:-}" != ebb-a ]; then
  make_hosts
  start_slurm
  start_sshd
  # A model that takes a few ms a step. The arguments of a run come after these.
  mkdir -p /run/ebb/bin
  printf '#!/bin/sh\nexec "%s" --layers 1 --width 32 --heads 2 --context 16 --batch 1 --threads 1 --vocabulary 256 \\
    --sample 0 --data "%s" "$@"\n' "$(realpath "$gpt")" "$(realpath "$(dirname "$0")/../../LICENSE")" >/run/ebb/bin/gpt
  chmod +x /run/ebb/bin/gpt
  export PATH=/run/ebb/bin:$PATH EBB_CLUSTER_HOST=ebb-a
  status=0
  (on_host ebb-a "$(realpath "$0")" "$@") || status=$?
  [ "$status" -eq 0 ] || [ "$status" -eq 77 ] || tail -n 20 /run/ebb/*.out >&2
  exit "$status"
fi

# From here on: a user's session on ebb-a.
cd /run/ebb
requeue_script=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../examples/requeue.sbatch")

fail() {
  echo "cluster.sh: $*" >&2
  exit 1
}

# until_true SECONDS COMMAND...: the command's success, which is a line in a log or a file, is awaited.
until_true() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "after $SECONDS s still not: $*"
    sleep 0.1
  done
}

job_shows() {  # JOB TEXT
  scontrol show job "$1" | grep -q "$2"
}

both_nodes_are_idle() {
  [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ]
}

has() {  # FILE TEXT
  grep -q -- "$2" "$1" || fail "$1 has no '$2':
$(cat "$1")"
}

digest_of() {  # SUMMARY
  python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["parameter_digest"])' "$1"
}

until_true 60 both_nodes_are_idle
srun --mpi=list 2>&1 | grep -q pmix || skip "this Slurm has no plug-in for PMIx"

# A run that Slurm ends at its time limit is saved, on one host and on two.
shows_time_limit() {
  local one two
  one=$(sbatch --parsable -o one.out -t 1 -n 2 --wrap 'srun gpt --steps 2000000 --save one --resume latest')
  two=$(sbatch --parsable -o two.out -t 1 -N 2 --wrap 'srun --mpi=pmix gpt --steps 2000000 --save two --resume latest')
  until_true 180 job_shows "$one" JobState=TIMEOUT
  until_true 60 job_shows "$two" JobState=TIMEOUT
  for run in one two; do
    until_true 20 grep -q 'Exited with exit code 75' $run.out
    has $run.out 'gpt: stopped by SIGTERM in training'
    [ -e $run/latest ] || fail "$run is not saved"
  done
}

# The batch script of docs/ranks.md, requeued at its limit at least twice, has the bits of a run without a stop.
shows_requeue() {
  local began steps id restarts=0
  began=$(date +%s%N)
  srun -N 2 --mpi=pmix gpt --steps 1000 >calibration.out
  # Beside the run without a stop it takes some 160 s, of which at most a minute passes until each stop. If the machine has
  # become faster since then, the runs begin anew with more steps.
  steps=$((1000 * 80 * 1000000000 / ($(date +%s%N) - began)))
  cp bin/gpt gpt.before
  while [ "$restarts" -lt 2 ]; do
    sed 's/"\$@"$/"$@" --steps '$steps/ gpt.before >bin/gpt
    id=$(sbatch --parsable -t 2 -o requeue.out "$requeue_script")
    srun -N 2 --mpi=pmix gpt --summary whole.json >whole.out
    until_true 1200 job_shows "$id" JobState=COMPLETED
    restarts=$(scontrol show job "$id" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p')
    steps=$((3 * steps))
  done
  has requeue.out 'gpt: stopped by SIGUSR1 in training'
  has requeue.out 'resumed from'
  [ "$(digest_of summary.json)" = "$(digest_of whole.json)" ] || fail "the runs have other parameters"
}

# run_and_signal FOLDER SIGNALLED COMMAND...: starts the command in the background, and runs SIGNALLED once it has saved for
# the first time. The command's exit code is in $code, what it prints in FOLDER.out.
run_and_signal() {
  local folder=$1 signalled=$2
  shift 2
  code=0
  "$@" --steps 2000000 --save "$folder" --save-every 50 &>"$folder.out" &
  started=$!
  until_true 120 test -e "$folder/latest"
  $signalled
  wait $started || code=$?
}

# What docs/ranks.md says about signals.
shows_signals() {
  local mpirun=(mpirun --allow-run-as-root --host ebb-a:1,ebb-b:1)
  to_launcher() { kill "-$signal" $started; }
  signal=USR1
  run_and_signal srun-one to_launcher srun -N 1 -n 2 gpt
  [ $code -eq 75 ] || fail "srun on one host ended with $code"
  has srun-one.out 'gpt: stopped by SIGUSR1'
  run_and_signal srun-two to_launcher srun -N 2 --mpi=pmix gpt
  [ $code -eq 75 ] || fail "srun on two hosts ended with $code"
  has srun-two.out 'gpt: stopped by SIGUSR1'
  run_and_signal mpirun-two to_launcher "${mpirun[@]}" "$PWD/bin/gpt"
  [ $code -eq 75 ] || fail "mpirun ended with $code"
  has mpirun-two.out 'gpt: stopped by SIGUSR1'
  signal=TERM
  if command -v torchrun >/dev/null; then
    run_and_signal torchrun to_launcher torchrun --no-python --nproc-per-node 2 gpt
    has torchrun.out 'gpt: stopped by SIGTERM'
  else
    echo "Not shown: signals to torchrun, because it is not in PATH"
  fi
  run_and_signal srun-killed to_launcher srun -N 2 --mpi=pmix gpt
  ! grep -q 'gpt: stopped by' srun-killed.out || fail "srun has not killed the ranks"
  # scancel: SIGTERM to the ranks, and 30 s later SIGKILL.
  cancel() { scancel --name=cancelled; }
  run_and_signal cancelled cancel srun --job-name=cancelled -N 2 --mpi=pmix gpt
  has cancelled.out 'gpt: stopped by SIGTERM'
  cancel() { scancel --signal=USR1 --name=signalled; }
  run_and_signal signalled cancel srun --job-name=signalled -N 2 --mpi=pmix gpt
  [ $code -eq 75 ] || fail "scancel --signal=USR1: srun ended with $code"
  has signalled.out 'gpt: stopped by SIGUSR1'
}

# Ranks of several hosts end at once and without a word from Open MPI, which MPI_Finalize alone did in half of all runs.
shows_end() {
  for run in 1 2 3 4 5 6 7 8; do
    srun -N 2 -n 4 --mpi=pmix gpt --steps 3 &>end.out || fail "$(cat end.out)"
    ! grep -q 'hang or fail' end.out || fail "in run $run: $(cat end.out)"
  done
}

# MASTER_ADDR and MASTER_PORT are honoured over MPI, and WORLD_SIZE may stand beside Slurm's equal number.
shows_variables() {
  MASTER_ADDR=ebb-a MASTER_PORT=29555 WORLD_SIZE=2 srun -N 2 --mpi=pmix gpt --steps 2 &>variables.out ||
    fail "$(cat variables.out)"
  has variables.out "have met at host 'ebb-a', port 29555"
  has variables.out 'use MPI: 2 hosts (ebb-a, ebb-b)'
}

# With ebb.reduction_group, a run goes on with the same bits on another number of hosts.
shows_moved() {
  echo '{"train_micro_batch_size_per_gpu": 1, "ebb": {"reduction_group": 2}}' >config.json
  srun -N 2 --ntasks-per-node=2 --mpi=pmix gpt --config config.json --steps 5 --save moved &>moved.out || fail "$(cat moved.out)"
  srun -N 1 -n 4 gpt --config config.json --steps 10 --save moved --resume latest --summary moved.json &>moved.out ||
    fail "$(cat moved.out)"
  srun -N 2 --ntasks-per-node=2 --mpi=pmix gpt --config config.json --steps 10 --summary whole.json &>whole.out ||
    fail "$(cat whole.out)"
  [ "$(digest_of moved.json)" = "$(digest_of whole.json)" ] || fail "the runs have other parameters"
}

"shows_$shows"
