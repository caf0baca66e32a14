#!/usr/bin/env bash
# Train: ./run_train.sh --config digits.toml [--section.key value ...]   (--help lists the keys,
#                                                                            --list the recipes)
#        ./run_train.sh --config dit_7b.toml --dry-run [WORLD]   memory and traffic, without devices
#
# Finds or makes a Python environment, then runs `titan_dit train`. titan_dit/commands/train.py and
# docs/launching.md list the environment variables (NGPU, NNODES, MAX_RESTARTS, ...).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment
exec "$python" -m titan_dit train "$@"
