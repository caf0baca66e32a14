"""FLUX.2 in diffusers: folders of a `Flux2Transformer2DModel`, or of a `Flux2KleinPipeline`.

In double blocks q, k and v are three weights there. A single block has one weight for q, k, v, gate
and value, and one for the outputs of attention and MLP: here these are two layers each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from titan_dit.config.section import Bound, Dim, Few, Layers, PositiveFloat, UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.interop.diffusers_network import (
    Prompts,
    Rows,
    TextToImage,
    check_fixed,
    checked,
)
from titan_dit.interop.tensor_layouts import FusedGate, Part, RowsOfQKV, Same, SplitQKV
from titan_dit.models.flux2_config import Flux2Config

FIXED = {"eps": 1e-6, "out_channels": None, "patch_size": 1, "timestep_guidance_channels": 256}
"""Keys of config.json and the only values that our network supports."""
SIZES = {
    "attention_head_dim": Few,
    "axes_dims_rope": tuple[Few, ...],
    "guidance_embeds": bool,
    "in_channels": Few,
    "joint_attention_dim": Dim,
    "mlp_ratio": Annotated[float, Bound(above=0, most=1000)],
    "num_attention_heads": Few,
    "num_layers": Layers,
    "num_single_layers": Layers,
    "rope_theta": PositiveFloat,
}
"""Keys of config.json and their types."""
LATENTS, TOKENS = 64, 512
"""Latent size and caption length of an import: of a picture of 1,024 pixels, and of the
pipeline."""
GUIDANCE_SCALE = 4.0
"""[model] guidance of imported weights with an embedding of it: the default of Flux2Pipeline."""
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
FIRST_NAMES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": f"{TIME}.timestep_embedder.linear_1",
    "time_in.out_layer": f"{TIME}.timestep_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
}
"""Layer outside the blocks of black-forest-labs/flux2 -> layer in diffusers."""
FIRST_GUIDANCE = {
    "guidance_in.in_layer": f"{TIME}.guidance_embedder.linear_1",
    "guidance_in.out_layer": f"{TIME}.guidance_embedder.linear_2",
}


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


def originals(config: Flux2Config) -> dict[str, Rows]:
    """See `Counterpart.originals`: names of black-forest-labs/flux2."""
    outer = FIRST_NAMES if config.guidance is None else FIRST_NAMES | FIRST_GUIDANCE
    found = {first: Rows((theirs,)) for first, theirs in outer.items()}
    # Shift, then scale; diffusers has the scale first.
    found["final_layer.adaLN_modulation.1"] = Rows(("norm_out.linear",), swaps=True)
    for number in range(config.kinds.count("double")):
        theirs = f"transformer_blocks.{number}"
        for half, names in zip(("img", "txt"), HALVES.values(), strict=True):
            first = f"double_blocks.{number}.{half}"
            qkv = tuple(f"{theirs}.attn.{part}" for part in names["qkv"])
            found[f"{first}_attn.qkv"] = Rows(qkv)
            found[f"{first}_attn.proj"] = Rows((f"{theirs}.attn.{names['out']}",))
            found[f"{first}_mlp.0"] = Rows((f"{theirs}.{names['mlp']}.linear_in",))
            found[f"{first}_mlp.2"] = Rows((f"{theirs}.{names['mlp']}.linear_out",))
    for number in range(config.kinds.count("single")):
        first, theirs = f"single_blocks.{number}", f"single_transformer_blocks.{number}.attn"
        found[f"{first}.linear1"] = Rows((f"{theirs}.to_qkv_mlp_proj",))
        found[f"{first}.linear2"] = Rows((f"{theirs}.to_out",))
    return found


class DiffusersFlux2(TextToImage):
    """Our FLUX.2 and its counterpart."""

    kind, pipeline, named = "Flux2Transformer2DModel", "Flux2KleinPipeline", "FLUX.2"
    trained_on, direction, version = Flux2Config, "to_noise", "0.37.0"
    prompts = Prompts((9, 18, 27), "chat_without_thinking", "kept")
    by_tokens = "flux2"
    config: Flux2Config

    @classmethod
    def of_folder(cls, values: Mapping[str, Any], index: Mapping[str, Any]) -> DiffusersFlux2:
        """See `Counterpart.of_folder`."""
        found = checked(values, SIZES)
        outputs = {"out_channels": values.get("out_channels") and found["in_channels"]}
        check_fixed(values, FIXED | outputs, cls.named)
        config = Flux2Config(
            hidden_size=found["num_attention_heads"] * found["attention_head_dim"],
            num_double_layers=found["num_layers"],
            num_single_layers=found["num_single_layers"],
            num_heads=found["num_attention_heads"],
            mlp_ratio=found["mlp_ratio"],
            in_channels=found["in_channels"],
            latent_size=(LATENTS, LATENTS),
            text_tokens=TOKENS,
            text_dim=found["joint_attention_dim"],
            rope_axes=found["axes_dims_rope"],
            rope_theta=found["rope_theta"],
            guidance=GUIDANCE_SCALE if found["guidance_embeds"] else None,
        )
        return cls(config, config.in_channels)

    def layouts(self) -> dict[str, Same]:
        """See `layouts`."""
        return layouts(self.config)

    def originals(self) -> dict[str, Rows]:
        """See `originals`."""
        return originals(self.config)

    def scheduler_json(self, objective: Any) -> dict[str, Any]:
        """See `Counterpart.scheduler_json`. Refuses a network with guidance: klein's has none."""
        if self.config.guidance is not None:
            raise UserError(
                f"[model] guidance={self.config.guidance:g}: {self.pipeline} gives the network no "
                "guidance. Give --vae none for the transformer alone."
            )
        return super().scheduler_json(objective)

    def config_json(self) -> dict[str, Any]:
        """See `Counterpart.config_json`."""
        config = self.config
        hidden, _, heads, _ = config.shape
        return {
            "_class_name": self.kind,
            "_diffusers_version": self.version,
            **FIXED,
            "attention_head_dim": hidden // heads,
            "axes_dims_rope": list(config.axes),
            "guidance_embeds": config.guidance is not None,
            "in_channels": config.in_channels,
            "joint_attention_dim": config.text_dim,
            "mlp_ratio": config.mlp_ratio,
            "num_attention_heads": heads,
            "num_layers": config.num_double_layers,
            "num_single_layers": config.num_single_layers,
            "rope_theta": config.rope_theta,
        }

    def index(self, facts: LatentFacts) -> dict[str, Any]:
        """See `Counterpart.index`."""
        return {"is_distilled": False}
