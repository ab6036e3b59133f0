#!/usr/bin/env bash
# One process of a job on a slice of Cloud TPUs; run it on each host, with the arguments of jddp.train:
#
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker all \
#     --command "cd jddp && . .venv/bin/activate && scripts/tpu_vm.sh --config my.yaml run.dir=gs://BUCKET/mine"
#
# It asks the metadata server for the number of this host and the names of all. GKE sets both
# variables itself: run `python -m jddp.train` there.
set -euo pipefail

ask() {
  curl --silent --fail --header "Metadata-Flavor: Google" \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

# An endpoint is a host, or name:number:host.
export TPU_WORKER_ID="${TPU_WORKER_ID:-$(ask agent-worker-number)}"
if [ -z "${TPU_WORKER_HOSTNAMES:-}" ]; then
  hosts="$(ask worker-network-endpoints | tr , '\n' | sed 's/.*://' | paste -sd, -)"
  export TPU_WORKER_HOSTNAMES="$hosts"
fi
exec python -m jddp.train "$@"
