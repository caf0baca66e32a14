#!/usr/bin/env bash
# Set up and run the tests: ./run_tests.sh [--fast | --long | pytest's options]
#
#   (nothing)   what decides whether a change lands
#   --fast      what starts no ranks, no commands and no compiler: two minutes
#   --long      what a release wants besides: tutorials, whole grids, chaos, planted bugs; the
#               results are added to docs/notes/long.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# One thread a rank: the tests start up to eight ranks on as little as two cores.
export OMP_NUM_THREADS=1
# Many processes import the same modules: their bytecode is kept.
export PYTHONDONTWRITEBYTECODE=

# Run a command, and write down the last line that it prints.
record() {
    local what=$1 status=0 result
    shift
    result=$("$@" | tee /dev/stderr | tail -n 1) || status=$?
    git diff --quiet HEAD -- . ":!docs/notes" || what="$what, with uncommitted changes"
    printf '| %s | %s | %s | %s |\n' "$(date -u +%F)" "$(git rev-parse --short HEAD)" "$what" "$result" \
        >>docs/notes/long.md
    return $status
}

status=0
case ${1:-} in
    "")
        # Two at a time; then those that measure time, with nothing beside them.
        "$python" -m pytest -n 2 --dist loadfile -m "not alone" || status=$?
        mapfile -t files < <(grep -rl "mark\.alone" tests --include="test_*.py")
        "$python" -m pytest -m alone "${files[@]}" || status=$?
        ;;
    --fast)
        "$python" -m pytest -n 2 -m "not (ranks or process or compiler or alone)" || status=$?
        ;;
    --long)
        record "tests marked long" "$python" -m pytest --long -m long || status=$?
        record "planted bugs" "$python" scripts/plant.py || status=$?
        ;;
    *) exec "$python" -m pytest "$@" ;;
esac
exit "$status"
