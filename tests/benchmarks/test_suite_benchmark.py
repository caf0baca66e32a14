"""benchmarks/suite.py counts every process, including those of a fork server."""

import json
import subprocess
import sys

from commands import ROOT, environment

BURN = """
import time

def burn(seconds):
    while time.process_time() < seconds:
        pass
"""
# A fork server's child burns, and so does an orphan; neither is waited for by who started it.
PROGRAM = """
import multiprocessing, os, sys, time
from burning import burn

if __name__ == "__main__":
    rank = multiprocessing.get_context("forkserver").Process(target=burn, args=(0.5,))
    rank.start()
    rank.join()
    if os.fork() == 0:
        if os.fork() == 0:
            burn(time.process_time() + 0.7)
            os._exit(0)
        os._exit(0)
    os.wait()
    sys.exit(3)
"""
ASK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import suite
suite.GRACE_S = float(sys.argv[2])
print(json.dumps(asdict(suite.measure(sys.argv[3:], Path.cwd()))))
"""


def used(folder, grace, *command):
    words = [sys.executable, "-c", ASK, ROOT / "benchmarks", grace, *command]
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_of_a_fork_server_and_orphans_count_and_leftovers_are_named(tmp_path):
    (tmp_path / "burning.py").write_text(BURN)
    (tmp_path / "program.py").write_text(PROGRAM)
    found = used(tmp_path, 10, sys.executable, "program.py")
    assert found["exit_code"] == 3
    assert 1.2 < found["cpu_s"] < 3
    assert found["killed"] == []
    assert used(tmp_path, 0.5, "bash", "-c", "sleep 300 & exit 0")["killed"] == ["sleep 300"]
