#!/usr/bin/env bash
# Set up and run the tests: ./run_tests.sh [--fast | --long | pytest's options]
#
#   (nothing)   the suite that a change must pass
#   --fast      tests without ranks, commands or the compiler: two minutes
#   --long      additional tests before a release: tutorials, the full grid of layouts, chaos,
#               planted bugs; appends the results to docs/notes/long.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment dev
cd "$root"
# One thread per rank: tests start up to eight ranks, perhaps on two cores.
export OMP_NUM_THREADS=1
# Keep bytecode: many processes import the same modules.
export PYTHONDONTWRITEBYTECODE=

# Run a command and append its last line of output to docs/notes/long.md.
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
    say "$1 takes no other options. For the long tests of one file: ./run_tests.sh FILE --long"
    exit 2
fi
case ${1:-} in
    "")
        # In one process: ranks use all cores, and some tests measure time.
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
