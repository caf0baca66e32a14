"""Limits of the sizes that readers of data accept, and the variable that raises them.

Limits with a flag are raised by it instead.
"""

from __future__ import annotations

import math
import os

from titan_dit.config.section import UserError

VARIABLE = "TITAN_DIT_LIMITS"
MOST = 10_000


def raised(limit: int) -> int:
    """A limit, times TITAN_DIT_LIMITS. Raises UserError for a value that is no such number."""
    text = os.environ.get(VARIABLE, "1")
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST):
        raise UserError(
            f"{VARIABLE}={text}: limits of data are raised by a whole number from 1 to {MOST:,}. "
            "Unset it, or set 2."
        )
    return limit * int(text)


def columns_of_any_tp(columns: int) -> int:
    """The largest number that divides a rank's columns with any tp from 1 to 8 that divides them.

    Blocks of this size, or of a divisor, are the same in every layout.
    """
    return columns // math.lcm(*(size for size in range(1, 9) if columns % size == 0))


def advice(flag: str = "") -> str:
    """Advice on raising a limit: its flag, or the variable."""
    return f"raise {flag}" if flag else f"set {VARIABLE}={raised(1) * 2}"


def fix(found: int, limit: int) -> str:
    """Advice for an error about data of size `found` above `limit`, which is `raised`."""
    factor = -(-found * raised(1) // max(1, limit))
    if factor > MOST:
        return "Correct it."
    return f"If it is no forgery, set {VARIABLE}={factor}."
