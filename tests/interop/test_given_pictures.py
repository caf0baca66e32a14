"""Networks that are given a first frame by channels, or a reference by tokens, and diffusers."""

from dataclasses import replace

import pytest
import torch

import titan_dit
from titan_dit.commands import convert
from titan_dit.commands.flags import ConvertFlags
from titan_dit.interop.diffusers_flux2 import DiffusersFlux2
from titan_dit.interop.diffusers_wan import DiffusersWan
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.wan_config import WanConfig

diffusers = pytest.importorskip("diffusers")

SIZES = {
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "num_layers": 2,
    "ffn_dim": 56,
    "text_dim": 10,
    "in_channels": 9,  # 2 noisy, 4 of the mask, 3 of the first frame: no two alike.
    "out_channels": 2,
    "cross_attn_norm": True,
}


def test_a_network_with_channels_of_a_first_frame_predicts_what_diffusers_does():
    torch.manual_seed(0)
    theirs = diffusers.WanTransformer3DModel(**SIZES, patch_size=(1, 2, 2)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    counterpart = DiffusersWan.of_folder(dict(theirs.config), {})
    assert (counterpart.config.in_channels, counterpart.config.condition_channels) == (2, 7)
    config = WanConfig(
        **{
            name: getattr(counterpart.config, name)
            for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "text_dim")
        },
        in_channels=2,
        condition_channels=7,
        latent_frames=3,
        latent_size=(4, 6),
        text_tokens=5,
    )
    ours, tensors = config.build(2), theirs.state_dict()
    state = {
        name: layout.to_ours(*(tensors[each] for each in layout.names))
        for name, layout in counterpart.layouts().items()
    }
    ours.load_state_dict(state)
    noisy, given, text = (
        torch.randn(2, 2, 3, 4, 6),
        torch.randn(2, 7, 3, 4, 6),
        torch.randn(2, 5, 10),
    )
    timestep = torch.tensor([400.0, 20.0])
    inputs = {
        "tokens": config.tokenize(noisy),
        "condition": config.tokenize(given),
        "timestep": timestep,
        "text": text,
        "text_length": torch.tensor([5, 5]),
    }
    with torch.no_grad():
        found = config.detokenize(ours(inputs, config.static(torch.device("cpu"))))
        wanted = theirs(torch.cat((noisy, given), 1), timestep, text, return_dict=False)[0]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


FLUX2 = {
    "in_channels": 6,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 10,
    "timestep_guidance_channels": 256,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}


def ids(*axes):
    """Positions of all tokens of a grid."""
    return torch.cartesian_prod(*(torch.as_tensor(axis) for axis in axes)).float()


def test_a_reference_by_tokens_is_what_diffusers_makes_of_it():
    torch.manual_seed(0)
    theirs = diffusers.Flux2Transformer2DModel(**FLUX2).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    counterpart = DiffusersFlux2.of_folder(dict(theirs.config), {})
    config = replace(counterpart.config, latent_size=(2, 3), text_tokens=5, reference_tokens=True)
    assert isinstance(config, Flux2Config)
    ours, tensors = config.build(6), theirs.state_dict()
    state = {
        name: layout.to_ours(*(tensors[each] for each in layout.names))
        for name, layout in counterpart.layouts().items()
    }
    ours.load_state_dict(state)
    noisy, reference, text = torch.randn(2, 6, 6), torch.randn(2, 6, 6), torch.randn(2, 5, 10)
    timestep = torch.tensor([400.0, 20.0])
    inputs = {"tokens": noisy, "reference": reference, "timestep": timestep, "text": text}
    inputs["text_length"] = torch.tensor([5, 5])
    pictures = [ids([time], range(2), range(3), [0]) for time in (0, 10)]
    with torch.no_grad():
        found = ours(inputs, config.static(torch.device("cpu")))
        wanted = theirs(
            torch.cat((noisy, reference), 1),
            text,
            timestep / 1000,
            img_ids=torch.cat(pictures),
            txt_ids=ids([0], [0], [0], range(5)),
            guidance=None,
            return_dict=False,
        )[0][:, :6]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_an_import_with_channels_of_a_first_frame_is_a_run_that_opens(tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"in_channels": 8}
    diffusers.WanTransformer3DModel(**sizes, patch_size=(1, 2, 2)).save_pretrained(tmp_path / "i2v")
    convert.main(ConvertFlags(input=str(tmp_path / "i2v"), out=str(tmp_path / "run")))
    run = titan_dit.load(tmp_path / "run", device="cpu")
    assert run.objective.data.reference.frame_channels == 4
    assert run.network.embed.condition.weight.shape == (48, 4 * 6)
    convert.main(ConvertFlags(input=str(tmp_path / "run"), out=str(tmp_path / "back")))
    first, again = (
        diffusers.WanTransformer3DModel.from_pretrained(tmp_path / name).state_dict()
        for name in ("i2v", "back")
    )
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
