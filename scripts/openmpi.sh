#!/usr/bin/env bash
# Trains on several machines with Open MPI, version 4 or 5, one process for each GPU.
#
# What to change, by variables; the file stays as it is:
#   HOSTS: a file that lists the machines
#   PER_HOST: processes on each, one for each of its GPUs
#   NETWORK: the network between them, where they have several
#
#   scripts/openmpi.sh --config my.yaml run.dir=/shared/runs/mine
#   HOSTS=my_hosts PER_HOST=4 NETWORK=10.0.0.0/24 scripts/openmpi.sh data.global_batch_size=1024
#
# The arguments are those of `python -m jddp.train`. To be run on one of the machines, or on one
# that reaches all of them by ssh without a password. All see the same files: this folder, Python,
# and the run directory. The same command again resumes from the last checkpoint.
set -euo pipefail

# A file with a line for each machine: its name, as all machines know it, and its GPUs.
#   node-0 slots=8
#   node-1 slots=8
hosts="${HOSTS:-hosts}"
# Processes on each: as many as it has GPUs, which they share evenly.
per_host="${PER_HOST:-8}"
# The network between the machines, as 10.0.0.0/24 or the name of an interface, where they have
# others too, such as those of containers. The libraries that reduce gradients are set separately:
# NCCL by NCCL_SOCKET_IFNAME, and gloo, on CPUs, takes the address that a machine's name resolves to.
network="${NETWORK:-}"

options=(
  --hostfile "$hosts"
  --map-by "ppr:$per_host:node"
  # Or each process is kept to one core, with all its threads and all that read its data.
  --bind-to none
  # A machine out of reach ends the job after 10 + 3 x 5 seconds, and not after many minutes.
  --mca oob_tcp_keepalive_time 10
  --mca oob_tcp_keepalive_intvl 5
  --mca oob_tcp_keepalive_probes 3
  # After SIGTERM or Ctrl-C mpirun waits so many seconds, hands it on, waits as long again and kills:
  # time for a step and a save, where there would be one second. It also waits when one has failed.
  --mca odls_base_sigkill_timeout 10
)
if [ -n "$network" ]; then
  options+=(--mca oob_tcp_if_include "$network")
fi

# Process 0 is here, if `hostname` is one of the machines, and is found. Else it is on the first.
first="$(awk -v here="$(hostname)" '
  /^#/ || !NF { next }
  !first { first = $1 }
  $1 == here { first = ""; exit }
  END { print first }
' "$hosts")"
if [ -n "$first" ]; then
  export JAX_COORDINATOR_ADDRESS="${JAX_COORDINATOR_ADDRESS:-$first:$((61440 + $$ % 4096))}"
fi

# ssh passes no variables. Those that jddp and its libraries read are passed here; set none of
# XLA's or NCCL's to begin with, and XLA aborts at a flag that it does not know.
for name in $(compgen -e); do
  case "$name" in
    PATH | PYTHONPATH | LD_LIBRARY_PATH | XDG_CACHE_HOME) options+=(-x "$name") ;;
    JAX_* | JDDP_* | XLA_* | NCCL_*) options+=(-x "$name") ;;
  esac
done

exec mpirun "${options[@]}" python -m jddp.train "$@"
