#!/usr/bin/env bash
# Set up and run the tests: ./run_tests.sh [--fast | --long | pytest's options]
#
#   (nothing)   what decides whether a change lands
#   --fast      what starts no ranks, no commands and no compiler: two minutes
#   --long      what a release wants: tutorials, whole grids, chaos, planted bugs; written down in
#               docs/notes/long.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# One thread a rank: the tests start up to eight ranks on as little as two cores.
export OMP_NUM_THREADS=1
status=0
case ${1:-} in
    "")
        # Two at a time; then those that measure time, with nothing beside them.
        "$python" -m pytest -n 2 --dist loadfile -m "not alone" || status=$?
        mapfile -t files < <(grep -rlE "mark\.alone" tests --include="test_*.py")
        "$python" -m pytest -m alone "${files[@]}" || status=$?
        ;;
    --fast)
        "$python" -m pytest -n 2 -m "not (ranks or process or compiler or alone)" || status=$?
        ;;
    --long)
        "$python" -m pytest --long -m long --record docs/notes/long.md || status=$?
        "$python" scripts/plant.py --record docs/notes/long.md || status=$?
        ;;
    *) exec "$python" -m pytest "$@" ;;
esac
exit "$status"
