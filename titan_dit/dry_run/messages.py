"""Messages of pipeline ranks that run alone: sent at once, as far as memory is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from titan_dit.parallel.links import Links


class Sent(dist.Work):
    """A message that has been sent."""

    def is_completed(self) -> bool:
        """True, so that its sender frees its tensors before it sends the next message."""
        return True

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Go on."""
        return True


class SentAtOnce(Links):
    """Links whose messages are gone at once.

    Works of the fake process group never are, like those of gloo: all that a pass sends would
    be held to its end. On a GPU a message is gone once its reader has come to it.
    """

    def send(self, tensors: Sequence[Tensor], target: int) -> list[dist.Work]:
        """Send, and say so."""
        return [Sent() for _ in super().send(tensors, target)]
