#!/usr/bin/env bash
# Set up and run the whole test suite, or what pytest's options choose: ./run_tests.sh [options]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# One thread a rank: the tests start up to eight ranks on as little as two cores.
export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
# Two at a time; then those that measure time, with nothing beside them.
status=0
"$python" -m pytest -n 2 --dist loadfile -m "not alone" || status=$?
"$python" -m pytest -m alone || status=$?
exit "$status"
