#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The tables of docs/performance/collectives.md: Lockstep and its peers, one after the other. bench/collectives.sh [RANKS] [BUILD]
set -eu
ranks=${1:-2} build=${2:-build}
root=""
[ "$(id -u)" != 0 ] || root=--allow-run-as-root
sizes="4096,65536,4194304,67108864"
bind=core
[ "$ranks" -le "$(nproc)" ] || bind=none

"$build/bin/lockstep" bench collectives -n "$ranks" --backends shm,mpi,gloo --ops all_reduce --bytes "$sizes"
"$build/bin/lockstep" bench collectives -n "$ranks" --backends shm,mpi \
  --ops all_gather,reduce_scatter,broadcast,all_to_all,send_recv --bytes 65536,4194304,67108864
# shellcheck disable=SC2086  # nothing, or one option
mpirun $root --oversubscribe --bind-to "$bind" -n "$ranks" "$build/bin/raw_mpi" $(echo "$sizes" | tr , ' ')
for python in python3 /usr/bin/python3; do
  if "$python" -c "import torch" 2>/dev/null; then
    # shellcheck disable=SC2046
    "$build/bin/lockstep" run -n "$ranks" "$python" bench/torch_gloo.py $(echo "$sizes" | tr , ' ')
    break
  fi
done
