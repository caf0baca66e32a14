#!/usr/bin/env bash
# Train: ./run_train.sh --config digits.toml [--section.key value ...]   (--help lists the keys)
#        ./run_train.sh --config dit_7b.toml --dry-run [WORLD]   one step without devices
#
#   NGPU           ranks on this node (default: its GPUs; without one, 2 ranks on the CPU)
#   NNODES         nodes, "4" or elastic "2:4"; with RDZV_ENDPOINT=host:port and the same RDZV_ID
#   MAX_RESTARTS   restarts from the newest checkpoint after a rank has died (default 0)
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

meeting=(--standalone)
if [ -n "${NNODES:-}" ] && [ "$NNODES" != 1 ]; then
    meeting=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${RDZV_ID:-titan_dit}"
        --rdzv-endpoint "${RDZV_ENDPOINT:?set RDZV_ENDPOINT=host:port of one node}")
    say "meeting $NNODES nodes at $RDZV_ENDPOINT"
fi
exec "$python" -m titan_dit.launch "${meeting[@]}" --nproc-per-node "$ngpu" \
    --max-restarts "${MAX_RESTARTS:-0}" -m titan_dit.train "$@"
