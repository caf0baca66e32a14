"""Whole pipelines of diffusers with tiny random parts: networks, autoencoders, text encoders."""

import tempfile
from pathlib import Path

import tiny_vae
import torch
from tiny_text import CAPTIONS, save_chat_encoder, save_encoder

from titan_dit.pictures.library import diffusers, transformers

WIDTH = 24
"""Of the embeddings."""
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
ENCODERS = {
    "z_image": {"hidden_size": WIDTH, "num_hidden_layers": 3},
    # Three hidden states side by side, the last of them the 27th.
    "flux2": {"hidden_size": WIDTH // 3, "num_hidden_layers": 28},
}
WAN = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32}
WAN |= {"in_channels": 4, "out_channels": 4, "text_dim": 32}
KINDS = {"z_image": "ZImagePipeline", "flux2": "Flux2KleinPipeline"}
NAMES = tuple(KINDS)


def scrambled(module):
    """A network with random values: what diffusers initialises is in parts zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = noise + (1.0 if "norm" in name and parameter.ndim == 1 else 0.0)
    return module


def networks(library, name):
    """A random transformer of three heads of 16 channels, and the kind of autoencoder it has."""
    if name == "z_image":
        sizes = {"n_layers": 2, "n_refiner_layers": 1, "axes_dims": [8, 4, 4], "in_channels": 4}
        sizes |= {"dim": 48, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": WIDTH}
        kind, lengths = library.ZImageTransformer2DModel, {"axes_lens": [1024, 32, 32]}
        return scrambled(kind(**sizes, **lengths)), tiny_vae.save_vae
    kind = library.Flux2Transformer2DModel
    sizes = {
        "num_layers": 1,
        "num_single_layers": 2,
        "in_channels": 8,
        "joint_attention_dim": WIDTH,
    }
    heads = {"attention_head_dim": 16, "num_attention_heads": 3, "axes_dims_rope": [4, 4, 4, 4]}
    heads["guidance_embeds"] = False  # As klein.
    return scrambled(kind(**sizes, **heads)), tiny_vae.save_flux2_vae


def save_pipeline(folder, name, captions=CAPTIONS, **scheduler):
    """A pipeline as diffusers saves it; `captions` have the words of its tokenizer.

    `scheduler`: its config, a shift of 3 if there is none.
    """
    library = diffusers("the tests")
    network, save_vae = networks(library, name)
    sizes = {"latent_channels": 4, "scaling_factor": 0.7, "shift_factor": 0.2}
    with tempfile.TemporaryDirectory() as parts:
        encoder, tokenizer = save_chat_encoder(parts, captions, **HEADS | ENCODERS[name])
        vae = save_vae(Path(parts) / "vae", **sizes if name == "z_image" else {})
        kind = library.AutoencoderKL if name == "z_image" else library.AutoencoderKLFlux2
        pipeline = getattr(library, KINDS[name])(
            scheduler=library.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0} | scheduler),
            vae=kind.from_pretrained(vae),
            text_encoder=encoder,
            tokenizer=tokenizer,
            transformer=network,
        )
        pipeline.save_pretrained(folder)
    return Path(folder)


def save_wan_pipeline(folder, first_frame=False):
    """A pipeline of Wan with a tiny UMT5, which takes the words of CAPTIONS.

    `first_frame`: as I2V A14B, with two experts of 36 input channels.
    """
    library, kind = diffusers("the tests"), "UMT5EncoderModel"
    scheduler = library.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    sizes, more, kind_of_pipeline, of_vae = WAN, {}, library.WanPipeline, {}
    if first_frame:
        sizes = WAN | {"in_channels": 36, "out_channels": 16}
        of_vae = {"z_dim": 16, "latents_mean": [0.1] * 16, "latents_std": [1.5] * 16}
        kind_of_pipeline = library.WanImageToVideoPipeline
        low = scrambled(library.WanTransformer3DModel(**sizes))
        low.patch_embedding.weight.data *= 1.5
        more = {"transformer_2": low, "boundary_ratio": 0.9}
    network = library.WanTransformer3DModel(**sizes)
    with tempfile.TemporaryDirectory() as parts:
        text = save_encoder(Path(parts) / "text", kind)
        vae = tiny_vae.save_wan_vae(Path(parts) / "vae", **of_vae)
        kind_of_pipeline(
            text_encoder=getattr(transformers("the tests"), kind).from_pretrained(text),
            tokenizer=transformers("the tests").AutoTokenizer.from_pretrained(text),
            vae=library.AutoencoderKLWan.from_pretrained(vae),
            scheduler=scheduler,
            transformer=scrambled(network),
            **more,
        ).save_pretrained(folder)
    return Path(folder)


def opened(folder):
    """A saved pipeline."""
    pipeline = diffusers("the tests").DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def drawn_by(pipeline, prompts, noise, scale, **more):
    """Ten steps of a pipeline, pictures [b, h, w, 3] from 0 to 1. `scale`: --cfg-scale."""
    height, width = (side * pipeline.vae_scale_factor for side in noise.shape[2:])
    is_klein = type(pipeline).__name__ == KINDS["flux2"]
    pictures = pipeline(
        prompt=list(prompts),
        # ZImagePipeline's counts from the conditional prediction.
        guidance_scale=scale if is_klein else scale - 1,
        height=height * 2 if is_klein else height,
        width=width * 2 if is_klein else width,
        num_inference_steps=10,
        latents=noise.clone(),
        output_type="np",
        # ZImagePipeline writes its template into the lists that it is given.
        **{key: list(value) if isinstance(value, list) else value for key, value in more.items()},
    ).images
    return torch.from_numpy(pictures)
