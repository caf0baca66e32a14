# Activate the environment that run_train.sh uses: source scripts/activate.sh
#
# `python -m titan_dit` then works in this shell, from any folder. For bash and zsh.

titan_dit_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
if titan_dit_python=$(bash -euc 'source "$1/scripts/environment.sh"; use_environment; echo "$python"' \
    bash "$titan_dit_root"); then
    if [ "$titan_dit_python" = "$titan_dit_root/.venv/bin/python" ]; then
        source "$titan_dit_root/.venv/bin/activate"
    else
        export PYTHONPATH="$titan_dit_root${PYTHONPATH:+:$PYTHONPATH}"
    fi
fi
unset titan_dit_root titan_dit_python
