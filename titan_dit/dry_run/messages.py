"""Messages whose senders hold their tensors as long as a GPU does, on fake and on gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_dit.parallel.links import Links


class Awaited(dist.Work):
    """A work that is waited for when its sender asks whether it is completed."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work: dist.Work | None = work

    def is_completed(self) -> bool:
        """True, after the work is done."""
        return self.wait()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the work is done, once: gloo hangs at the second time."""
        work, self.work = self.work, None
        return True if work is None else work.wait()


def await_sends(links: Links) -> None:
    """Let the works of sent messages complete.

    Neither gloo's nor those of the fake process group report that they are: all that a pass sends
    would be held to its end. NCCL's do, once the reader has come to the message.
    """
    send: Any = links.send

    def awaited(tensors: Sequence[Tensor], target: int) -> list[dist.Work]:
        return [Awaited(work) for work in send(tensors, target)]

    links.send = awaited  # type: ignore[method-assign]
