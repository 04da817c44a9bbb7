#!/bin/bash
# A SLURM of this machine alone: munged, slurmctld and one slurmd for each of two nodes, for the user who calls this.
#
#   tests/engines/slurm_up.sh FOLDER      # a new folder: configuration, keys, state and logs
#   export SLURM_CONF=FOLDER/slurm.conf   # then srun, sbatch, scontrol ...
#   tests/engines/slurm_down.sh FOLDER    # ends all of it
#
# Debian's packages slurm-wlm and munge; no cgroups, no system service, nothing outside of FOLDER. That slurmd finds its node by
# the machine's name, so each has a name of its own (a UTS namespace) and addresses for both names (a mount namespace with a
# hosts file), which needs root or the like. CPUS (4): what each node says it has. Each node says that it has 2 GPUs, for
# jobs that ask for them; there is no device behind.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
PATH=$PATH:/usr/sbin
say() { echo "slurm_up: $*" >&2; }
fail() {
    say "$1"
    tail -n 5 "$folder"/*.log >&2 || true
    "$(dirname "$0")/slurm_down.sh" "$folder" || true
    exit 1
}
for program in munged slurmctld slurmd srun; do
    command -v $program >/dev/null || { say "$program is missing: apt-get install slurm-wlm munge"; exit 3; }
done
unshare --mount --uts true 2>/dev/null || { say "namespaces of names and of mounts cannot be made here: this needs root"; exit 3; }
umask 022
chmod 755 "$folder" # munge wants a folder that nobody else may write
mkdir -p "$folder"/state "$folder"/node1 "$folder"/node2
ports=($(python3 - <<'PYTHON'
import random
import socket

def free():
    """A port on which nobody listens, below those that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as server:
            try:
                server.bind(("", port))
            except OSError:
                continue
            return port

print(*{free() for _ in range(4)})
PYTHON
))

# What is signed is valid for 300 s. cred_expire is how long a job that is queued again waits at least: 120 s by default.
user=$(id -un) cpus=${CPUS:-4} host=$(hostname -s)
cat >"$folder/slurm.conf" <<CONF
ClusterName=one_machine
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
CommunicationParameters=NoInAddrAny
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2

KillWait=30
MinJobAge=600
InactiveLimit=0
SlurmdTimeout=60
GresTypes=gpu
NodeName=node1 NodeAddr=127.0.0.1 CPUs=$cpus Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.2 CPUs=$cpus Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=10 DefaultTime=10 State=UP
CONF
cat >"$folder/gres.conf" <<CONF
NodeName=node[1-2] Name=gpu File=/dev/null
NodeName=node[1-2] Name=gpu File=/dev/zero
CONF
export SLURM_CONF=$folder/slurm.conf

# In the foreground, in sessions of their own: signals of a terminal do not reach them.
start() {
    local name=$1
    shift
    SLURM_OF_ONE_MACHINE=$folder setsid "$@" >"$folder/$name.out" 2>&1 </dev/null &
}
head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
start munged munged --foreground --force --num-threads=2 --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
# until a command succeeds, at most so many tenths of a second
within() {
    local left=$1
    shift
    until "$@" >/dev/null 2>&1; do
        ((left--)) || return 1
        sleep 0.1
    done
}
within 100 test -S "$folder/munge.socket" || fail "munged did not open its socket"
start slurmctld slurmctld -D
{ cat /etc/hosts && echo 127.0.0.1 node1 && echo 127.0.0.2 node2; } >"$folder/hosts"
for node in node1 node2; do
    start "slurmd-$node" unshare --mount --uts sh -c 'mount --bind "$1" /etc/hosts && hostname "$2" && exec slurmd -D' \
        sh "$folder/hosts" $node
done
both_idle() { [[ $(timeout 5 sinfo --noheader --states=idle --responding --format=%D) == 2 ]]; }
within 300 both_idle || fail "the two nodes did not become idle: $(timeout 5 sinfo 2>&1 || true)"
