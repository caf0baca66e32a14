#!/usr/bin/env bash
# Train: ./run_train.sh --config digits.toml [--section.key value ...]   (--help lists the keys)
#        ./run_train.sh --config dit_7b.toml --dry-run [WORLD]   one step without devices
#
# `titan_dit train` in a Python environment that is found or made. The variables that it reads (NGPU,
# NNODES, MAX_RESTARTS, ...) stand in titan_dit/commands/train.py and docs/launching.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment
exec "$python" -m titan_dit train "$@"
