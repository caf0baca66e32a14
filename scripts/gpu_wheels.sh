#!/usr/bin/env bash
# Fetch what a machine with torch alone lacks, on one with a network: scripts/gpu_wheels.sh [PYTHON]
#
#   scripts/gpu_wheels.sh         wheels for Python 3.12 on Linux x86-64 into benchmarks/wheels
#   scripts/gpu_wheels.sh 3.11    the same for another Python
#
# In the versions of the lock files, without what they depend on: torch brings the rest. Copy the
# checkout with this folder; scripts/first_gpu.sh installs them there. See docs/gpu.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Of the package: torchao torchdata tomli tyro docstring_parser typeguard jaxtyping wadler_lindig.
# Of the tests: the others.
names='torchao|torchdata|tomli|tyro|docstring_parser|typeguard|jaxtyping|wadler_lindig'
names+='|beartype|pytest|pytest-timeout|pytest-xdist|execnet|iniconfig|pluggy'
wheels=$root/benchmarks/wheels
version=${1:-3.12}
if ! [[ $version =~ ^3\.1[1-9]$ ]]; then
    say "scripts/gpu_wheels.sh $version: give a Python from 3.11, such as 3.12."
    exit 2
fi
python=$(find_python)
mapfile -t pinned < <(grep -hxE "($names)==.*" "$root"/requirements.lock "$root"/requirements-dev.lock)
platforms=(--platform any)
for tag in manylinux_2_{28,27,24,17,12,5} manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
# Two versions of a package would both be installed.
rm -f "$wheels"/*.whl
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp "${platforms[@]}" -d "$wheels" "${pinned[@]}"
say "$(ls "$wheels"/*.whl | wc -l) wheels for Python $version, $(du -ch "$wheels"/*.whl | tail -n 1 | cut -f 1), in benchmarks/wheels"
