"""What a rank imports, for the fork server: nothing here may touch CUDA or start a thread."""

import contextlib
import gc
import importlib

import torch

from titan_dit.config import catalog

import titan_dit.train
import titan_dit.trainer
import titan_dit.dry_run.estimate
import titan_dit.checks
import titan_dit.launcher.flight_recorder
import titan_dit.launcher.orphan
import torch.utils.serialization
import safetensors.torch
import titan_dit.diffusion.objective

with contextlib.suppress(ImportError):
    import torch.utils.tensorboard
with torch.device("meta"):
    torch.nn.Linear(2,2)
gc.collect()
gc.freeze()  # A collection in a rank would copy every page of what is imported here.
