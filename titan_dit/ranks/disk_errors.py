"""Errors of disks and stores, as one line: the flag or key, the path, the reason, the fix."""

from __future__ import annotations

import errno
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from titan_dit.config.section import UserError
from titan_dit.system.files import reason_of

FULL = (errno.ENOSPC, errno.EDQUOT)
"""No space or no inodes; the quota is used up."""
SHARED_MEMORY = "/dev/shm"
FIXES = {
    **dict.fromkeys(FULL, "Free some space, or name another path."),
    errno.EACCES: "Change its permissions or its owner, or name another path.",
    errno.EPERM: "Change its permissions or its owner, or name another path.",
    errno.EROFS: "Name a path on a file system that can be written.",
    errno.ENOENT: "Make the folder, or correct the path.",
    errno.ENOTDIR: "A part of the path is a file: correct the path, or move the file away.",
    errno.EISDIR: "Name a file, not a folder.",
    errno.EEXIST: "A file of this name is there: move it away, or name another path.",
    errno.ENOTEMPTY: "Delete it, or name another path.",
    errno.ELOOP: "A link leads to itself: correct the link.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EMFILE: "Raise the limit: ulimit -n 65536.",
    errno.EIO: "The disk fails: name a path on another one.",
}
"""errno -> the fix."""
Paths = Iterable[tuple[str, str]]
"""(flag or key, path) of all that a command reads and writes."""


def refuse_full(error: Exception, where: str, key: str) -> None:
    """Raise UserError if `error` is that of a full disk; `key` sets another folder."""
    if isinstance(error, OSError) and error.errno in FULL:
        raise UserError(
            f"{where}: {os.strerror(error.errno)}. Free some space, or set another {key}."
        ) from None


def shared_memory_is_full(fewer: str) -> str:
    """The line of processes that have no shared memory left; `fewer`: the flag that needs less."""
    size = "missing"
    with suppress(OSError):
        entry = os.statvfs(SHARED_MEMORY)
        megabytes = entry.f_blocks * entry.f_frsize / 2**20
        size = f"{megabytes:,.0f} MB" if megabytes >= 1 else f"{megabytes:.2g} MB"
    return f"{SHARED_MEMORY} is full ({size}): docker run --shm-size=8g, or {fewer}"


def line_of(error: OSError, flag: str = "") -> str:
    """The line of a file error; `flag`: what named the file."""
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str | bytes)]
    where = f"{flag} {' -> '.join(map(os.fsdecode, names))}".strip()
    reason, fix = reason_of(error), FIXES.get(error.errno or 0, "")
    return f"{where}{': ' * bool(where)}{reason}. {fix}".rstrip()


@contextmanager
def writing(what: str, then: str = "", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise an OSError of the block as UserError: `what` cannot be written, the reason, the fix.

    `what`: flag or key, and path. `then`: sentence after the fix. `also`: errors of libraries.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *also)):
            raise
        fix = FIXES.get(getattr(error, "errno", None) or 0, "")
        line = f"{what} cannot be written: {reason_of(error)}. {fix}".rstrip()
        raise UserError(f"{line} {then}".rstrip()) from None


@contextmanager
def naming(paths: Callable[[], Paths], kind: type[UserError] = UserError) -> Iterator[None]:
    """Raise an OSError of the block as `kind`, which names the flag or key of its path.

    An error of a path that nothing named, such as a package's file, passes.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = error if isinstance(error, OSError) else looped(error)
        if found is None or not isinstance(found.filename, str | bytes):
            raise
        if (flag := flag_of(os.fsdecode(found.filename), paths())) is None:
            raise
        raise kind(line_of(found, flag)) from error


def looped(error: RuntimeError) -> OSError | None:
    """The error of a link that leads to itself: Path.resolve raises a RuntimeError before 3.13."""
    text = re.fullmatch("Symlink loop from '(.*)'", str(error))
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), text[1]) if text else None


def flag_of(file: str, paths: Paths) -> str | None:
    """The flag whose path has most in common with `file`: the path, below, above, or beside it."""
    where = os.path.realpath(file)
    found: list[tuple[int, str]] = []
    for flag, path in paths:
        named = os.path.realpath(path)
        is_below, is_above = f"{where}/".startswith(f"{named}/"), named.startswith(f"{where}/")
        # Temporary files and lists have names that begin with the path's.
        if is_below or is_above or where.startswith(named):
            found.append((min(len(where), len(named)), flag))
    return max(found, key=operator.itemgetter(0))[1] if found else None
