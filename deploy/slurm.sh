#!/bin/bash
# One sweep on several nodes of a SLURM cluster: sbatch deploy/slurm.sh ablations/lora_rank --seeds 0,1,2
# If the time limit or a node failure ends the job, SLURM runs it again, and the sweep is resumed (docs/cluster.md).
#SBATCH --job-name=fedsweep
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fedsweep-%j.log

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # on storage that all nodes share, because the results are written to mlruns/
source "${FEDSWEEP_ENV:-$HOME/fedsweep-env}/bin/activate"

# Other users can reach these nodes over the network. The job has its own token, in a file that only you can read, so
# that they cannot use its Ray cluster. --exclusive keeps their jobs off the nodes.
umask 077
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SLURM_SUBMIT_DIR/.ray_token_$SLURM_JOB_ID"
python -c "import secrets; print(secrets.token_hex(32), end='')" > "$RAY_AUTH_TOKEN_PATH"
export FEDSWEEP_CACHE="${TMPDIR:-/tmp}/fedsweep_$SLURM_JOB_ID"
export RAY_TMPDIR="${TMPDIR:-/tmp}" RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 20000))
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{ print $1 }')
started=()

start_ray() { # a job step that lasts as long as Ray runs on its nodes
    srun --overlap --kill-on-bad-exit=0 "$@" --block &
    started+=($!)
}
finish() {
    kill "${started[@]}" 2> /dev/null || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap finish EXIT

cpus=$SLURM_CPUS_PER_TASK
start_ray --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --include-dashboard=false
until ray health-check --address "$address:$port" > /dev/null 2>&1; do sleep 2; done
if ((${#nodes[@]} > 1)); then
    start_ray --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="$head" \
        ray start --address="$address:$port" --num-cpus="$cpus"
fi
python - "$address:$port" "${#nodes[@]}" << 'END'
import logging, sys, time
import ray

ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)
END

# fedsweep writes the id of the job's sweep to a file. After a restart, the job resumes this sweep, whatever other jobs
# have started since. If the job ended before it had a sweep, it starts one.
begun=".fedsweep_job_$SLURM_JOB_ID"
restarts=${SLURM_RESTART_COUNT:-0}
arguments=("$@")
if ((restarts > 0)) && [[ -s $begun ]]; then
    arguments=()
    while (($#)); do
        case $1 in
            --fresh | --resume | --sweep=*) ;;
            --sweep) shift ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
    arguments+=(--resume --sweep "$(< "$begun")")
else
    rm -f "$begun"
fi

# The sweep runs in the background, so that SLURM's signals reach this script, which then ends the sweep as with Ctrl-C.
# Without job control (-m), bash would start the sweep with interrupts ignored.
set -m
limit=no
asked=no told=no
before=${!:-none}
stop() { # a signal can also arrive before the sweep has started
    asked=yes
    if [[ ${!:-none} != "$before" ]]; then
        told=yes
        kill -TERM "$!"
    fi
}
trap 'limit=yes; stop' INT # SLURM's warning before the time limit
trap stop TERM # scancel
fedsweep tune "${arguments[@]}" --id-file "$begun" --address "$address:$port" &
sweep=$!
if [[ $asked == yes && $told == no ]]; then
    kill -TERM "$sweep" 2> /dev/null || true
fi
code=0
wait "$sweep" || code=$?
while kill -0 "$sweep" 2> /dev/null; do # the signal ended the first wait, but the sweep is still running
    code=0
    wait "$sweep" || code=$?
done
if [[ $limit == yes && $code == 143 ]] && ((restarts < 100)); then # trials are left to run
    finish
    scontrol requeue "$SLURM_JOB_ID"
else
    rm -f "$begun"
fi
exit "$code"
