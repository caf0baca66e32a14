"""An asynchronous copy of a GPU's tensor to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The copy of a tensor on the host; on a CPU the tensor itself.

    The constructor queues the copy. It does not wait for work that is queued later.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.copied: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self.value = tensor
            return
        self.value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.value.copy_(tensor, non_blocking=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied.record()

    def read(self) -> Tensor:
        """The values; waits until they have been copied."""
        if self.copied:
            self.copied.synchronize()
        return self.value
