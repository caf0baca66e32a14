"""The third network in diffusers: folders of a `LongCatImageTransformer2DModel`."""

from dataclasses import dataclass

from longcat_image import LongCatConfig

from titan_dit.config.section import Dim, Few, Layers
from titan_dit.interop.diffusers_network import TextToImage, check_fixed, checked
from titan_dit.interop.tensor_layouts import Part, Same, SplitQKV

SIZES = {
    "attention_head_dim": Few,
    "axes_dims_rope": tuple[Few, ...],
    "in_channels": Few,
    "joint_attention_dim": Dim,
    "num_attention_heads": Few,
    "num_layers": Layers,
    "num_single_layers": Layers,
}
OUTER = {
    "embed.text": "context_embedder",
    "embed.timestep.up": "time_embed.timestep_embedder.linear_1",
    "embed.timestep.down": "time_embed.timestep_embedder.linear_2",
    "head.modulation": "norm_out.linear",
}
HALVES = {
    "image": ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k", "norm1", "ff"),
    "text": (
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k"),
        *("norm1_context", "ff_context"),
    ),
}


@dataclass(frozen=True)
class Columns(Same):
    """Inputs of a token (c, p, p); ours are (p, p, c)."""

    def to_ours(self, *theirs):
        return theirs[0].unflatten(1, (-1, 2, 2)).permute(0, 2, 3, 1).flatten(1)

    def to_theirs(self, ours):
        return (ours.unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2).flatten(1),)


@dataclass(frozen=True)
class Rows(Same):
    """Outputs of a token (c, p, p), of a weight or a bias; ours are (p, p, c)."""

    def to_ours(self, *theirs):
        apart = theirs[0].unflatten(0, (-1, 2, 2))
        return apart.movedim(0, 2).flatten(0, 2)

    def to_theirs(self, ours):
        return (ours.unflatten(0, (2, 2, -1)).movedim(2, 0).flatten(0, 2),)


def named(ours, theirs, kind=Same, **more):
    """Layouts of a linear layer's weight and bias."""
    theirs = (theirs,) if isinstance(theirs, str) else theirs
    return {
        f"{ours}.{end}": kind(tuple(f"{name}.{end}" for name in theirs), **more)
        for end in ("weight", "bias")
    }


def double_block(block, heads):
    found = {}
    for half, (q, k, v, out, q_norm, k_norm, modulation, mlp) in HALVES.items():
        attention = [f"{block}.attn.{name}" for name in (q, k, v)]
        found |= named(f"{half}.attn.qkv", attention, SplitQKV, heads=heads)
        found |= named(f"{half}.attn.out", f"{block}.attn.{out}")
        found |= named(f"{half}.modulation", f"{block}.{modulation}.linear")
        found |= named(f"{half}.mlp.up", f"{block}.{mlp}.net.0.proj")
        found |= named(f"{half}.mlp.down", f"{block}.{mlp}.net.2")
        for ours, theirs in (("q_norm", q_norm), ("k_norm", k_norm)):
            found[f"{half}.attn.{ours}.weight"] = Same((f"{block}.attn.{theirs}.weight",))
    return found


def single_block(block, config):
    hidden, out = config.hidden_size, (f"{block}.proj_out.weight",)
    attention = [f"{block}.attn.{name}" for name in ("to_q", "to_k", "to_v")]
    return {
        **named("attn.qkv", attention, SplitQKV, heads=config.num_heads),
        **named("modulation", f"{block}.norm.linear"),
        **named("up", f"{block}.proj_mlp"),
        "attn.out.weight": Part(out, Same(out), 1, 0, hidden, is_last=False),
        "down.weight": Part(out, Same(out), 1, hidden, config.ffn, is_last=True),
        "attn.out.bias": Same((f"{block}.proj_out.bias",)),
        "attn.q_norm.weight": Same((f"{block}.attn.norm_q.weight",)),
        "attn.k_norm.weight": Same((f"{block}.attn.norm_k.weight",)),
    }


class DiffusersLongCat(TextToImage):
    kind, pipeline = "LongCatImageTransformer2DModel", "LongCatImagePipeline"
    trained_on, direction, version, named = LongCatConfig, "to_noise", "0.37.0", "LongCat-Image"

    @classmethod
    def of_folder(cls, values, index):
        found = checked(values, SIZES)
        check_fixed(values, {"patch_size": 1}, cls.named)
        heads = found["num_attention_heads"]
        config = LongCatConfig(
            hidden_size=heads * found["attention_head_dim"],
            num_double_layers=found["num_layers"],
            num_single_layers=found["num_single_layers"],
            num_heads=heads,
            in_channels=found["in_channels"] // 4,
            latent_size=(128, 128),
            text_dim=found["joint_attention_dim"],
            rope_axes=found["axes_dims_rope"],
        )
        return cls(config, config.in_channels)

    def layouts(self):
        found = {}
        for ours, theirs in OUTER.items():
            found |= named(ours, theirs)
        found["embed.patch.weight"] = Columns(("x_embedder.weight",))
        found["embed.patch.bias"] = Same(("x_embedder.bias",))
        found |= named("head.out", "proj_out", Rows)
        for layer, kind in enumerate(self.config.kinds):
            number = layer - self.config.kinds.index(kind)
            if kind == "double":
                own = double_block(f"transformer_blocks.{number}", self.config.num_heads)
            else:
                own = single_block(f"single_transformer_blocks.{number}", self.config)
            found |= {f"blocks.{layer}.{name}": layout for name, layout in own.items()}
        return found

    def config_json(self):
        config = self.config
        return {
            "_class_name": self.kind,
            "_diffusers_version": self.version,
            "attention_head_dim": config.hidden_size // config.num_heads,
            "axes_dims_rope": list(config.rope_axes),
            "in_channels": 4 * config.in_channels,
            "joint_attention_dim": config.text_dim,
            "num_attention_heads": config.num_heads,
            "num_layers": config.num_double_layers,
            "num_single_layers": config.num_single_layers,
            "patch_size": 1,
        }
