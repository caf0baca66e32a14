"""DiTs of diffusers: folders of a `DiTTransformer2DModel`, or of a whole `DiTPipeline`.

They differ from ours in more than names. qkv is three weights. Every block holds a copy of the
embedders of timestep and label. Their patch convolution is our linear weight. The pipeline guides
with class 1000, so the label table has 1,001 rows: the rows after our classes are copies of the
null row. Timestep frequencies divide by 127, the original's by 128.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_dit.config.section import MOST, UserError, show
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.diffusion.noise_schedule import named
from titan_dit.diffusion.samplers.from_diffusers import PREDICTIONS, betas, config_of_flow
from titan_dit.interop import imported
from titan_dit.interop.diffusers_network import (
    CONFIG,
    INDEX,
    SCHEDULER,
    TRANSFORMER,
    Counterpart,
)
from titan_dit.interop.original_dit import SCALE
from titan_dit.interop.tensor_file import OnDemand
from titan_dit.interop.tensor_layouts import ConvKernel, Copies, FilledTable, Same, SplitQKV
from titan_dit.models.dit_config import DiTConfig

if TYPE_CHECKING:  # Most imports have no autoencoder.
    from titan_dit.pictures.autoencoder import Autoencoder

KIND, PIPELINE = "DiTTransformer2DModel", "DiTPipeline"
OLD_KIND = "Transformer2DModel"
"""Class name of a DiT in older releases and in the published weights; other networks have it,
too."""
ROWS = 1001
"""Rows of the label table: 1,000 classes and the null class, class 1000 of the pipeline."""
VERSION = "0.35.0"
"""The oldest release of diffusers that reads the written folders."""
FIXED = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
    "norm_type": "ada_norm_zero",
}
"""Keys of config.json and the only values that our network supports."""
OUTER = {"head.modulation": "proj_out_1", "head.out": "proj_out_2"}
INNER = {
    "modulation": "norm1.linear",
    "attn.out": "attn1.to_out.0",
    "mlp.up": "ff.net.0.proj",
    "mlp.down": "ff.net.2",
}
EMBEDDERS = {"up": "linear_1", "down": "linear_2"}
KINDS = ("weight", "bias")
PATCH, TABLE = "embed.patch.weight", "embed.label.table.weight"
THEIR_PATCH = "pos_embed.proj"


@dataclass(frozen=True)
class DiffusersDiT(Counterpart):
    """Our DiT and its counterpart in diffusers."""

    kind = KIND
    pipeline = PIPELINE
    trained_on = DiTConfig
    version = VERSION
    named = "a DiT"
    config: DiTConfig
    output_channels: int
    rows: int = ROWS
    """Rows of the label table."""
    names: tuple[str, ...] = ()
    """Names of the classes of a pipeline; empty without one."""

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        """See `Counterpart.is_of`."""
        kind = values.get("_class_name")
        return kind == KIND or (kind == OLD_KIND and values.get("norm_type") == FIXED["norm_type"])

    @classmethod
    def of_folder(cls, values: Mapping[str, Any], index: Mapping[str, Any]) -> DiffusersDiT:
        """See `Counterpart.of_folder`."""
        names = class_names(index.get("id2label") or {})
        return replace(config_of(values, len(names) or None), names=names)

    @classmethod
    def of_run(cls, config: DiTConfig, objective: Any) -> DiffusersDiT:
        """See `Counterpart.of_run`."""
        return cls(config, objective.output_channels(config.in_channels))

    def block(self, layer: int) -> str:
        """Prefix of a block's names."""
        return f"transformer_blocks.{layer}"

    def embedder(self, layer: int) -> str:
        """Prefix of the names of a block's copies of the embedders."""
        return f"{self.block(layer)}.norm1.emb"

    def layouts(self) -> dict[str, Same]:
        """Name of our parameter -> its layout in diffusers' tensors."""
        _, layers, heads, patch = self.config.shape
        found: dict[str, Same] = {PATCH: ConvKernel((f"{THEIR_PATCH}.weight",), patch)}
        found["embed.patch.bias"] = Same((f"{THEIR_PATCH}.bias",))
        tables = tuple(self.table(layer) for layer in range(layers))
        found[TABLE] = FilledTable(tables, self.config.num_classes, self.rows)
        for kind in KINDS:
            found |= {f"{k}.{kind}": Same((f"{v}.{kind}",)) for k, v in OUTER.items()}
            for k, v in EMBEDDERS.items():
                copies = (f"{self.embedder(i)}.timestep_embedder.{v}.{kind}" for i in range(layers))
                found[f"embed.timestep.{k}.{kind}"] = Copies(tuple(copies))
            for layer in range(layers):
                block, ours = self.block(layer), f"blocks.{layer}"
                qkv = tuple(f"{block}.attn1.to_{part}.{kind}" for part in "qkv")
                found[f"{ours}.attn.qkv.{kind}"] = SplitQKV(qkv, heads)
                found |= {
                    f"{ours}.{k}.{kind}": Same((f"{block}.{v}.{kind}",)) for k, v in INNER.items()
                }
        return found

    def table(self, layer: int) -> str:
        """Name of a block's copy of the label table."""
        return f"{self.embedder(layer)}.class_embedder.embedding_table.weight"

    def to_ours(self, theirs: OnDemand) -> OnDemand:
        """Convert diffusers' tensors to our fp32 parameters; UserError on a mismatch.

        Refuses blocks with other embedders than the first one's, and a table whose rows after our
        classes are not all the null row.
        """
        outline = {n: t for n, t in theirs.outline.items() if n != "pos_embed.pos_embed"}
        kept = OnDemand(outline, theirs.get_tensor)
        found = super().to_ours(kept)
        self.check_copies(kept)
        return found

    def check_copies(self, theirs: Mapping[str, Tensor]) -> None:
        """Raise UserError unless all blocks' embedders and all rows after our classes are equal."""
        first = self.embedder(0)
        for name in [name for name in theirs if name.startswith(first)]:
            tensor = theirs[name]
            for layer in range(1, self.config.shape[1]):
                if not torch.equal(theirs[self.embedder(layer) + name[len(first) :]], tensor):
                    raise UserError(
                        f"{name} differs from that of block {layer}, but our DiT has one embedder "
                        "for all blocks. Give a DiT whose blocks share theirs."
                    )
        behind = theirs[self.table(0)][self.config.num_classes :]
        if not torch.equal(behind, behind[:1].expand_as(behind)):
            raise UserError(
                f"{self.table(0)}: the rows from {self.config.num_classes} on differ, so there are "
                "more classes than its id2label names. Name them all, or import "
                f"{TRANSFORMER}/ alone."
            )

    def objective_of(self, scheduler: Mapping[str, Any] | None) -> dict[str, Any]:
        """See `Counterpart.objective_of`: without a scheduler DDPM, as released weights."""
        learn_sigma = self.output_channels == 2 * self.config.in_channels
        if scheduler is None:
            return {"name": "ddpm", "learn_sigma": learn_sigma}
        return objective_of(scheduler, learn_sigma)

    def scheduler_json(self, objective: Any) -> dict[str, Any]:
        """See `Counterpart.scheduler_json`."""
        return scheduler_json(objective)

    def facts(self, vae: Autoencoder | None, scale: float | None) -> LatentFacts:
        """See `Counterpart.facts`.

        Raises UserError for an autoencoder with a scale per channel, or a shift.
        """
        facts = LatentFacts(
            shape=self.config.sample_shape,
            count=0,
            num_classes=self.config.num_classes,
            class_names=self.names,
            scale=scale or SCALE,
        )
        if vae is None:
            return facts
        if isinstance(vae.scale, tuple) or vae.shift != 0.0:
            raise UserError(
                f"the latents of its vae have scale {shown(vae.scale)} and shift "
                f"{shown(vae.shift)}, but DiTPipeline has one scale for all channels and no shift. "
                f"Import {TRANSFORMER}/ alone, with --scale."
            )
        return replace(facts, scale=scale or vae.scale, vae=vae.facts, vae_source=vae.source)

    def tables(self) -> dict[str, dict[str, Any]]:
        """See `Counterpart.tables`."""
        return imported.dit_tables(self.config)

    def check_units(self, vae: Autoencoder, facts: LatentFacts, where: str) -> None:
        """See `Counterpart.check_units`."""
        if isinstance(facts.scale, tuple) or facts.shift != 0.0 or vae.shift != 0.0:
            raise UserError(
                f"{where}: the latents have scale {shown(facts.scale)} and shift "
                f"{shown(facts.shift)}, but DiTPipeline has one scale for all channels and no "
                "shift. Give --vae none for the transformer alone."
            )
        if vae.scale != facts.scale:
            raise UserError(
                f"{where}: its scaling_factor is {vae.scale}, but the run's latents have scale "
                f"{shown(facts.scale)}, and DiTPipeline takes the autoencoder's. Give --vae none "
                "for the transformer alone."
            )

    def index(self, facts: LatentFacts) -> dict[str, Any]:
        """See `Counterpart.index`."""
        names = facts.class_names or map(str, range(self.config.num_classes))
        return {"id2label": {str(number): name for number, name in enumerate(names)}}

    def check_expressible(self, as_is: bool) -> None:
        """See `Counterpart.check_expressible`."""
        check_expressible(self.config, as_is)

    def config_json(self) -> dict[str, Any]:
        """The transformer's config.json."""
        hidden, layers, heads, patch = self.config.shape
        return {
            "_class_name": KIND,
            "_diffusers_version": VERSION,
            **FIXED,
            "attention_head_dim": hidden // heads,
            "dropout": 0.0,
            "in_channels": self.config.in_channels,
            "norm_eps": EPS,
            "norm_num_groups": 32,
            "num_attention_heads": heads,
            "num_embeds_ada_norm": self.rows - 1,
            "num_layers": layers,
            "out_channels": self.output_channels,
            "patch_size": patch,
            "sample_size": self.config.latent_size,
            "upcast_attention": False,
        }


EPS = 1e-6
"""Epsilon of the layer norms, as in our DiT. Released weights have 1e-5, which hardly matters."""
LARGEST_EPS = 1e-5


def check_expressible(config: DiTConfig, as_is: bool) -> None:
    """Raise UserError for keys of [model] that DiTTransformer2DModel does not support."""
    if config.condition_channels:
        raise UserError(
            f"[model] condition_channels={config.condition_channels}: diffusers' DiT is given no "
            "further channels. Keep the run's checkpoint."
        )
    if config.qk_norm:
        raise UserError(
            "[model] qk_norm=true: diffusers' DiT has no QK norm layers. Train with qk_norm = "
            "false."
        )
    if config.ffn != 4 * config.shape[0]:
        raise UserError(
            f"[model] mlp_ratio={config.mlp_ratio:g}: diffusers' DiT has 4 only. Train with "
            "mlp_ratio = 4."
        )
    if config.num_classes > ROWS - 1:
        raise UserError(
            f"[model] num_classes={config.num_classes}: DiTPipeline has {ROWS - 1}. Train with at "
            "most so many."
        )
    if config.timestep_frequencies == "dit" and not as_is:
        raise UserError(
            '[model] timestep_frequencies="dit": in the exponents of the frequencies diffusers '
            "divides by 127, the original DiT by 128, so the same weights predict something "
            'else there. Train with timestep_frequencies = "diffusers", or give --as-is.'
        )


def config_of(values: Mapping[str, Any], num_classes: int | None) -> DiffusersDiT:
    """Our config for a transformer's config.json. UserError for unsupported values."""
    for key, value in FIXED.items():
        if values.get(key, value) != value:
            raise UserError(
                f"{CONFIG}: {key}={values[key]!r}; our DiT has {value!r}. Give a network with that."
            )
    try:
        heads, channels = int(values["num_attention_heads"]), int(values["in_channels"])
        classes, eps = int(values["num_embeds_ada_norm"]), float(values.get("norm_eps", 1e-5))
        config = DiTConfig(
            hidden_size=heads * int(values["attention_head_dim"]),
            num_layers=int(values["num_layers"]),
            num_heads=heads,
            patch_size=int(values["patch_size"]),
            latent_size=int(values["sample_size"]),
            in_channels=channels,
            num_classes=num_classes or classes,
            timestep_frequencies="diffusers",
        )
        outputs = int(values.get("out_channels") or channels)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{CONFIG} lacks a size, or has a wrong one ({error}). Restore the file."
        ) from None
    if not 0 < classes <= MOST:
        raise UserError(
            f"{CONFIG}: num_embeds_ada_norm={classes} must be from 1 to {MOST:,}. Restore the file."
        )
    if outputs not in (channels, 2 * channels):
        raise UserError(
            f"{CONFIG}: out_channels={outputs}; our DiT has in_channels={channels}, or twice as "
            "many. Give a network with one of these."
        )
    if eps > LARGEST_EPS:
        raise UserError(
            f"{CONFIG}: norm_eps={eps:g} is above {LARGEST_EPS:g}; ours is {EPS:g}. Give a network "
            "with at most that."
        )
    if config.num_classes > classes:
        raise UserError(
            f"{CONFIG}: num_embeds_ada_norm={classes}, but id2label names {num_classes} classes. "
            f"Correct {INDEX}, or import {TRANSFORMER}/ alone."
        )
    return DiffusersDiT(config, outputs, classes + 1)


def scheduler_json(objective: Any) -> dict[str, Any]:
    """Config of the scheduler that samples an objective's models. UserError if there is none.

    DDIM for DDPM, DPM-Solver++ on flow sigmas for rectified flow (with shift 1).
    """
    if objective.name == "rectified_flow":
        if (objective.direction, objective.time_scale) != ("to_noise", 1000.0):
            raise UserError(
                f"[objective] direction={show(objective.direction)}, "
                f"time_scale={objective.time_scale:g}: the schedulers of DiTPipeline give the "
                "network 1000 times the share of noise, and follow its prediction towards noise. "
                'Only direction = "to_noise", time_scale = 1000 can be exported as a pipeline. '
                "Give --vae none for the transformer alone."
            )
        name = "DPMSolverMultistepScheduler"
        flow = config_of_flow(name, ("use_flow_sigmas",))
        assert flow is not None
        return {"_class_name": name, "_diffusers_version": VERSION, **flow}
    if objective.name != "ddpm":
        raise UserError(
            f"[objective] name={show(objective.name)}: a pipeline has schedulers for ddpm and "
            "rectified_flow only. Give --vae none for the transformer alone."
        )
    schedule = named(objective.noise_schedule, objective.steps)
    return {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": VERSION,
        "clip_sample": False,
        "num_train_timesteps": len(schedule),
        "prediction_type": PREDICTIONS[objective.prediction],
        "trained_betas": betas(schedule),
    }


def objective_of(scheduler: Mapping[str, Any], learn_sigma: bool) -> dict[str, Any]:
    """The [objective] table for a pipeline's scheduler. UserError for unsupported noise levels."""
    for key in ("rescale_betas_zero_snr", "invert_sigmas"):
        if scheduler.get(key):
            raise UserError(
                f"{SCHEDULER}: {key}=true: we have no such noise levels. Import {TRANSFORMER}/ "
                "alone."
            )
    prediction = scheduler.get("prediction_type", "epsilon")
    name = str(scheduler.get("_class_name"))
    try:
        steps = int(scheduler.get("num_train_timesteps", 1000))
        schedule, time_scale = noise_of(scheduler, steps), float(steps)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{SCHEDULER} has a wrong number ({error}). Restore the file, or import "
            f"{TRANSFORMER}/ alone."
        ) from None
    is_flow = scheduler.get("use_flow_sigmas") and prediction == "flow_prediction"
    if is_flow or name.startswith("FlowMatch"):
        # Its timesteps are t x num_train_timesteps.
        return {
            "name": "rectified_flow",
            "time_scale": time_scale,
            "learn_sigma": learn_sigma,
        }
    kinds = {value: key for key, value in PREDICTIONS.items()}
    if prediction not in kinds or schedule is None or scheduler.get("use_flow_sigmas"):
        raise UserError(
            f"{SCHEDULER}: {name} with prediction_type={prediction!r}, "
            f"beta_schedule={scheduler.get('beta_schedule')!r} and its betas; there are "
            f"{', '.join(kinds)}, and the linear and the cosine schedule. With use_flow_sigmas "
            f"there is flow_prediction. Import {TRANSFORMER}/ alone."
        )
    return {
        "name": "ddpm",
        "noise_schedule": schedule,
        "steps": steps,
        "prediction": kinds[prediction],
        "learn_sigma": learn_sigma,
    }


def noise_of(scheduler: Mapping[str, Any], steps: int) -> str | None:
    """Name of a scheduler's noise schedule; None without betas, and if it is not supported."""
    given = scheduler.get("trained_betas")
    if given is None:
        cosine = scheduler.get("beta_schedule") == "squaredcos_cap_v2"
        if cosine or scheduler.get("beta_schedule") == "linear":
            first, last = (scheduler.get(f"beta_{end}") for end in ("start", "end"))
            known = cosine or (first in (None, 1e-4) and last in (None, 0.02) and steps == 1000)
            return ("cosine" if cosine else "linear") if known else None
        return None
    for name in ("linear", "cosine"):
        own = betas(named(name, steps))
        if len(own) == len(given) and max(map(abs, map(operator.sub, own, given))) < 1e-6:
            return name
    return None


def class_names(labels: Any) -> tuple[str, ...]:
    """The names in label order; () if there is none. Raises UserError for a gap."""
    if not isinstance(labels, dict) or labels.keys() != {str(i) for i in range(len(labels))}:
        raise UserError(
            f"{INDEX}: id2label must name the classes from 0 on, without a gap. Correct it, or "
            f"import {TRANSFORMER}/ alone."
        )
    return tuple(str(labels[str(number)]) for number in range(len(labels)))
