"""The front process of `titan_dit train`: the number of ranks and the launcher's options."""

import os
import subprocess
import sys

import pytest
from commands import ROOT

from titan_dit import __main__
from titan_dit.commands import flag_advice, flags, train
from titan_dit.config.section import UserError, hints_of


class Became(Exception):
    """The arguments of the mocked exec."""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Run `titan_dit train ...`; return (the command line after python -m, the environment)."""

    def run(*words, cores=8, gpus=0, **variables):
        environment = {"HOME": str(tmp_path)} | variables
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(train, "num_cores", lambda: cores)
        monkeypatch.setattr(train, "num_gpus", lambda environment: gpus)
        monkeypatch.setattr(sys, "argv", ["titan_dit", "train", *words])

        def execv(path, command):
            assert [path, "-m"] == [sys.executable, command[1]]
            raise Became(command[2:])

        monkeypatch.setattr(os, "execv", execv)
        with pytest.raises(Became) as became:
            __main__.main()
        return became.value.args[0], environment

    return run


def after(command, option):
    return command[command.index(option) + 1]


@pytest.mark.parametrize(
    ("machine", "ranks", "threads"),
    [
        ({"gpus": 4, "cores": 32}, "4", "8"),
        ({"gpus": 0, "cores": 32}, "2", "16"),
        ({"gpus": 0, "cores": 1}, "1", "1"),
        ({"gpus": 8, "cores": 4}, "8", "1"),
        ({"gpus": 4, "cores": 32, "NGPU": "2"}, "2", "16"),
        ({"cores": 8, "NGPU": "", "OMP_NUM_THREADS": ""}, "2", "4"),
        # Threads of a rank say nothing about the number of ranks.
        ({"cores": 8, "OMP_NUM_THREADS": "1"}, "2", "1"),
    ],
)
def test_ranks_and_their_threads_fit_the_machine(start, machine, ranks, threads):
    command, environment = start("--config", "digits", **machine)
    assert command[:2] == ["titan_dit.launcher.launch", "--standalone"]
    assert after(command, "--nproc-per-node") == ranks
    assert after(command, "--max-restarts") == "0"
    assert command[-5:] == ["-m", "--", "titan_dit.train", "--config", "digits"]
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_several_nodes_meet_as_the_variables_say(start, capsys):
    where = {"NNODES": "4", "RDZV_ENDPOINT": "node1:29500"}
    command, _ = start(**where)
    assert after(command, "--nnodes") == "4"
    assert after(command, "--rdzv-endpoint") == "node1:29500"
    assert after(command, "--rdzv-id") == "titan_dit"
    assert after(command, "--rdzv-conf") == train.QUICK
    assert after(command, "--max-restarts") == "0"
    assert capsys.readouterr().err == "titan_dit: rendezvous of 4 nodes at node1:29500\n"
    command, _ = start(**where | {"NNODES": "2:4", "RDZV_ID": "run", "RDZV_CONF": "timeout=9"})
    assert after(command, "--rdzv-id") == "run"
    assert after(command, "--rdzv-conf") == "timeout=9"
    assert after(command, "--max-restarts") == "10"
    command, _ = start(**where | {"NNODES": "2:4", "MAX_RESTARTS": "3"})
    assert after(command, "--max-restarts") == "3"
    for nodes, timing in (("2:4", train.QUICK), ("2:5", train.CALM), ("1250", train.CALM)):
        command, _ = start(**where | {"NNODES": nodes})
        assert after(command, "--rdzv-conf") == timing
    command, _ = start(NNODES="1", RDZV_ENDPOINT="node1:29500")
    assert "--standalone" in command


def test_nodes_meet_though_nobody_reads_it(start, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        command, _ = start(NNODES="2", RDZV_ENDPOINT="node1:29500")
    assert command[0] == "titan_dit.launcher.launch"


@pytest.mark.parametrize("words", [("--dry-run",), ("--dry-run=3",), ("--dry_run", "3")])
def test_a_dry_run_starts_no_ranks(start, words):
    command, environment = start("--config", "digits", *words)
    assert command == ["titan_dit.train", "--config", "digits", *words]
    assert "OMP_NUM_THREADS" not in environment


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NGPU": "all"}, "NGPU=all: set the number"),
        ({"NGPU": "0"}, "NGPU=0: set the number"),
        ({"NGPU": "-1"}, "NGPU=-1: set the number"),
        ({"NGPU": "1.5"}, "NGPU=1.5: set the number"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS=many: set a number of restarts"),
        ({"GRACE": "5m"}, "GRACE=5m: set seconds such as GRACE=600"),
        ({"STOPPED_CODE": "-1"}, "STOPPED_CODE=-1: set an exit code"),
        ({"NNODES": "2"}, "NNODES=2: set RDZV_ENDPOINT=host:port"),
        ({"NNODES": "2-4", "RDZV_ENDPOINT": "a:1"}, "NNODES=2-4: set a number of nodes"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_answered_in_words(monkeypatch, variables, words):
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(UserError, match=words):
        train.main([])


def test_numbers_are_accepted_and_empty_ones_are_not_set(start):
    command, _ = start(GRACE="0.5", STOPPED_CODE="75", MAX_RESTARTS="0")
    assert after(command, "--max-restarts") == "0"
    command, _ = start(GRACE="", STOPPED_CODE="", MAX_RESTARTS="")
    assert after(command, "--max-restarts") == "0"


def test_compiled_code_is_kept_among_the_users_caches_if_there_are_any(start, tmp_path):
    name = "TORCHINDUCTOR_CACHE_DIR"
    assert start()[1][name] == str(tmp_path / ".cache" / "titan_dit" / "inductor")
    caches = tmp_path / "caches"
    assert start(XDG_CACHE_HOME=str(caches))[1][name] == str(caches / "titan_dit" / "inductor")
    assert (caches / "titan_dit").is_dir()
    assert start(**{name: "/scratch"})[1][name] == "/scratch"
    (tmp_path / "file").touch()
    assert name not in start(XDG_CACHE_HOME=str(tmp_path / "file"))[1]
    assert name not in start(HOME="")[1]


NVIDIA_SMI = """#!/bin/sh
if [ -f broken ]; then echo 'NVIDIA-SMI has failed'; exit 9; fi
echo 'GPU 0: NVIDIA X (UUID: GPU-1)'
echo '  MIG 1g.5gb Device 0: (UUID: MIG-1)'
echo 'GPU 1: NVIDIA X (UUID: GPU-2)'
"""


def test_gpus_are_those_of_the_driver_that_are_visible(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    assert train.num_gpus({}) == 2
    assert train.num_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert train.num_gpus({"CUDA_VISIBLE_DEVICES": "0,1,"}) == 2
    assert train.num_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    (tmp_path / "broken").touch()
    assert train.num_gpus({}) == 0
    assert train.num_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def test_the_front_process_imports_nothing_heavy():
    """It runs before every launch: only the ranks import torch, tyro and the config."""
    code = (
        "import os, sys\n"
        "def execv(*_): print(*sys.modules); raise SystemExit\n"
        "os.execv, sys.argv = execv, ['titan_dit', 'train']\n"
        "from titan_dit import __main__\n"
        "__main__.main()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "titan_dit.commands.train" in modules
    assert not modules & {"torch", "tyro", "tomli", "numpy", "titan_dit.config.job"}


def test_flags_of_commands_import_no_torch():
    """Help and wrong flags are answered at once."""
    code = "import sys, titan_dit.__main__, titan_dit.commands.flags; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "numpy"}


@pytest.mark.parametrize("command", [name for name in __main__.COMMANDS if name != "train"])
def test_every_command_has_a_help_that_names_its_flags(monkeypatch, capsys, command):
    monkeypatch.setattr("sys.argv", ["titan_dit", *command.split(), "--help"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for flag in flag_advice.flags_of(hints_of(flags.of_command(command))):
        assert f"--{flag}" in shown


def test_importing_titan_dit_is_instant_and_offers_load():
    code = "import sys, titan_dit; print('torch' in sys.modules, titan_dit.load.__module__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["False", "titan_dit.trained_model"], found.stderr
