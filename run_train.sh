#!/usr/bin/env bash
# Train: ./run_train.sh --config digits.toml [--section.key value ...]   (--help lists the keys)
#        ./run_train.sh --config dit_7b.toml --dry-run [WORLD]   one step without devices
#
#   NGPU           ranks on this node (default: its GPUs; without one, 2 ranks on the CPU)
#   NNODES         nodes, "4" or elastic "2:4"; with RDZV_ENDPOINT=host:port and the same RDZV_ID
#   MAX_RESTARTS   restarts from the newest checkpoint after a rank has died (default 0; elastic 10)
#   GRACE          seconds that ranks have to save and end after SIGTERM, SIGUSR1, Ctrl-C (600)
#   TORCHINDUCTOR_CACHE_DIR   where compiled code is kept (~/.cache/titan_dit/inductor)
#   STOPPED_CODE   exit code when they did, with steps left (0); Ctrl-C's is 130
# docs/launching.md: several nodes, Slurm, Kubernetes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment

for argument in "$@"; do
    case $argument in
        # One process plays every rank in turn.
        --dry-run | --dry-run=* | --dry_run | --dry_run=*) exec "$python" -m titan_dit.train "$@" ;;
    esac
done

cores=$(nproc 2>/dev/null || echo 2)
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
fi
ngpu=${NGPU:-$((gpus > 0 ? gpus : cores > 1 ? 2 : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ngpu ? cores / ngpu : 1))}
# When one node ends first, torch's C++ side tells the others' consoles in thirty lines of frames.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# What torch.compile has compiled serves the next launch too, if the machine keeps the folder.
caches=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
if [ -z "${TORCHINDUCTOR_CACHE_DIR:-}" ] && [ -n "$caches" ] && mkdir -p "$caches/titan_dit" 2>/dev/null; then
    export TORCHINDUCTOR_CACHE_DIR=$caches/titan_dit/inductor
fi

meeting=(--standalone) restarts=0
if [ -n "${NNODES:-}" ] && [ "$NNODES" != 1 ]; then
    # A lost node is given up after 4 s without a heartbeat, and those that are there wait 3 s for
    # others. torchrun's own 15 s and 30 s are for thousands of nodes.
    conf=${RDZV_CONF:-last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4}
    case $NNODES in *:*) restarts=10 ;; esac # Losing a node is a failure of the ranks that stay.
    meeting=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${RDZV_ID:-titan_dit}" --rdzv-conf "$conf"
        --rdzv-endpoint "${RDZV_ENDPOINT:?set RDZV_ENDPOINT=host:port of one node}")
    say "meeting $NNODES nodes at $RDZV_ENDPOINT"
fi
exec "$python" -m titan_dit.launch "${meeting[@]}" --nproc-per-node "$ngpu" \
    --max-restarts "${MAX_RESTARTS:-$restarts}" -m titan_dit.train "$@"
