"""FLUX.2 in diffusers: folders of a `Flux2Transformer2DModel`, or of a `Flux2KleinPipeline`.

In double blocks q, k and v are three weights there. A single block has one weight for q, k, v, gate
and value, and one for the outputs of attention and MLP: here these are two layers each.
"""

from __future__ import annotations

from titan_dit.interop.tensor_layouts import FusedGate, Part, RowsOfQKV, Same, SplitQKV
from titan_dit.models.flux2_config import Flux2Config

TIME = "time_guidance_embed"
OUTER = {
    "embed.patch": "x_embedder",
    "embed.text": "context_embedder",
    "embed.timestep.up": f"{TIME}.timestep_embedder.linear_1",
    "embed.timestep.down": f"{TIME}.timestep_embedder.linear_2",
    "embed.modulation.image": "double_stream_modulation_img.linear",
    "embed.modulation.text": "double_stream_modulation_txt.linear",
    "embed.modulation.single": "single_stream_modulation.linear",
    "embed.modulation.head": "norm_out.linear",
    "head.out": "proj_out",
}
GUIDANCE = {
    "embed.guidance.up": f"{TIME}.guidance_embedder.linear_1",
    "embed.guidance.down": f"{TIME}.guidance_embedder.linear_2",
}
"""Layers of a network with an embedding of guidance."""
HALVES = {
    "image": {
        "qkv": ("to_q", "to_k", "to_v"),
        "out": "to_out.0",
        "q_norm": "norm_q",
        "k_norm": "norm_k",
        "mlp": "ff",
    },
    "text": {
        "qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "out": "to_add_out",
        "q_norm": "norm_added_q",
        "k_norm": "norm_added_k",
        "mlp": "ff_context",
    },
}
"""Names of a double block's layers."""


def double_block(block: str, heads: int) -> dict[str, Same]:
    """Layouts of a double block's parameters. `block`: prefix of their names."""
    found: dict[str, Same] = {}
    for half, names in HALVES.items():
        qkv = tuple(f"{block}.attn.{part}.weight" for part in names["qkv"])
        found[f"{half}.attn.qkv.weight"] = SplitQKV(qkv, heads)
        for part in ("out", "q_norm", "k_norm"):
            found[f"{half}.attn.{part}.weight"] = Same((f"{block}.attn.{names[part]}.weight",))
        mlp = f"{block}.{names['mlp']}"
        found[f"{half}.mlp.up.weight"] = FusedGate((f"{mlp}.linear_in.weight",))
        found[f"{half}.mlp.down.weight"] = Same((f"{mlp}.linear_out.weight",))
    return found


def single_block(block: str, config: Flux2Config) -> dict[str, Same]:
    """Layouts of a single block's parameters. `block`: prefix of their names."""
    hidden, _, heads, _ = config.shape
    inputs, outputs = (f"{block}.attn.to_qkv_mlp_proj.weight",), (f"{block}.attn.to_out.weight",)
    qkv, gate = RowsOfQKV(inputs, heads), FusedGate(inputs)
    width = 3 * hidden
    return {
        "attn.qkv.weight": Part(inputs, qkv, 0, 0, width, is_last=False),
        "mlp.up.weight": Part(inputs, gate, 0, width, 2 * config.ffn, is_last=True),
        "attn.out.weight": Part(outputs, Same(outputs), 1, 0, hidden, is_last=False),
        "mlp.down.weight": Part(outputs, Same(outputs), 1, hidden, config.ffn, is_last=True),
        "attn.q_norm.weight": Same((f"{block}.attn.norm_q.weight",)),
        "attn.k_norm.weight": Same((f"{block}.attn.norm_k.weight",)),
    }


def layouts(config: Flux2Config) -> dict[str, Same]:
    """Name of our parameter -> its layout in diffusers' tensors."""
    outer = OUTER if config.guidance is None else OUTER | GUIDANCE
    found: dict[str, Same] = {f"{k}.weight": Same((f"{v}.weight",)) for k, v in outer.items()}
    for layer, kind in enumerate(config.kinds):
        number = layer - config.kinds.index(kind)
        if kind == "double":
            own = double_block(f"transformer_blocks.{number}", config.shape[2])
        else:
            own = single_block(f"single_transformer_blocks.{number}", config)
        found |= {f"blocks.{layer}.{name}": layout for name, layout in own.items()}
    return found
