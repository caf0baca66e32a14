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
    result=$("$@" | tee >(cat >&2) | tail -n 1) || status=$?
    [ -z "$(git status --porcelain -- . ":!docs/notes")" ] || what="$what, with uncommitted changes"
    printf '| %s | %s | %s | %s |\n' "$(date -u +%F)" "$(git rev-parse --short HEAD)" "$what" "$result" \
        >>docs/notes/long.md
    return $status
}

status=0
if [[ ${1:-} == --fast || ${1:-} == --long ]] && [ $# -gt 1 ]; then
    say "$1 takes no more options; one file's long tests: ./run_tests.sh FILE --long"
    exit 2
fi
case ${1:-} in
    "")
        # One after another: ranks fill the cores, and some tests measure time.
        "$python" -m pytest || status=$?
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
