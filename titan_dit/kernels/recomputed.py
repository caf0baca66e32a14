"""Activation recomputation of one function: torch's non-reentrant checkpoint."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

# The models draw no random numbers: there is no RNG state to save.
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
