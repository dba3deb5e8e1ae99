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
PATH=$PATH:/usr/sbin:$(realpath -m "$(dirname "$0")/../../build/python/torch-newest/bin")
if [ "${EBB_CLUSTER:-}" != inside ]; then
  EBB_CLUSTER=inside in_own_namespaces slurmctld slurmd srun munged sshd mpirun python3 -- "$0" "$@"
fi

start_slurm() {
  mkdir -p /run/munge /run/ebb/slurmctld
  (umask 077 && head -c 128 /dev/urandom >/run/ebb/munge.key)
  munged --force --key-file /run/ebb/munge.key --socket /run/munge/munge.socket.2 --pid-file /run/munge/munged.pid \
    --seed-file /run/munge/seed --log-file /run/ebb/munged.log
  # Four slots a node on any machine. A job that is requeued waits until its credentials have expired, and for the scheduler.
  # proctrack/pgid kills what a batch script leaves behind, as proctrack/cgroup does, which not every container permits.
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
ProctrackType=proctrack/pgid
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
  printf '%s\n' '#!/bin/sh' 'export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517' 'RANK=1 gpt "$@" &' 'RANK=0 exec gpt "$@"' \
    >/run/ebb/bin/by_hand
  chmod +x /run/ebb/bin/*
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

has_torchrun() {
  command -v torchrun >/dev/null
}
torchrun='torchrun --no-python --nproc-per-node 2'
mpirun='mpirun --allow-run-as-root'

digest_of() {  # SUMMARY
  python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["parameter_digest"])' "$1"
}

until_true 60 both_nodes_are_idle
srun --mpi=list 2>&1 | grep -q pmix || skip "this Slurm has no plug-in for PMIx"

# A run that Slurm ends at its time limit is saved, on one host and on two, but for mpirun's.
shows_time_limit() {
  local run
  local -A jobs
  submit() {  # FOLDER OPTIONS COMMAND...: the batch script has this last line
    local run=$1 options=$2
    shift 2
    jobs[$run]=$(sbatch --parsable -o "$run.out" -t 1 $options --wrap "exec $* --steps 2000000 --save $run --resume latest")
  }
  submit one '-n 2' srun gpt
  submit two '-N 2' srun --mpi=pmix gpt
  submit by_hand '-n 1' by_hand
  submit mpirun '-n 1' $mpirun --oversubscribe -n 2 gpt --accumulate 1000000
  ! has_torchrun || submit torchrun '-n 1' $torchrun gpt
  for run in "${!jobs[@]}"; do
    until_true 240 job_shows "${jobs[$run]}" JobState=TIMEOUT
    if [ "$run" = mpirun ]; then
      [ ! -e "$run/latest" ] || fail "mpirun has waited for the end of the step"
    else
      has "$run.out" 'gpt: stopped by SIGTERM in training'
      [ -e "$run/latest" ] || fail "$run is not saved"
    fi
  done
  has one.out 'Exited with exit code 75'
  has two.out 'Exited with exit code 75'
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

# saved CODE SIGNAL SIGNALLED COMMAND...: SIGNALLED is run while the command trains. The command ends with CODE, and the run is
# saved because of SIGNAL.
saved() {
  local code=$1 signal=$2 signalled=$3
  shift 3
  start "$@"
  until_true 120 grep -qs 'step 1/' "$run.out"
  $signalled
  ends_with "$code"
  has "$run.out" "gpt: stopped by $signal in training"
  [ -e "$run/latest" ] || fail "$run is not saved"
}

# lost CODE SIGNALLED COMMAND...: SIGNALLED is run in a step that takes hours. The command ends with CODE, and nothing is saved.
lost() {
  local code=$1 signalled=$2
  shift 2
  start "$@" --accumulate 1000000
  until_true 120 grep -qs 'ebb info: engine:' "$run.out"
  $signalled
  ends_with "$code"
  [ ! -e "$run/latest" ] || fail "$run is saved"
}

runs=0
# start COMMAND...: in the background, in a process group of its own as in a terminal: $started. $run is its folder.
start() {
  runs=$((runs + 1))
  run=run$runs
  echo "$run: $*"
  set -m
  "$@" --steps 2000000 --save "$run" &>"$run.out" &
  set +m
  started=$!
}

ends_with() {  # CODE
  local code=0
  wait "$started" || code=$?
  [ "$code" -eq "$1" ] || fail "$run has ended with $code, not with $1:
$(cat "$run.out")"
  until_true 60 no_rank_of "$run"
}

no_rank_of() {  # FOLDER
  ! pgrep -f -- "--save $1( |\$)" >/dev/null
}

# in_job OPTIONS COMMAND...: a batch job whose script is this command. It ends with the script's exit code, 0 if a signal has
# ended the script.
in_job() {
  local options=$1 id
  shift
  id=$(sbatch --parsable -J in_job -o "$run.out" $options --wrap "$*")
  until_true 120 job_shows "$id" JobState=CANCELLED
  return "$(scontrol show job "$id" | sed -n 's/.*ExitCode=\([0-9]*\):.*/\1/p')"
}

ctrl_c() { kill -INT -- "-$started"; }
ctrl_c_until_it_ends() { while ctrl_c 2>/dev/null; do sleep 0.3; done; }
one_ctrl_c_and_usr1() {
  ctrl_c
  until_true 20 grep -q 'one more within 1 sec to abort' "$run.out"
  usr1
}
term() { kill -TERM "$started"; }
usr1() { kill -USR1 "$started"; }
kill_9() { kill -KILL "$started"; }
cancel() { scancel -n in_job; }
cancel_with_usr1() { scancel --signal=USR1 -n srun_of_the_test; }

# The cells of the table in docs/ranks.md, "Signals".
shows_signals_by_hand() {
  local ranks
  for ranks in by_hand 'gpt --ranks 2'; do
    saved 75 SIGINT ctrl_c $ranks
    saved 75 SIGTERM term $ranks
    saved 75 SIGUSR1 usr1 $ranks
    saved 75 SIGTERM cancel in_job '-n 1' exec $ranks
    lost 0 cancel in_job '-n 1' $ranks
  done
  # The ranks of a shell that is killed go on.
  kill_shell_and_usr1() {
    kill_9
    [ "$(pgrep -cx gpt)" -eq 2 ] || fail "the ranks have ended with their shell"
    pkill -USR1 -o -x gpt
  }
  saved 137 SIGUSR1 kill_shell_and_usr1 sh -c 'by_hand "$@"; exit $?' sh
}

shows_signals_srun() {
  local srun=(srun -J srun_of_the_test -N 2 --mpi=pmix gpt) one_host=(srun -N 1 -n 2 gpt)
  saved 75 SIGUSR1 one_ctrl_c_and_usr1 "${srun[@]}"
  lost 137 ctrl_c_until_it_ends "${srun[@]}"
  lost 137 term "${srun[@]}"
  saved 75 SIGUSR1 usr1 "${srun[@]}"
  saved 75 SIGUSR1 usr1 "${one_host[@]}"
  saved 75 SIGUSR1 cancel_with_usr1 "${srun[@]}"
  lost 137 kill_9 "${srun[@]}"
  lost 137 kill_9 "${one_host[@]}"
  saved 75 SIGTERM cancel in_job '-N 2' exec srun --mpi=pmix gpt
  # srun is killed with the script, and the line of the signal is lost.
  start in_job '-N 2' srun --mpi=pmix gpt
  until_true 120 grep -qs 'step 1/' "$run.out"
  cancel
  ends_with 0
  [ -e "$run/latest" ] || fail "$run is not saved"
  # scancel ends a job that requeues itself for good.
  local id
  id=$(sbatch --parsable -t 10 -o cancelled.out "$requeue_script")
  until_true 120 grep -qs 'step 1/' cancelled.out
  scancel "$id"
  until_true 60 job_shows "$id" JobState=CANCELLED
  until_true 60 no_rank_of "runs/$id"
  [ -e "runs/$id/latest" ] || fail "runs/$id is not saved"
  job_shows "$id" Restarts=0 && job_shows "$id" JobState=CANCELLED || fail "job $id is back"
}

shows_signals_mpirun() {
  local one_host="$mpirun --oversubscribe -n 2 gpt" two_hosts="$mpirun --host ebb-a:1,ebb-b:1 $PWD/bin/gpt" ranks
  for ranks in "$one_host" "$two_hosts"; do
    lost 1 ctrl_c $ranks
    lost 1 term $ranks
    saved 75 SIGUSR1 usr1 $ranks
    lost 137 kill_9 $ranks
  done
  lost 1 cancel in_job '-n 1' exec $one_host
  lost 1 cancel in_job '-N 2' exec $two_hosts
  lost 0 cancel in_job '-n 1' $one_host
}

shows_signals_torchrun() {
  has_torchrun || skip "there is no torchrun"
  saved 1 SIGINT ctrl_c $torchrun gpt
  saved 1 SIGTERM term $torchrun gpt
  lost 138 usr1 $torchrun gpt
  lost 137 kill_9 $torchrun gpt
  saved 1 SIGTERM cancel in_job '-n 1' exec $torchrun gpt
  lost 0 cancel in_job '-n 1' $torchrun gpt
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

# rank NAME ENVIRONMENT...: starts one of two ranks that meet at port 29556. ENVIRONMENT is a command that sets its variables.
rank() {
  local name=$1
  shift
  "$@" gpt --steps 2 &>"$name.out" &
  process[$name]=$!
}
declare -A process
by_hand=(env MASTER_ADDR=ebb-a MASTER_PORT=29556 WORLD_SIZE=2)
mpich=(env MASTER_ADDR=ebb-a MASTER_PORT=29556 PMI_SIZE=2)

# rank_ends NAME CODE [TEXT]: the rank ends with the code, and has printed the text.
rank_ends() {
  local code=0
  wait "${process[$1]}" || code=$?
  [ "$code" -eq "$2" ] || fail "rank '$1' has ended with $code, not with $2: $(cat "$1.out")"
  [ $# -eq 2 ] || has "$1.out" "$3"
}

# A rank of another job at the same MASTER_PORT is refused, and the job goes on. Rank 0 is refused at another host's MASTER_ADDR.
shows_ports() {
  rank zero "${by_hand[@]}" SLURM_JOB_ID=1 RANK=0
  rank stranger "${by_hand[@]}" SLURM_JOB_ID=2 RANK=1
  rank_ends stranger 2 'started by a shell or a launcher like torchrun, job 1, has refused rank 1 .* of another job (.*, job 2)'
  rank one "${by_hand[@]}" SLURM_JOB_ID=1 RANK=1
  rank_ends one 0
  rank_ends zero 0 "have met at host 'ebb-a', port 29556"
  rank zero "${by_hand[@]}" RANK=0 MASTER_ADDR=ebb-b
  rank_ends zero 2 "rank 0 listens on another host: rank 0 on host 'ebb-a' has the addresses 192.0.2.1"
}

# Ranks of MPICH's launcher meet at MASTER_ADDR. On several hosts they are refused, because they do not use Open MPI.
shows_mpich() {
  local name
  rank zero "${mpich[@]}" PMI_RANK=0
  rank one "${mpich[@]}" PMI_RANK=1
  rank_ends one 0
  rank_ends zero 0 '2 ranks, started by an MPI launcher, have met at'
  rank zero "${mpich[@]}" PMI_RANK=0
  rank one on_host ebb-b "${mpich[@]}" PMI_RANK=1
  for name in zero one; do
    rank_ends $name 2 'on 2 hosts (ebb-a, ebb-b): CPU ranks on several hosts need MPI'
  done
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
