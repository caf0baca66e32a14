#!/usr/bin/env bash
# Everything that a first GPU can tell, in one call of under 10 minutes: scripts/first_gpu.sh
#
#   scripts/first_gpu.sh                    tests, a trained model, the benchmark; a summary
#   scripts/first_gpu.sh --tiny             rehearse it on any machine; its figures mean nothing
#   scripts/first_gpu.sh --parts tests gpu  some parts alone, after a fault was fixed
#
# Needs a Python with torch ($PYTHON, python3) and the wheels of scripts/gpu_wheels.sh; no network, no
# .git (set TITAN_DIT_COMMIT then). What is to be kept is in $OUT or outputs/first_gpu/results.
# See docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" scripts/first_gpu.py "$@"
