"""Imports of the process that forks ranks (launcher/fork_server.py): no CUDA, no threads."""

from __future__ import annotations

import contextlib
import gc
import importlib

import torch

MODULES = (
    "PIL.PngImagePlugin",
    "numpy.random",
    "safetensors.torch",
    "torch.utils.serialization",
    "titan_dit.checks",
    "titan_dit.data.latents",
    "titan_dit.diffusion.rectified_flow",
    "titan_dit.diffusion.samplers.ode",
    "titan_dit.dry_run.report",
    "titan_dit.ranks.watchdog",
    "titan_dit.ranks.signals",
    "titan_dit.models.dit",
    "titan_dit.optim.adamw",
    "titan_dit.parallel.tensor_plans.dit",
    "titan_dit.pipeline.schedules.looped",
    "titan_dit.train",
    "titan_dit.trainer",
)
"""Modules that a run imports late; their own imports come with them."""

for module in MODULES:
    importlib.import_module(module)
# The first, which every optimizer imports, takes half a second.
for module in ("torch._dynamo", "torch.utils.tensorboard"):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
with torch.device("meta"):
    torch.nn.Embedding(1, 1)  # The first one imports operators of the meta device.
# Otherwise a collection in a rank would copy every page of what is imported here.
gc.collect()
gc.freeze()
