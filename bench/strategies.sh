#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Strategies against each other: measures a table for adaptive, then all of them in turns, for 2, 4 and 8
# ranks. shm on one host; gloo and mpi as if half of the ranks were on another. bench/strategies.sh [BUILD] [SECONDS]
set -eu
build=${1:-build} seconds=${2:-0.5}
lockstep=$(realpath "$build/bin/lockstep")
root=""
[ "$(id -u)" != 0 ] || root=--allow-run-as-root
XDG_CACHE_HOME=$(mktemp -d)
export XDG_CACHE_HOME
trap 'rm -r "$XDG_CACHE_HOME"' EXIT
sizes=1024,4096,16384,65536,262144,1048576,4194304,16777216,67108864,268435456

for ranks in 2 4 8; do
  for run in "--calibrate" "--strategy all"; do
    # shellcheck disable=SC2086  # several words
    "$lockstep" bench collectives -n $ranks --ops all_reduce --bytes $sizes --seconds "$seconds" $run
    [ $ranks != 2 ] || continue
    # shellcheck disable=SC2086,SC2016
    "$lockstep" run -n $ranks sh -c 'LOCKSTEP_HOST=host$((2 * RANK / WORLD_SIZE)) GLOO_SOCKET_IFNAME=lo exec "$@"' sh \
      "$lockstep" bench collectives --backends gloo --ops all_reduce --bytes $sizes --seconds "$seconds" $run
    # shellcheck disable=SC2086,SC2016
    mpirun $root --oversubscribe --bind-to none -n $ranks sh -c \
      'LOCKSTEP_HOST=host$((2 * OMPI_COMM_WORLD_RANK / OMPI_COMM_WORLD_SIZE)) exec "$@"' sh \
      "$lockstep" bench collectives --backends mpi --ops all_reduce --bytes $sizes --seconds "$seconds" $run
  done
done
