"""Z-Image in diffusers: folders of a `ZImageTransformer2DModel`, or of a `ZImagePipeline`.

q, k and v are three weights there, gate and value of the MLP two, the learned tokens for padding
[1, hidden].
"""

from __future__ import annotations

from titan_dit.interop.tensor_layouts import Row, Same, SplitGate, SplitQKV
from titan_dit.models.z_image_config import ZImageConfig

OUTER = {
    "embed.patch.linear": "all_x_embedder.{size}",
    "embed.text.linear": "cap_embedder.1",
    "embed.timestep.up": "t_embedder.mlp.0",
    "embed.timestep.down": "t_embedder.mlp.2",
    "head.modulation": "all_final_layer.{size}.adaLN_modulation.1",
    "head.out": "all_final_layer.{size}.linear",
}
"""Linear layers with biases outside the blocks."""
INNER = {
    "attn_norm": "attention_norm1",
    "attn.q_norm": "attention.norm_q",
    "attn.k_norm": "attention.norm_k",
    "attn.out": "attention.to_out.0",
    "attn_out_norm": "attention_norm2",
    "mlp_norm": "ffn_norm1",
    "mlp.down": "feed_forward.w2",
    "mlp_out_norm": "ffn_norm2",
}
"""Weights of a block that are equal."""
LISTS = {"refine_text": "context_refiner", "refine_image": "noise_refiner", "joint": "layers"}
"""Kind of block -> their list of blocks."""


def layouts(config: ZImageConfig) -> dict[str, Same]:
    """Name of our parameter -> its layout in diffusers' tensors."""
    heads, size = config.shape[2], f"{config.patch_size}-1"
    found: dict[str, Same] = {
        "embed.patch.padding": Row(("x_pad_token",)),
        "embed.text.padding": Row(("cap_pad_token",)),
        "embed.text.norm.weight": Same(("cap_embedder.0.weight",)),
    }
    for ours, theirs in OUTER.items():
        for part in ("weight", "bias"):
            found[f"{ours}.{part}"] = Same((f"{theirs.format(size=size)}.{part}",))
    for layer, kind in enumerate(config.kinds):
        block = f"{LISTS[kind]}.{layer - config.kinds.index(kind)}"
        qkv = tuple(f"{block}.attention.to_{part}.weight" for part in "qkv")
        gated = tuple(f"{block}.feed_forward.w{number}.weight" for number in (1, 3))
        own: dict[str, Same] = {
            "attn.qkv.weight": SplitQKV(qkv, heads),
            "mlp.up.weight": SplitGate(gated),
            **{f"{k}.weight": Same((f"{block}.{v}.weight",)) for k, v in INNER.items()},
        }
        if kind != "refine_text":
            for part in ("weight", "bias"):
                own[f"modulation.{part}"] = Same((f"{block}.adaLN_modulation.0.{part}",))
        found |= {f"blocks.{layer}.{name}": layout for name, layout in own.items()}
    return found
