#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains under a real Slurm of one node, which this script configures in a temporary folder, starts, and stops. Not part of
# `make test`: it must run as root and needs the Debian packages slurm-wlm and munge, which --install installs.
#
# usage: tests/cluster/slurm.sh [--install] [FOLDER_OF_PROGRAMS [COMMAND...]]
#
# The folder is build/bin if not given. A COMMAND is run instead of the tests, in the root of the repository and with this Slurm.
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD

fail() { echo "slurm.sh: $*" >&2; exit 1; }
if [ "${1:-}" = --install ]; then
  shift
  [ "$(id -u)" = 0 ] || fail "--install must run as root"
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge >/dev/null
fi
[ "$(id -u)" = 0 ] || fail "slurmd starts steps as their users, so it must run as root"
for program in munged slurmctld slurmd srun sbatch scontrol; do
  command -v "$program" >/dev/null || fail "$program is missing; install slurm-wlm and munge, or run this with --install"
done
lockstep=$(realpath "${1:-build/bin}")/lockstep
[ -x "$lockstep" ] || fail "$lockstep is missing; run make build"

# ---- one node ----

folder=$(mktemp -d)
pids=()
stop() {
  if [ "${#pids[@]}" = 3 ]; then  # jobs first: their processes are children of daemons that would outlive ours
    scancel --full --signal=KILL --user root 2>/dev/null || true
    for ((tenth = 0; tenth < 200; ++tenth)); do
      scancel --user root 2>/dev/null || true
      [ -n "$(squeue -h 2>/dev/null)" ] || break
      sleep 0.1
    done
  fi
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ "$(ps -o stat= -p "$pid" | cut -c1)" != Z ]; do sleep 0.1; done
  done
  rm -rf "$folder"
}
trap stop EXIT
chmod 755 "$folder"
mkdir -m 700 "$folder/munge"
mkdir "$folder/run" "$folder/state" "$folder/spool"
(umask 077; head -c 128 /dev/urandom > "$folder/munge/key")
munged --foreground --force --key-file "$folder/munge/key" --socket "$folder/run/munge" --pid-file "$folder/munge/pid" \
  --seed-file "$folder/munge/seed" --log-file "$folder/munge/log" > /dev/null 2>&1 &
pids+=($!)

node=$(hostname -s)
controller_port=${LOCKSTEP_SLURM_PORT:-26817}
cat > "$folder/slurm.conf" <<END
ClusterName=one
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$((controller_port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=${LOCKSTEP_SLURM_TASKS:-task/affinity}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=1
NodeName=$node NodeAddr=127.0.0.1 $(slurmd -C | tr ' ' '\n' | grep -E '^(CPUs|Boards|SocketsPerBoard|CoresPerSocket|ThreadsPerCore)=' | tr '\n' ' ') State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$folder/slurm.conf
while ! [ -S "$folder/run/munge" ]; do kill -0 "${pids[0]}" 2>/dev/null || fail "munged did not start: $(tail -n 3 "$folder/munge/log")"; sleep 0.1; done
slurmctld -D -c > /dev/null 2>&1 & pids+=($!)
slurmd -D > /dev/null 2>&1 & pids+=($!)
for ((second = 0; ; ++second)); do
  state=$(sinfo -h -o %T 2>/dev/null || true)
  [ "$state" = idle ] && break
  [ "$second" -lt 60 ] || fail "the node is '$state': $(tail -n 5 "$folder"/slurm*.log)"
  sleep 1
done
echo "slurm.sh: $(srun --version), $(sinfo -h -o '%n: %C CPUs (allocated/idle/other/total)')"

if [ $# -gt 1 ]; then
  "${@:2}"
  exit
fi

# ---- training ----

run=$folder/training
mkdir "$run"
cd "$run"
cat "$source"/lockstep/*/*.cpp > text.txt
small=(--data.path text.txt --model.hidden 64 --model.layers 2 --train.seq_len 64 --train.log_every 1000)
unset OMP_NUM_THREADS OPENBLAS_NUM_THREADS

expect() {  # FILE TEXT
  grep -qE -- "$2" "$1" || fail "'$2' is not in: $(cat "$1")"
}

# Ranks that Slurm binds have their own cores; those that it does not, divide them.
cores=$(nproc)
share=$((cores / 2 > 0 ? cores / 2 : 1))
for bind in cores none; do
  srun -n 2 --cpu-bind="$bind" "$lockstep" train "${small[@]}" --train.steps 5 --checkpoint.dir "" > "$bind.out" 2> "$bind.err" ||
    fail "srun --cpu-bind=$bind: $(cat "$bind.err")"
  expect "$bind.out" "2 ranks .*, $share threads? each"
  echo "slurm.sh: srun -n 2 --cpu-bind=$bind: $(grep -o '2 ranks.*each' "$bind.out")"
done

# The sbatch script of the examples: stopped in the middle, it is queued again and resumes.
cat > train.toml <<END
[data]
path = "$run/text.txt"
[model]
hidden = 64
layers = 2
[train]
seq_len = 64
steps = 200000
log_every = 50
END
export PATH="$(dirname "$lockstep"):$PATH"
job=$(sbatch --parsable --nodes 1 --gpus-per-node 0 --output job.out --export "ALL,RANKS=2" "$source/examples/slurm.sbatch" train.toml)
wait_for() {  # FILE TEXT
  for ((tenth = 0; tenth < 1200; ++tenth)); do
    grep -qE -- "$2" "$1" 2>/dev/null && return
    sleep 0.1
  done
  fail "'$2' does not appear in: $(cat "$1")"
}
wait_for job.out "step +50/"
scancel --signal=USR1 --batch "$job"
wait_for job.out "is queued again"
# A requeued job waits for cred_expire, which is two minutes by default.
wait_for job.out "resume .*at step"
scancel "$job"
echo "slurm.sh: sbatch: stopped by SIGUSR1, queued again, $(grep -m 1 -o 'resume .*at step.*' job.out | sed "s|$run/||")"
echo "slurm.sh: ok"
