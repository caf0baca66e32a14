"""Z-Image in diffusers: folders of a `ZImageTransformer2DModel`, or of a `ZImagePipeline`.

q, k and v are three weights there, gate and value of the MLP two, the learned tokens for padding
[1, hidden].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_dit.config.section import Dim, Few, Layers, PositiveFloat
from titan_dit.interop.diffusers_network import (
    Prompts,
    Rows,
    TextToImage,
    check_fixed,
    checked,
)
from titan_dit.interop.tensor_layouts import Row, Same, SplitGate, SplitQKV
from titan_dit.models.z_image_config import ZImageConfig

FIXED = {
    "all_f_patch_size": [1],
    "norm_eps": 1e-5,
    "qk_norm": True,
    "siglip_feat_dim": None,
    "t_scale": 1000.0,
}
"""Keys of config.json and the only values that our network supports."""
SIZES = {
    "all_patch_size": tuple[Few, ...],
    "axes_dims": tuple[Few, ...],
    "cap_feat_dim": Dim,
    "dim": Dim,
    "in_channels": Few,
    "n_heads": Few,
    "n_kv_heads": Few,
    "n_layers": Layers,
    "n_refiner_layers": Layers,
    "rope_theta": PositiveFloat,
}
"""Keys of config.json and their types."""
LENGTHS = (1536, 512, 512)
"""Positions on each axis for which diffusers computes angles, at least: the released weights'."""
LATENTS, TOKENS = 128, 512
"""Latent size and caption length of an import: of a picture of 1,024 pixels, and the pipeline's
maximum."""

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
"""Layer in our block -> layer of the same layout in diffusers' block."""
FIRST_OUTER = {
    "x_embedder": "all_x_embedder.{size}",
    "cap_embedder.1": "cap_embedder.1",
    "t_embedder.mlp.0": "t_embedder.mlp.0",
    "t_embedder.mlp.2": "t_embedder.mlp.2",
    "final_layer.adaLN_modulation.1": "all_final_layer.{size}.adaLN_modulation.1",
    "final_layer.linear": "all_final_layer.{size}.linear",
}
"""Linear layers outside the blocks of the single-file weights that ComfyUI takes."""
SAME_LAYERS = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
"""Layers of a block that have the same name in them."""
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


class DiffusersZImage(TextToImage):
    """Our Z-Image and its counterpart."""

    kind, pipeline, named = "ZImageTransformer2DModel", "ZImagePipeline", "Z-Image"
    trained_on, direction, version = ZImageConfig, "to_data", "0.36.0"
    prompts = Prompts((-2,), "chat", "removed")
    config: ZImageConfig

    @classmethod
    def of_folder(cls, values: Mapping[str, Any], index: Mapping[str, Any]) -> DiffusersZImage:
        """See `Counterpart.of_folder`."""
        check_fixed(values, FIXED, cls.named)
        found = checked(values, SIZES)
        one_patch = {"all_patch_size": list(found["all_patch_size"][:1])}
        check_fixed(values, {"n_kv_heads": found["n_heads"], **one_patch}, cls.named)
        config = ZImageConfig(
            hidden_size=found["dim"],
            num_layers=found["n_layers"],
            num_refiner_layers=found["n_refiner_layers"],
            num_heads=found["n_heads"],
            patch_size=one_patch["all_patch_size"][0] if one_patch["all_patch_size"] else 0,
            in_channels=found["in_channels"],
            latent_size=(LATENTS, LATENTS),
            text_tokens=TOKENS,
            text_dim=found["cap_feat_dim"],
            rope_axes=found["axes_dims"],
            rope_theta=found["rope_theta"],
        )
        return cls(config, config.in_channels)

    def layouts(self) -> dict[str, Same]:
        """See `layouts`."""
        return layouts(self.config)

    def originals(self) -> dict[str, Rows]:
        """See `Counterpart.originals`: names of the single-file weights that ComfyUI takes."""
        config, size = self.config, f"{self.config.patch_size}-1"
        found = {first: Rows((names.format(size=size),)) for first, names in FIRST_OUTER.items()}
        for layer, kind in enumerate(config.kinds):
            block = f"{LISTS[kind]}.{layer - config.kinds.index(kind)}"
            qkv = tuple(f"{block}.attention.to_{part}" for part in "qkv")
            found[f"{block}.attention.qkv"] = Rows(qkv)
            found[f"{block}.attention.out"] = Rows((f"{block}.attention.to_out.0",))
            same = SAME_LAYERS[:-1] if kind == "refine_text" else SAME_LAYERS
            found |= {f"{block}.{name}": Rows((f"{block}.{name}",)) for name in same}
        return found

    def config_json(self) -> dict[str, Any]:
        """See `Counterpart.config_json`."""
        config = self.config
        used = (config.text_tokens + 2, *config.grid)
        return {
            "_class_name": self.kind,
            "_diffusers_version": self.version,
            **FIXED,
            "all_patch_size": [config.patch_size],
            "axes_dims": list(config.axes),
            "axes_lens": list(map(max, LENGTHS, used)),
            "cap_feat_dim": config.text_dim,
            "dim": config.hidden_size,
            "in_channels": config.in_channels,
            "n_heads": config.num_heads,
            "n_kv_heads": config.num_heads,
            "n_layers": config.num_layers,
            "n_refiner_layers": config.num_refiner_layers,
            "rope_theta": config.rope_theta,
        }
