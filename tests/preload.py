"""Imports of the fork server (tests/forked.py), so that its children need not import them."""

import contextlib
import gc
import importlib
import os

import torch

MODULES = (
    "pytest",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "torch._inductor.compile_fx",
    "titan_dit.train",
    "titan_dit.trainer",
    "titan_dit.launcher.launch",
    "titan_dit.launcher.agent",
    "titan_dit.dry_run.command",
    "titan_dit.commands.sample",
    "titan_dit.commands.convert",
    "titan_dit.commands.evaluate",
    "titan_dit.commands.predict",
    "titan_dit.commands.replay",
    "titan_dit.commands.data_pack",
    "titan_dit.commands.data_report",
    "titan_dit.commands.data_show",
    "titan_dit.pictures.output",
    "tyro",
)

# Extras: text encoders and autoencoders, which take seconds to import.
EXTRAS = (
    "transformers.models.t5.modeling_t5",
    "transformers.models.auto.tokenization_auto",
    "diffusers.models.autoencoders.autoencoder_kl",
)

for module in MODULES:
    importlib.import_module(module)
# torchao, which they import, asks for a GPU; a build without CUDA has none.
for module in EXTRAS if torch.version.cuda is None else ():
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
# Of the server (`server_variables`); what its children start is not to inherit it.
os.environ.pop("TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER", None)
# A garbage collection in a child would copy every page of the imported modules.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 50)  # As in conftest.py.
