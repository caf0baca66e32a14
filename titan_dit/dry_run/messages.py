"""Lets senders on fake and gloo ranks free sent tensors as early as on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_dit.parallel.links import Links


class Awaited(dist.Work):
    """A `Work` whose `is_completed` waits for it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work: dist.Work | None = work

    def is_completed(self) -> bool:
        """Wait until the work is done; True."""
        return self.wait()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the work is done. Later calls return at once: gloo hangs in a second wait."""
        work, self.work = self.work, None
        return True if work is None else work.wait()


def await_sends(links: Links) -> None:
    """Make the works of sent messages report their completion.

    Those of gloo and of the fake process group never do, so all sent tensors would be held until
    the end of a pass. NCCL's do, once the receiver has got the message.
    """
    send: Any = links.send

    def awaited(tensors: Sequence[Tensor], target: int) -> list[dist.Work]:
        return [Awaited(work) for work in send(tensors, target)]

    links.send = awaited  # type: ignore[method-assign]
