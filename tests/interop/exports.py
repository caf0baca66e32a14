"""Tiny runs of the networks that diffusers has, and tiny autoencoders, to be exported."""

from dataclasses import replace
from pathlib import Path

import tiny_vae
import torch

from titan_dit.commands import convert
from titan_dit.commands.flags import ConvertFlags
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.fits import text_example
from titan_dit.interop import diffusers_network, imported
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.wan_config import WanConfig
from titan_dit.models.z_image_config import ZImageConfig
from titan_dit.pictures import autoencoder

CPU = torch.device("cpu")
CLASSES = 7
NAMES = tuple(f"kind {number}" for number in range(CLASSES))
SIZES = {
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "patch_size": 2,
    "latent_size": 8,
    "in_channels": 4,
}
OBJECTIVES = {
    "ddpm": {"name": "ddpm"},
    "cosine v": {
        "name": "ddpm",
        "noise_schedule": "cosine",
        "prediction": "v",
        "learn_sigma": False,
    },
    "flow": {"name": "rectified_flow"},
    "flow with learn_sigma": {"name": "rectified_flow", "learn_sigma": True},
    "sit": {"name": "rectified_flow", "direction": "to_data", "time_scale": 1.0},
}


def save_vae(folder):
    """A tiny autoencoder of random weights, without a shift, as DiTPipeline's."""
    sizes = {"latent_channels": 4, "sample_size": 16, "scaling_factor": 0.7}
    return Path(tiny_vae.save_vae(folder, **sizes, shift_factor=None))


def save_run(folder, vae, objective, **model):
    """A checkpoint of random weights, with an average that differs from them."""
    known = autoencoder.load(str(vae), CPU)
    sizes = SIZES | {"num_classes": CLASSES, "timestep_frequencies": "diffusers"} | model
    config = DiTConfig(**sizes)
    path = OBJECTIVES[objective]
    outputs = 8 if path.get("learn_sigma", path["name"] == "ddpm") else 4
    torch.manual_seed(0)
    average, last = (
        {name: torch.randn_like(p) * 0.1 for name, p in config.build(outputs).named_parameters()}
        for _ in range(2)
    )
    shape = {
        "latent_size": sizes["latent_size"],
        "channels": sizes["in_channels"],
        "num_classes": sizes["num_classes"],
    }
    facts = LatentFacts(
        shape=config.sample_shape,
        count=0,
        num_classes=CLASSES,
        class_names=NAMES,
        scale=known.scale,
        vae=known.facts,
        vae_source=str(vae),
    )
    tables = {
        "model": {"name": "dit", **sizes},
        "objective": path,
        "data": {"name": "synthetic", **shape},
    }
    tensors = {"model": last, "ema": {imported.EMA_DECAY: average}}
    imported.save(folder, tensors, imported.record_of(tables, facts))
    return folder


def converted(source, target, **flags):
    """`convert`; the target's path."""
    convert.main(ConvertFlags(input=str(source), out=str(target), **flags))
    return Path(target)


Z_IMAGE = {
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_heads": 3,
    "rope_axes": (8, 4, 4),
    "in_channels": 4,
    "latent_size": (8, 12),
    "text_dim": 20,
    "text_tokens": 32,
}
FLUX2 = {
    "hidden_size": 48,
    "num_double_layers": 1,
    "num_single_layers": 2,
    "num_heads": 3,
    "in_channels": 8,
    "latent_size": (4, 6),
    "text_dim": 20,
    "text_tokens": 11,
}
WAN = {
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 60,
    "in_channels": 4,
    "latent_frames": 2,
    "latent_size": (4, 8),
    "text_dim": 20,
    "text_tokens": 24,
}
NETWORKS = {
    "z_image": (ZImageConfig, Z_IMAGE),
    "flux2": (Flux2Config, FLUX2),
    "wan": (WanConfig, WAN),
}
DIRECTIONS = {"z_image": "to_data", "flux2": "to_noise", "wan": "to_noise"}


def save_network(folder, name, vae, objective=None, seed=0, **model):
    """A checkpoint of random weights, with an average that differs from them."""
    kind, sizes = NETWORKS[name]
    known, config = autoencoder.load(str(vae), CPU), kind(**sizes | model)
    generator = torch.Generator().manual_seed(seed)

    def drawn(parameters):
        for key, parameter in parameters:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            yield key, values + float(key.endswith(("norm.weight", "norm.q", "norm.k")))

    average, last = (
        dict(drawn(config.build(config.in_channels).named_parameters())) for _ in range(2)
    )
    found = diffusers_network.class_of(name)(config, config.in_channels)
    facts = replace(found.facts(known, None), text=text_example(config))
    flow = {"name": "rectified_flow", "direction": DIRECTIONS[name], **(objective or {})}
    record = imported.record_of({**found.tables(), "objective": flow}, facts)
    imported.save(folder, {"model": last, "ema": {imported.EMA_DECAY: average}}, record)
    return folder
