"""Members of a tar file with bounded sizes."""

from __future__ import annotations

import tarfile
from typing import Any

from titan_dit.config.section import UserError

MAX_HEADER_BYTES = 1 << 20
"""Maximum bytes of a long name, or of an extended header."""
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class BoundedMember(tarfile.TarInfo):
    """A member whose size is not negative: after a negative one the tar file would begin again.

    tarfile reads extended headers whole, so their size is bounded.
    """

    def _proc_member(self, tarfile_: tarfile.TarFile) -> Any:
        if self.type in EXTENDED and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        refuse_negative(self)
        try:
            found: tarfile.TarInfo = tarfile.TarInfo._proc_member(self, tarfile_)  # type: ignore[attr-defined]
        except IndexError:
            raise tarfile.ReadError("a list of holes that is cut off") from None
        refuse_negative(found)  # Of an extended header.
        return found


def refuse_negative(member: tarfile.TarInfo) -> None:
    """Raise ReadError for a negative size."""
    if member.size < 0:
        raise tarfile.ReadError(f"a member of {member.size:,} bytes")


def refuse_sparse(member: tarfile.TarInfo, at: str) -> None:
    """Raise UserError for a sparse member: a few bytes can stand for any size."""
    if member.sparse is not None:
        raise UserError(f"{at} is a sparse member. Make the tar file without --sparse (-S).")
