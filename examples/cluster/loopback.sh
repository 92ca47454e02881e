#!/usr/bin/env bash
# One run in several processes of this machine, connected as they would be over a network:
#
#     examples/cluster/loopback.sh 2 model=llama-tiny output_dir=runs/loopback
#
# The first argument is the number of processes, the others are train.py's. Each process has the
# devices that XLA_FLAGS=--xla_force_host_platform_device_count=N gives a CPU, one without it.
set -euo pipefail

processes=${1:?usage: loopback.sh PROCESSES [key=value ...]}
shift
export JAX_PLATFORMS=cpu
python=${PYTHON:-python}
program=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/train.py
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM # each saves, at the same step
for ((index = 0; index < processes; index++)); do
    "$python" "$program" "$@" "cluster.coordinator=127.0.0.1:$port" \
        "cluster.num_processes=$processes" "cluster.process_id=$index" &
    pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
