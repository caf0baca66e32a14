# Sourced by run_train.sh, run_tests.sh and the Makefile: finds or makes the Python environment.
#
#   use_environment          sets $python to a Python with the dependencies of titan_dit
#   use_environment dev      the same with the tools for tests and checks
#   use_torch 2.11.0         the same as dev, with another torch than the lock file's
#
# The active environment (virtualenv, conda, container) is used if it meets pyproject.toml; what only
# the tests need is added to it. Otherwise .venv is made in the clone, once, from the lock files.
# use_torch makes .venv-2.11.0.
# Every step checks its exit status, because a caller may not use `set -e`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'titan_dit: %s\n' "$*" >&2; }

use_environment() {
    local extra=${1:-} active wanted
    locks=(requirements.lock)
    [ "$extra" = dev ] && locks+=(requirements-dev.lock)
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

    venv=$root/.venv
    python=$venv/bin/python
    active=$(command -v python3 || command -v python || true)
    # The clone's own .venv is checked against the lock files, activated or not.
    if [ -n "$active" ] && [ "$(dirname "$active")" != "$venv/bin" ] &&
        "$active" "$root/scripts/needs.py" ${extra:+--add $extra}; then
        python=$active
        say "using the active environment, $active"
        return 0
    fi

    wanted=$(cd "$root" && cat "${locks[@]}")
    if ! is_made "$wanted"; then
        alone make_environment "$wanted" || exit 1
    fi
}

use_torch() {
    local version=$1 wanted
    locks=(requirements.lock requirements-dev.lock)
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    venv=$root/.venv-$version
    python=$venv/bin/python
    # torch 2.11 needs setuptools<82, the lock has a newer one, and building a wheel needs 77.
    wanted=$(cd "$root" && sed -e "s/^torch==.*/torch==$version/" \
        -e "s/^setuptools==.*/setuptools>=77/" "${locks[@]}")
    if ! is_made "$wanted"; then
        alone make_environment "$wanted" || exit 1
    fi
}

# True if $venv was completed from lock files that start with $1.
is_made() {
    [ -x "$python" ] || return 1
    case "$(cat "$venv/.made_from" 2>/dev/null)" in "$1"*) return 0 ;; *) return 1 ;; esac
}

# Run a command under a lock that all nodes and processes of this clone share.
alone() {
    local lock=$venv.lock status=0 said= failed
    until failed=$(LC_ALL=C mkdir "$lock" 2>&1); do
        case "$failed" in
            *"File exists"*) ;;
            *) say "cannot make ${venv##*/}: ${failed#mkdir: }" && return 1 ;;
        esac
        [ -n "$said" ] || say "another process is making ${venv##*/}; waiting (if the lock is stale: rmdir $lock)"
        said=1
        sleep 2
    done
    trap 'rmdir "$venv.lock" 2>/dev/null' EXIT
    is_made "$2" || "$@" || status=1
    rmdir "$lock"
    trap - EXIT
    return $status
}

# Install the packages listed on stdin. Arguments: more options of pip.
install_packages() {
    "$python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@" \
        -r /dev/stdin | sed -un 's/^Collecting \([^ ]*\).*/  \1/p' >&2
    if [ "${PIPESTATUS[0]}" != 0 ]; then
        explain_failure pip
        return 1
    fi
}

make_environment() {
    local wanted=$1 base packages output
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || return 1
        say "making ${venv##*/} with $("$base" --version); this happens once and changes only the clone"
        rm -rf "$venv"
        output=$("$base" -m venv "$venv" 2>&1) || { explain_failure "python -m venv" "$output"; return 1; }
    fi
    rm -f "$venv/.made_from"
    say "installing ${locks[*]} into ${venv##*/} (half a minute with a CPU build of torch):"
    # Show only the names of the packages that pip collects. Compiling all of their files would take
    # longer than installing them; those that training imports are compiled below.
    # torch_fidelity asks for torchvision, whose build for CUDA does not load beside a CPU build of
    # torch, and then diffusers does not either. What is used of torch_fidelity works without it.
    grep -v '^torch-fidelity' <<<"$wanted" | install_packages || return 1
    if grep -q '^torch-fidelity' <<<"$wanted"; then
        grep '^torch-fidelity' <<<"$wanted" | install_packages --no-deps || return 1
    fi
    # Makes `python -m titan_dit` work from any folder, as an editable install would.
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    echo "$root" >"$packages/titan_dit.pth" || return 1
    say "importing what was installed, once, to check and to compile it"
    PYTHONDONTWRITEBYTECODE= "$python" -c "import titan_dit.preload" || {
        explain_failure "the first import"
        return 1
    }
    printf '%s\n' "$wanted" >"$venv/.made_from" || return 1
    say "done"
}

# explain_failure WHAT [OUTPUT]: the output, or that the disk is full.
explain_failure() {
    local free
    free=$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')
    if [ "${free:-1000}" -lt 200 ]; then
        say "$1 failed: the disk of $root has $free MB left. ${venv##*/} takes 1 GB with a CPU build of torch, 7 GB with a CUDA build. Free some space and run the same command again."
    else
        [ -z "${2:-}" ] || printf '%s\n' "$2" >&2
        say "$1 failed: see its error above. Fix it and run the same command again."
    fi
}

find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    say "found no Python 3.11 or newer. Install one, or activate an environment with it."
    return 1
}
