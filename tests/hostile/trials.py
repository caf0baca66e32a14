"""Run commands on malformed files in this process, and keep what they should not have done."""

import contextlib
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from hostile import watch
from hostile.formats import FORMATS

from titan_dit.ranks import failure

SECONDS = 30
PEAK_MIB = 1024
"""Most resident memory of a process that reads a small file, torch and all libraries included."""
MODULES = ("torch", "torch.distributed.checkpoint.metadata", "os", "builtins", "pickle")
LISTED = (0, 2)
"""Exit codes: success, perhaps with rows that are listed as bad; an error of the user."""


class Trials:
    """Valid inputs in `home`, and a folder `box` in which they are malformed one at a time."""

    def __init__(self, home):
        self.home, self.box = home.resolve(), home.resolve() / "box"
        self.valid = self.home / "valid"
        self.watch = None
        self.counts = {}

    def prepare(self, names):
        """Make the valid inputs, and run every command once on them; its failures."""
        tempfile.tempdir = str(self.box / "tmp")
        os.environ.update(NGPU="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        sys.path.insert(0, str(self.box))
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        found = []
        for name in names:
            folder = self.valid / name
            folder.mkdir(parents=True)
            self.box.mkdir(exist_ok=True)
            (self.box / "tmp").mkdir(exist_ok=True)
            with quiet():
                FORMATS[name].make(folder)
            end_group()
            for command in dict.fromkeys(map(id, FORMATS[name].commands)):
                chosen = next(c for c in FORMATS[name].commands if id(c) == command)
                self.fill(name)
                FORMATS[name].after(self.box / "in")
                code, said = self.answer(chosen)
                if code:
                    found.append(f"{name}: {chosen.name} of a valid input: {code} {said}")
        return found

    def begin(self):
        """From here on acts are refused, and memory has a limit. For ever."""
        importlib.import_module("ctypes")  # At its import it opens this process as a library.
        self.watch = watch.Watch()
        watch.limit_memory(2 * PEAK_MIB)

    def fill(self, name):
        """A fresh box with the valid input of a format, and a module that must not be imported."""
        os.chdir(self.home)
        if self.box.exists():  # Renamed first: threads of a command may still write there.
            old = Path(tempfile.mkdtemp(dir=self.home, prefix="old"))
            self.box.rename(old / "box")
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self.valid / name, self.box / "in", symlinks=True)
        for name in ("out", "tmp"):
            (self.box / name).mkdir()
        (self.box / f"{watch.CANARY}.py").write_text(
            "raise SystemExit('the canary was imported')\n"
        )
        os.chdir(self.box)

    def answer(self, command):
        """Run a command; its exit code and what it said."""
        out = io.StringIO()
        with quiet(out):
            try:
                command(self.box)
                code, message = 0, ""
            except SystemExit as end:
                code, message = (
                    (end.code or 0, "") if isinstance(end.code, int | None) else (1, end.code)
                )
            except (watch.Forbidden, watch.TooSlow) as act:
                code, message = 1, f"{type(act).__name__}: {act}"
            except BaseException as error:  # Of a library in Rust, too.
                code, message = failure.describe(error)
                failure.report(message, is_user_error=code == failure.USER_ERROR)
                message = ""
            finally:
                end_group()
        return code, message + out.getvalue()

    def one(self, name, seed):
        """Malform one file by a seed, and run a command on it: what it was, what is wrong, text."""
        rng = random.Random(f"{name} {seed}")
        command = rng.choice(FORMATS[name].commands)
        what = []
        wrong, said, code = self.judged(
            name, command, lambda folder: what.append(FORMATS[name].malform(folder, rng))
        )
        self.counts.setdefault(name, [0, 0])[bool(code)] += 1
        return f"{name} {seed}: {command.name}, {what[0]}", wrong, said

    def judged(self, name, command, malform):
        """Run a command on a changed input; what is wrong with it, what it said, its exit code."""
        self.fill(name)
        malform(self.box / "in")
        before = contents(self.box / "in")
        names = names_of_modules()
        watch.forget_peak()
        writable = [self.box / folder for folder in ("tmp", *command.writes)]
        with self.watch.over(writable, SECONDS):
            code, said = self.answer(command)
        wrong = self.watch.act or faults(code, said, command)
        if not wrong and watch.peak_mib() > PEAK_MIB:
            wrong = f"{watch.peak_mib():.0f} MiB"
        if not wrong and "in/run" not in command.writes and contents(self.box / "in") != before:
            wrong = "changed its input"
        if not wrong and names_of_modules() != names:
            wrong = "changed a module"
        return wrong, said, code


def faults(code, said, command):
    """What is wrong with an answer, or nothing."""
    if "Traceback (most recent call last)" in said:
        return "traceback: " + said.strip().splitlines()[-1][:300] + " | " + place_of(said)
    listed = (*LISTED, 1) if command.name == "checkpoint verify" else LISTED
    if code not in listed:
        return f"exit code {code}: {said[:300]}"
    if code == 2 and "error: " not in said:
        return f"no error line: {said[:300]!r}"
    odd = {sign for sign in said if not sign.isprintable() and sign not in "\n\t\r"}
    if odd:
        return f"prints {sorted(odd)!r}: {said[:300]!r}"
    return ""


def place_of(said):
    """The last line of our own code in a traceback."""
    ours = [line.strip() for line in said.splitlines() if "/titan_dit/" in line and "File" in line]
    return ours[-1][-120:] if ours else ""


@contextlib.contextmanager
def quiet(out=None):
    """Text to `out`; without progress lines."""
    out = out or io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield


def end_group():
    """End a process group that an error left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def contents(folder):
    """Names, kinds and digests of all files below a folder."""
    found = {}
    for file in sorted(folder.rglob("*")):
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        found[str(file)] = (file.lstat().st_mode, hashlib.md5(data).hexdigest())
    return found


def names_of_modules():
    """Names in the modules and classes that a pickle could write to."""
    found = {name: {*vars(sys.modules[name])} for name in MODULES if name in sys.modules}
    for module, name in watch.CHECKPOINTED:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            found[f"{module}.{name}"] = {*vars(kind)}
    return found


def main(home, plan, results):
    """In a forked process: try `plan`, a list of (format, first seed, number); write results.

    Each line of `results` is a JSON object: a story before each trial that may kill the process,
    and failures.
    """
    torch.set_num_threads(1)
    gc.set_threshold(700, 10, 10)  # Python's own: what a user's process leaves lying, and no more.
    # In a new clone each late import would write its bytecode: a file outside the output.
    sys.dont_write_bytecode = True
    trials = Trials(Path(home))
    with Path(results).open("w", buffering=1) as file:

        def tell(**row):
            file.write(json.dumps(row) + "\n")

        for wrong in trials.prepare(dict.fromkeys(name for name, _, _ in plan)):
            tell(wrong=wrong)
        trials.begin()
        for name, first, number in plan:
            start, peak = time.process_time(), 0.0
            for seed in range(first, first + number):
                tell(begun=f"{name} {seed}")
                story, wrong, said = trials.one(name, seed)
                peak = max(peak, watch.peak_mib())
                if wrong:
                    tell(wrong=f"{story}: {wrong}", said=said[-4000:])
            took = time.process_time() - start
            tell(
                format=name,
                files=number,
                cpu_s=round(took, 2),
                peak_mib=round(peak),
                answers=trials.counts.get(name),
            )
