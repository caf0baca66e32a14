#!/usr/bin/env bash
# Set up and run the whole test suite: ./run_tests.sh [pytest's options]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# One thread a rank: the tests start up to four ranks on as little as two cores.
export OMP_NUM_THREADS=1
exec "$python" -m pytest "$@"
