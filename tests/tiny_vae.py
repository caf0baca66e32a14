"""A tiny autoencoder of random weights, as diffusers saves one."""

from importlib.util import find_spec

import pytest
import torch

from titan_dit.pictures import library


def save_vae(folder, seed=0, **config):
    """A random AutoencoderKL: 2x, 2 channels; its log variances are not near 0.

    Without diffusers the test is skipped.
    """
    if find_spec("diffusers") is None:
        pytest.skip("needs diffusers")
    torch.manual_seed(seed)
    sizes = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (4, 4),
        "layers_per_block": 1,
        "latent_channels": 2,
        "norm_num_groups": 2,
        "sample_size": 8,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
    }
    vae = library.diffusers("the tests").AutoencoderKL(**(sizes | config))
    with torch.no_grad():
        vae.quant_conv.bias[vae.config.latent_channels :] = -3
    vae.save_pretrained(folder)
    return str(folder)


def save_flux2_vae(folder, seed=0, **config):
    """A random AutoencoderKLFlux2: 2x and 2 channels, so 4x and 8 of ours; `bn` is not trivial."""
    if find_spec("diffusers") is None:
        pytest.skip("needs diffusers")
    torch.manual_seed(seed)
    sizes = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (4, 4),
        "layers_per_block": 1,
        "latent_channels": 2,
        "norm_num_groups": 2,
        "sample_size": 8,
    }
    vae = library.diffusers("the tests").AutoencoderKLFlux2(**(sizes | config))
    with torch.no_grad():
        vae.quant_conv.bias[vae.config.latent_channels :] = -3
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    vae.save_pretrained(folder)
    return str(folder)


def save_wan_vae(folder, seed=0, **config):
    """A random AutoencoderKLWan: 4x in space and in time, 4 channels with units of their own."""
    if find_spec("diffusers") is None:
        pytest.skip("needs diffusers")
    torch.manual_seed(seed)
    sizes = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [0.5, 1.0, 2.0, 1.5],
        "scale_factor_spatial": 4,
    }
    vae = library.diffusers("the tests").AutoencoderKLWan(**(sizes | config))
    with torch.no_grad():
        vae.quant_conv.bias[vae.config.z_dim :] = -3
    vae.save_pretrained(folder)
    return str(folder)
