import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_dit.config.section import UserError
from titan_dit.ranks import failure
from titan_dit.ranks.failure import Disruption, describe, report
from titan_dit.ranks.signals import PARENT


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return describe(caught)


def test_what_a_user_did_is_one_line_without_a_traceback():
    assert raised(UserError("[parallel] tp=3")) == (2, "error: [parallel] tp=3")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(28, "No space left", "a/file"),
            "a/file: No space left. Free some space, or name another path.",
        ),
        (Disruption("a/file"), "a/file"),
    ],
)
def test_a_disk_is_the_users_before_training_begins_and_tried_again_afterwards(
    error, line, monkeypatch
):
    monkeypatch.setattr(failure, "is_training", False)
    assert raised(error) == (2, f"error: {line}")
    failure.training_started()
    assert raised(error) == (1, f"error: {line}")
    assert raised(UserError("[parallel] tp=3"))[0] == 2


def test_restarted_ranks_try_again_a_disk_that_is_away_while_they_load(monkeypatch):
    monkeypatch.setattr(failure, "is_training", False)
    monkeypatch.setenv(failure.STARTED, failure.HERE)
    for error in (OSError(116, "Stale file handle", "a/file"), Disruption("a/file")):
        assert raised(error)[0] == 1
    assert raised(UserError("[parallel] tp=3"))[0] == 2


def test_everything_else_comes_with_its_traceback():
    code, message = raised(ValueError("shape"))
    assert code == 1
    assert message.startswith("Traceback")
    assert message.endswith("ValueError: shape")


def test_an_interrupt_says_nothing():
    assert raised(KeyboardInterrupt()) == (130, "")


def test_without_a_launcher_the_message_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report("error: no", is_user_error=True)
    report("", is_user_error=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: no\n")


def test_under_a_launcher_the_message_is_left_for_it(monkeypatch, tmp_path, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report("error: no", is_user_error=True)
    left = json.loads(file.read_text())["message"]
    assert left["message"] == "error: no"
    assert left["extraInfo"]["user"] is True
    assert int(left["extraInfo"]["timestamp"]) <= left["extraInfo"]["moment"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("statement", "code", "stderr"),
    [
        ("raise UserError('tp=3')", 2, "error: tp=3\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("print('done')", 0, ""),
    ],
)
def test_a_process_ends_with_the_code_and_one_message(monkeypatch, statement, code, stderr):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    program = (
        "from titan_dit.config.section import UserError\n"
        "from titan_dit.ranks.failure import run_and_exit\n"
        f"def main():\n    print('begun')\n    {statement}\nrun_and_exit(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, stderr)
    # What was printed before is not lost, though the process ends at once.
    assert done.stdout.startswith("begun\n")


UNREAD = {
    "a command": ("console.say('more')", 141, ""),
    "a command at its end": ("print('more'); sys.exit(0)", 141, ""),
    "a long text of a library": ("print('more' * 10_000)", 141, ""),
    "a run": ("console.mention('more'); console.mention('more'); print('more')", 0, ""),
    "a run that ends": ("failure.training_started(); print('more')", 0, ""),
    "an error": ("raise UserError('tp=3')", 2, "error: tp=3\n"),
    "sys.exit with words": ("sys.exit('words')", 1, "words\n"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_nobody_reads_ends_a_command_quietly_and_no_run(monkeypatch, case):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    statement, code, stderr = UNREAD[case]
    program = (
        "import sys\nfrom titan_dit.ranks import failure\n"
        "from titan_dit.observe import console\n"
        f"from titan_dit.config.section import UserError\ndef main():\n    {statement}\n"
        "failure.run_and_exit(main)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, stderr)


WRITTEN_NOWHERE = {
    "a full disk": ("print('more')", ">/dev/full", 1, "error: standard output: [Errno 28]"),
    "a run on a full disk": ("failure.training_started(); print('more')", ">/dev/full", 0, ""),
    "no stdout": ("print('more'); sys.stdout.flush()", ">&-", 0, ""),
    "no stream": ("print('more'); raise UserError('tp=3')", ">&- 2>&-", 2, ""),
}


@pytest.mark.parametrize("case", WRITTEN_NOWHERE)
def test_a_command_fails_where_its_output_is_lost_and_not_where_none_was_wanted(monkeypatch, case):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    statement, where, code, stderr = WRITTEN_NOWHERE[case]
    program = (
        "import sys\nfrom titan_dit.ranks import failure\n"
        "from titan_dit.config.section import UserError\n"
        f"def main():\n    {statement}\nfailure.run_and_exit(main)\n"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {where}', sys.executable, program]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(stderr)
    assert bool(done.stderr) == bool(stderr)


def test_a_broken_pipe_of_another_kind_is_an_error_like_any_other():
    assert not failure.is_unread(BrokenPipeError())
    assert raised(BrokenPipeError())[0] == 1


def test_half_a_note_of_a_rank_that_is_killed_is_none(tmp_path, monkeypatch):
    note = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(note))
    written = []

    def write_bytes(path, data):
        with path.open("wb") as file:
            file.write(data[:5])
        written.append(path)
        raise SystemExit  # SIGKILL would leave the file as it is here.

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(SystemExit):
        failure.leave_note({"message": {"message": "lost a rank", "extraInfo": {}}})
    assert written
    assert not note.exists()


def test_a_crash_in_native_code_shows_where_python_was():
    program = """
import ctypes
from titan_dit.ranks.failure import run_and_exit
def reads_nothing():
    ctypes.string_at(0)
run_and_exit(reads_nothing)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -11
    assert "Segmentation fault" in ended.stderr
    assert "in reads_nothing" in ended.stderr


@pytest.mark.parametrize("launcher_is_dead", [False, True])
def test_a_rank_whose_launcher_died_before_it_looked_is_no_orphan(launcher_is_dead, tmp_path):
    """Its parent is then init from the start; in a container the launcher itself may be that."""
    program = (
        "import os\nfrom titan_dit.ranks import signals\nsignals.die_with_launcher()\n"
        "print(signals.PARENT in os.environ)\n"
    )
    parent = 2**22 if launcher_is_dead else os.getpid()
    variables = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error"), PARENT: str(parent)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if launcher_is_dead:
        assert done.returncode == failure.LEFT
    else:
        assert (done.returncode, done.stdout) == (0, "False\n")
