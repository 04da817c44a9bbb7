#!/bin/bash
# End the SLURM that slurm_up.sh has started in FOLDER, its jobs first. Fails where a process is left after 20 seconds.
set -eu
folder=$(cd "$1" && pwd)
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin

# Its daemons and those of its steps, by a variable that slurm_up.sh gives them; tasks of its jobs, by the variables of both.
# A shell that has exported SLURM_CONF is none of these.
ours() {
    local process names
    for process in /proc/[0-9]*; do
        names=$(tr '\0' '\n' 2>/dev/null <"$process/environ" |
            grep -xF -e "SLURM_OF_ONE_MACHINE=$folder" -e "SLURM_CONF=$SLURM_CONF" -e "SLURMD_NODENAME=node1" \
                -e "SLURMD_NODENAME=node2") || continue
        if [[ $names == *SLURM_OF_ONE_MACHINE* || ($names == *SLURM_CONF* && $names == *SLURMD_NODENAME*) ]]; then
            echo "${process#/proc/}"
        fi
    done
}
wait_for_none() {
    local left=$1
    while [[ -n $(ours) ]]; do
        ((left--)) || return 1
        sleep 0.2
    done
}

timeout 5 scancel --user="$(id -un)" >/dev/null 2>&1 || true
for signal in TERM KILL; do
    processes=$(ours)
    [[ -n $processes ]] || exit 0
    kill -$signal $processes 2>/dev/null || true
    if wait_for_none 50; then exit 0; fi
done
echo "slurm_down: processes are left: $(ours | tr '\n' ' ')" >&2
exit 1
