"""A function whose inputs are kept, and which backward calls again: torch's checkpoint."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

# The models draw no random numbers, so there is no generator state to keep for the second forward.
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
