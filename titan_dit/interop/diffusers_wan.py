"""Wan in diffusers: folders of a `WanTransformer3DModel`, or of a `WanPipeline`."""

from __future__ import annotations

from titan_dit.interop.tensor_layouts import ClipKernel, Same, SplitQKV, Table
from titan_dit.models.wan_config import MODULATION, WanConfig

CONDITION = "condition_embedder"
OUTER = {
    "embed.timestep.up": f"{CONDITION}.time_embedder.linear_1",
    "embed.timestep.down": f"{CONDITION}.time_embedder.linear_2",
    "embed.modulation": f"{CONDITION}.time_proj",
    "embed.text.up": f"{CONDITION}.text_embedder.linear_1",
    "embed.text.down": f"{CONDITION}.text_embedder.linear_2",
    "head.out": "proj_out",
}
"""Linear layers outside the blocks."""
BLOCK = {
    "attn.out": "attn1.to_out.0",
    "cross_norm": "norm2",
    "cross.q": "attn2.to_q",
    "cross.out": "attn2.to_out.0",
    "mlp.up": "ffn.net.0.proj",
    "mlp.down": "ffn.net.2",
}
"""Layers of a block that are the same there."""
NORMS = {
    "attn.norm.q": "attn1.norm_q",
    "attn.norm.k": "attn1.norm_k",
    "cross.norm.q": "attn2.norm_q",
    "cross.norm.k": "attn2.norm_k",
}
"""Weights of the norms of queries and keys."""


def layouts(config: WanConfig) -> dict[str, Same]:
    """Name of our parameter -> its layout in diffusers' tensors."""
    _, layers, heads, patch = config.shape
    found: dict[str, Same] = {
        "embed.patch.weight": ClipKernel(("patch_embedding.weight",), patch),
        "embed.patch.bias": Same(("patch_embedding.bias",)),
        "head.modulation.table": Table(("scale_shift_table",), 2),
    }
    found |= linears(OUTER, "")
    for number in range(layers):
        block = f"blocks.{number}"
        own: dict[str, Same] = linears(BLOCK, f"{block}.")
        own["modulation.table"] = Table((f"{block}.scale_shift_table",), MODULATION[0])
        own |= {name: Same((f"{block}.{theirs}.weight",)) for name, theirs in NORMS.items()}
        for name, layer, parts in (("attn.qkv", "attn1", "qkv"), ("cross.kv", "attn2", "kv")):
            for kind in ("weight", "bias"):
                split = tuple(f"{block}.{layer}.to_{part}.{kind}" for part in parts)
                own[f"{name}.{kind}"] = SplitQKV(split, heads)
        found |= {f"{block}.{name}": layout for name, layout in own.items()}
    return found


def linears(names: dict[str, str], prefix: str) -> dict[str, Same]:
    """Layouts of weights and biases. `prefix`: of their names in diffusers."""
    return {
        f"{ours}.{kind}": Same((f"{prefix}{theirs}.{kind}",))
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }
