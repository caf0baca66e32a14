# Sourced by run_train.sh, run_tests.sh and the Makefile: finds or makes the Python environment.
#
#   use_environment        sets $python to a Python in which titan_dit's needs are met
#   use_environment dev    the same with the tools for tests and checks
#
# An active environment (virtualenv, conda, a container's own Python) is used where it has what
# pyproject.toml asks for. Otherwise .venv in the clone is made once, from the lock files.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'titan_dit: %s\n' "$*" >&2; }

use_environment() {
    local locks=(requirements.lock) extra=${1:-}
    [ "$extra" = dev ] && locks+=(requirements-dev.lock)
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

    python=$root/.venv/bin/python
    local active
    active=$(command -v python3 || command -v python || true)
    if [ -n "$active" ] && [ "$active" != "$python" ] &&
        "$active" "$root/scripts/needs.py" $extra; then
        python=$active
        say "using the active environment, $active"
        return
    fi

    local wanted stamp=$root/.venv/.made_from
    wanted=$(cd "$root" && cat "${locks[@]}")
    if [ -x "$python" ] && [ -f "$stamp" ]; then
        case "$(cat "$stamp")" in "$wanted"*) return ;; esac
    fi
    make_environment "$stamp" "$wanted"
}

make_environment() {
    local stamp=$1 wanted=$2 base
    base=$(find_python)
    if [ ! -x "$python" ]; then
        say "making .venv with $("$base" --version), once; nothing outside the clone is touched"
        "$base" -m venv "$root/.venv"
    fi
    say "installing ${locks[*]} into .venv (half a minute where torch is a CPU build):"
    # -v names what is being fetched; the rest of pip's chatter is left out.
    (cd "$root" && "$python" -m pip install --disable-pip-version-check --progress-bar off \
        "${locks[@]/#/-r}") | sed -un 's/^Collecting \([^ ]*\).*/  \1/p' >&2
    # Makes `python -m titan_dit` work from any folder, as an editable install would.
    echo "$root" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/titan_dit.pth"
    printf '%s\n' "$wanted" >"$stamp"
    say "done"
}

find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    say "no Python of 3.11 or newer found. Install one, or activate an environment that has it."
    exit 1
}
