"""Test ranks and commands that are forked: how they end is seen, and none is left."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
import torch
import torch.distributed as dist
from commands import ROOT, environment
from harness import RankFailed, on_ranks
from preload import MODULES
from running import have_ended

LAST = MODULES[-1]


def about_itself(world):
    number = torch.tensor(float(world.rank + 1))
    dist.all_reduce(number)
    return number.item(), os.environ.get("ASKED"), LAST in sys.modules, os.getppid()


def test_ranks_meet_with_what_they_need_already_imported_and_their_own_environment():
    found = on_ranks(3, about_itself, variables={"ASKED": "yes"})
    assert [(total, asked, ready) for total, asked, ready, _ in found] == [(6.0, "yes", True)] * 3
    # Of the server, not of this process, whose threads and locks they would inherit.
    assert os.getpid() not in {parent for *_, parent in found}
    assert "ASKED" not in os.environ
    [(_, asked, _, _)] = on_ranks(1, about_itself)
    assert asked is None


def test_launches_beside_each_other_do_not_meet():
    forked.context()
    with ThreadPoolExecutor(3) as pool:
        launches = [pool.submit(on_ranks, 2, about_itself) for _ in range(3)]
        assert all(launch.result()[0][0] == 3.0 for launch in launches)


def ends_badly(world, how, folder):
    (folder / str(world.rank)).write_text(str(os.getpid()))
    dist.barrier()
    if world.rank == 1:
        how()
    time.sleep(600)


def raises():
    raise ValueError("planted")


def leaves():
    os._exit(7)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (raises, "rank 1 ended with exit code 1"),
        (leaves, "rank 1 ended with exit code 7"),
        (is_killed, "rank 1 ended with exit code -9"),
        (hangs, r"ranks \[0, 1\] have not ended within 15 s"),
    ],
)
def test_a_rank_that_ends_badly_is_told_and_takes_the_others_along(how, words, tmp_path):
    with pytest.raises(RankFailed, match=words):
        on_ranks(2, ends_badly, how, tmp_path, timeout=15 if how is hangs else 60)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert have_ended(pids)


PROGRAMS = {
    "print('out'); import sys; print('err', file=sys.stderr)": (0, "out\n", "err\n"),
    "import sys; sys.exit('words')": (1, "", "words\n"),
    "import os; os._exit(7)": (7, "", ""),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": (-15, "", ""),
    "import os, sys; print(os.environ['ASKED'], sys.argv[1:])": (0, "yes ['a', '--b']\n", ""),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_forked_command_ends_as_python_would(program, tmp_path):
    words = [sys.executable, "-c", program, "a", "--b"]
    done = forked.run(words, tmp_path, environment() | {"ASKED": "yes"}, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == PROGRAMS[program]


def test_a_forked_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    program = (
        "import os, time, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", program], tmp_path, environment(), timeout=5)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert have_ended(pids)


FAILS_FIRST = """
import pytest
from titan_dit.ranks import process_group

@pytest.mark.parametrize("fails", [True, False])
def test_a_group(fails):
    with process_group.start("cpu"):
        assert not fails
"""


def test_a_test_that_fails_leaves_no_process_group_to_the_next(tmp_path):
    (tmp_path / "test_groups_of_two.py").write_text(FAILS_FIRST)
    # The options of the suite's pytest: `-p conftest` is the suite's conftest.py.
    words = ["-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = forked.run([sys.executable, *words], tmp_path, environment() | paths, timeout=60)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


IMPORTS_ALL = """
import os, torch
def touched(*_): raise SystemExit("CUDA is asked for")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_name"):
    setattr(torch.cuda, name, touched)
for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_isDriverSufficient"):
    if hasattr(torch._C, name):  # A build with CUDA.
        setattr(torch._C, name, touched)
torch.version.cuda = "13.0"
import preload
print("left:", *(name for name in os.environ if name.endswith("BENCHMARKER")))
"""


def test_the_server_asks_for_no_gpu_which_its_children_could_not_use_then(tmp_path):
    """torch 2.11 does when its compiler is imported, unless `server_variables` tell it not to."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_ALL],
        cwd=tmp_path,
        env=environment() | forked.server_variables(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # Their environments are not the server's: a command of a test starts as a user's would.
    assert (done.returncode, done.stdout) == (0, "left:\n"), done.stderr
