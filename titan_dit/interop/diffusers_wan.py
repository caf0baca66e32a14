"""Wan in diffusers: folders of a `WanTransformer3DModel`, or of its pipelines.

A `WanImageToVideoPipeline` has a network with condition channels, a `WanPipeline` one without.

Wan 2.2 A14B is two networks: `transformer` draws from `boundary_ratio` up, `transformer_2` below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_dit.config.section import Dim, Few, Layers, UserError, conform, show
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.interop.diffusers_network import (
    CONFIG,
    LOW_TRANSFORMER,
    SCHEDULER,
    Prompts,
    Rows,
    TextToImage,
    check_fixed,
    checked,
    checked_shift,
    show_json,
)
from titan_dit.interop.tensor_layouts import ClipKernel, KernelPart, Same, SplitQKV, Table
from titan_dit.models.wan_config import MODULATION, WanConfig

if TYPE_CHECKING:
    from titan_dit.pictures.autoencoder import Autoencoder

FIXED = {
    "added_kv_proj_dim": None,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "freq_dim": 256,
    "image_dim": None,
    "pos_embed_seq_len": None,
    "qk_norm": "rms_norm_across_heads",
}
"""Keys of config.json and the only values that our network supports."""
SIZES = {
    "attention_head_dim": Few,
    "ffn_dim": Dim,
    "in_channels": Few,
    "num_attention_heads": Few,
    "num_layers": Layers,
    "patch_size": tuple[Few, ...],
    "text_dim": Dim,
}
"""Keys of config.json and their types."""
FRAMES, LATENTS = 21, (60, 104)
"""Latent size of an import: 81 frames of 480 x 832 pixels."""
ROPE = 1024
"""Positions on each axis that diffusers' class has angles for."""
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
"""Keys of the scheduler of the released pipelines and the only values that [objective] has."""
UNSHIFTED = (
    *("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_dynamic_shifting"),
    *("rescale_betas_zero_snr", "thresholding"),
)
"""Keys of it that must be false."""

IMAGE_PIPELINE = "WanImageToVideoPipeline"
PATCH = ("patch_embedding.weight",)
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
"""Layer in our block -> layer of the same layout in diffusers' block."""
NORMS = {
    "attn.norm.q": "attn1.norm_q",
    "attn.norm.k": "attn1.norm_k",
    "cross.norm.q": "attn2.norm_q",
    "cross.norm.k": "attn2.norm_k",
}
"""The same for the norms of queries and keys."""
FIRST_OUTER = {
    "time_embedding.0": f"{CONDITION}.time_embedder.linear_1",
    "time_embedding.2": f"{CONDITION}.time_embedder.linear_2",
    "time_projection.1": f"{CONDITION}.time_proj",
    "text_embedding.0": f"{CONDITION}.text_embedder.linear_1",
    "text_embedding.2": f"{CONDITION}.text_embedder.linear_2",
    "head.head": "proj_out",
}
"""Linear layer outside the blocks of Wan-Video/Wan2.1 -> layer in diffusers."""
FIRST_BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
"""The same for the layers of a block."""


def layouts(config: WanConfig) -> dict[str, Same]:
    """Name of our parameter -> its layout in diffusers' tensors."""
    _, layers, heads, _ = config.shape
    found: dict[str, Same] = {
        **patch_layouts(config),
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


def patch_layouts(config: WanConfig) -> dict[str, Same]:
    """Layouts of the patch embedding and, with condition channels, of their projection.

    Both are ranges of one kernel in diffusers.
    """
    names, channels, given = PATCH, config.in_channels, config.condition_channels
    kernel = ClipKernel(names, config.patch_size)
    if not given:
        return {"embed.patch.weight": kernel}
    return {
        "embed.patch.weight": KernelPart(names, kernel, 1, 0, channels, is_last=False),
        "embed.condition.weight": KernelPart(names, kernel, 1, channels, given, is_last=True),
    }


def linears(names: dict[str, str], prefix: str) -> dict[str, Same]:
    """Layouts of weights and biases. `prefix`: of their names in diffusers."""
    return {
        f"{ours}.{kind}": Same((f"{prefix}{theirs}.{kind}",))
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


class DiffusersWan(TextToImage):
    """Our Wan and its counterpart."""

    kind, pipeline, named = "WanTransformer3DModel", "WanPipeline", "Wan"
    trained_on, direction, version = WanConfig, "to_noise", "0.35.0"
    prompts = Prompts((-1,), "{}", "removed")
    has_experts = True
    exports_condition = True
    config: WanConfig

    def __init__(self, config: WanConfig, output_channels: int) -> None:
        super().__init__(config, output_channels)
        if config.condition_channels:
            self.pipeline = IMAGE_PIPELINE

    @classmethod
    def of_folder(cls, values: Mapping[str, Any], index: Mapping[str, Any]) -> DiffusersWan:
        """See `Counterpart.of_folder`. Raises UserError for another patch_size than [1, p, p]."""
        found = checked(values, SIZES)
        # I2V networks are given more channels than they predict.
        channels = conform(values.get("out_channels"), Few | None, f"{CONFIG}: out_channels")
        channels = min(channels or found["in_channels"], found["in_channels"])
        outputs = {"out_channels": values.get("out_channels") and channels}
        check_fixed(values, FIXED | outputs, cls.named)
        frames, *sides = found["patch_size"]
        if frames != 1 or len(sides) != 2 or sides[0] != sides[1]:
            raise UserError(
                f"{CONFIG}: patch_size={show_json(values['patch_size'])}; our Wan has [1, p, p]."
            )
        config = WanConfig(
            hidden_size=found["num_attention_heads"] * found["attention_head_dim"],
            num_layers=found["num_layers"],
            num_heads=found["num_attention_heads"],
            intermediate_size=found["ffn_dim"],
            patch_size=sides[0],
            in_channels=channels,
            condition_channels=found["in_channels"] - channels,
            latent_frames=FRAMES,
            latent_size=LATENTS,
            text_dim=found["text_dim"],
        )
        return cls(config, config.in_channels)

    def layouts(self) -> dict[str, Same]:
        """See `layouts`."""
        return layouts(self.config)

    def originals(self) -> dict[str, Rows]:
        """See `Counterpart.originals`: names of Wan-Video/Wan2.1."""
        found = {first: Rows((theirs,)) for first, theirs in FIRST_OUTER.items()}
        for number in range(self.config.shape[1]):
            block = f"blocks.{number}"
            for first, theirs in FIRST_BLOCK.items():
                found[f"{block}.{first}"] = Rows((f"{block}.{theirs}",))
        return found

    def check_expressible(self, as_is: bool) -> None:
        """See `Counterpart.check_expressible`."""
        super().check_expressible(as_is)
        config = self.config
        hidden, _, heads, _ = config.shape
        side = 2 * (hidden // heads // 6)
        if config.axes[1:] != (side, side) or config.rope_theta != 10000:
            raise UserError(
                f"[model] rope_axes={show(config.axes)} and rope_theta={config.rope_theta:g}: "
                f"{self.kind} has {show((hidden // heads - 2 * side, side, side))} and 10000."
            )

    def scheduler_json(self, objective: Any) -> dict[str, Any]:
        """See `Counterpart.scheduler_json`: UniPC with the shift of the run's times."""
        self.check_objective(objective)
        shift = objective.shift_of(math.prod(self.config.grid))
        return {**UNIPC, "_diffusers_version": self.version, "flow_shift": shift}

    def objective_of(self, scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
        """See `Counterpart.objective_of`. Raises UserError for keys that rectified_flow lacks."""
        if scheduler is None or scheduler.get("_class_name") != UNIPC["_class_name"]:
            return super().objective_of(scheduler)
        for key, value in UNIPC.items():
            if scheduler.get(key) != value:
                raise UserError(
                    f"{SCHEDULER}: {key}={show_json(scheduler.get(key))}; [objective] "
                    f"rectified_flow has {value!r}."
                )
        for key in UNSHIFTED:
            if scheduler.get(key):
                raise UserError(f"{SCHEDULER}: {key}={show_json(scheduler[key])}: not supported.")
        return super().objective_of(None) | {"shift": checked_shift(scheduler, "flow_shift")}

    def config_json(self) -> dict[str, Any]:
        """See `Counterpart.config_json`."""
        config = self.config
        hidden, layers, heads, patch = config.shape
        return {
            "_class_name": self.kind,
            "_diffusers_version": self.version,
            **FIXED,
            "attention_head_dim": hidden // heads,
            "ffn_dim": config.ffn,
            "in_channels": config.in_channels + config.condition_channels,
            "num_attention_heads": heads,
            "num_layers": layers,
            "out_channels": config.in_channels,
            "patch_size": [1, patch, patch],
            "rope_max_seq_len": ROPE,
            "text_dim": config.text_dim,
        }

    def check_units(self, vae: Autoencoder, facts: LatentFacts, where: str) -> None:
        """See `Counterpart.check_units`; the pipeline's condition is a clip's first frame."""
        super().check_units(vae, facts, where)
        if facts.reference and facts.reference.kind != "first_frame":
            raise UserError(
                f"{where}: the run's data hold {facts.reference}, but {self.pipeline} gives the "
                "network first frames. Give --vae none for the transformer alone."
            )

    def index(self, facts: LatentFacts) -> dict[str, Any]:
        """See `Counterpart.index`."""
        second = [None, None] if self.boundary is None else ["diffusers", self.kind]
        unused = ("image_encoder", "image_processor") if self.config.condition_channels else ()
        return {
            **{part: [None, None] for part in unused},
            "boundary_ratio": self.boundary,
            "expand_timesteps": False,
            LOW_TRANSFORMER: second,
        }
