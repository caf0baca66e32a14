"""What the server of tests/forked.py imports before the first fork, so that no child has to."""

import gc
import importlib

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
    "titan_dit.commands.predict",
    "titan_dit.commands.replay",
    "titan_dit.commands.data_pack",
    "titan_dit.commands.data_show",
    "titan_dit.diffusion.pictures",
    "tyro",
)

for module in MODULES:
    importlib.import_module(module)
# A collection in a child would write to, and so copy, every page of what was imported.
gc.collect()
gc.freeze()
