"""torch.compile, block by block: all blocks share one graph, so it is compiled once."""

from __future__ import annotations

from torch import nn

from titan_dit.config import CompileConfig


def compile_blocks(model: nn.Module, config: CompileConfig) -> None:
    """Compile in place, before fully_shard; the names of parameters stay."""
    if config.enabled:
        for block in model.get_submodule("blocks").children():
            block.compile(fullgraph=True)
