#!/usr/bin/env bash
# Run the tests with another torch: scripts/with_torch.sh VERSION [what run_tests.sh takes]
#
#   scripts/with_torch.sh 2.11.0                          the suite
#   scripts/with_torch.sh 2.15.0 tests/parallel -k remat  what pytest's options choose
#   scripts/with_torch.sh 2.15.0 python FILE ...          a script instead of tests
#
# The environment, .venv-VERSION in the clone, is made once from the lock files with this torch in
# place of theirs. pip's own builds are for CUDA and run on a CPU: a download of several GB, about
# 6 GB on the disk. docs/torch-versions.md lists what differs between versions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

version=${1:-}
if ! [[ $version =~ ^2\.1[1-5]\.(0|[1-9][0-9]*)$ ]]; then
    say "scripts/with_torch.sh ${version:-(no version)}: give an exact version from 2.11 to 2.15, such as 2.11.0."
    exit 2
fi
shift
use_torch "$version"
# run_tests.sh would fall back to .venv, which has another torch.
"$python" "$root/scripts/needs.py" dev || {
    say "${venv##*/} does not meet pyproject.toml. Remove it (rm -r $venv) and run the same command again."
    exit 1
}
export PATH="$venv/bin:$PATH"
if [ "${1:-}" = python ]; then
    exec "$@"
fi
exec "$root/run_tests.sh" "$@"
