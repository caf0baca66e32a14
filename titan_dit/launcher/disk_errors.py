"""Errors of disks and stores, as one line."""

from __future__ import annotations

import errno
import os

from titan_dit.config.section import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""No space or no inodes; the quota is used up."""


def refuse_full(error: Exception, where: str, key: str) -> None:
    """Raise UserError if `error` is that of a full disk; `key` sets another folder."""
    if isinstance(error, OSError) and error.errno in FULL:
        raise UserError(
            f"{where}: {os.strerror(error.errno)}. Free some space, or set another {key}."
        ) from None


def reason_of(error: Exception) -> str:
    """An error's message as one line."""
    return " ".join(str(error).split()) or type(error).__name__
