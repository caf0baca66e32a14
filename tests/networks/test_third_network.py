"""A third network of one file, one plan and one exchange file (docs/adding/model.md)."""

import pytest
import torch
from harness import on_ranks
from longcat_exchange import DiffusersLongCat
from longcat_image import LongCatConfig
from tiny import assert_same_gradients, gradients, randomize
from tiny_joint import NETWORKS, joint_config
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.commands import convert
from titan_dit.commands.flags import ConvertFlags
from titan_dit.interop import diffusers_network
from titan_dit.interop.tensor_file import OnDemand
from titan_dit.interop.tensor_layouts import to_ours
from titan_dit.parallel.init import put
from titan_dit.pictures.library import diffusers
from titan_dit.trainer import Trainer

CPU = torch.device("cpu")
AXES = (4, 6, 6)
SIZES = {
    "hidden_size": 32,
    "num_double_layers": 2,
    "num_single_layers": 2,
    "num_heads": 2,
    "in_channels": 3,
    "latent_size": (8, 12),
    "text_tokens": 8,
    "text_dim": 12,
    "rope_axes": AXES,
}
PLAN = {"tensor_plan": "longcat_plan:plan"}
LAYOUTS = [
    {"tp": 2} | PLAN,
    {"tp": 2, "sequence_parallel": False} | PLAN,
    {"cp": 2},
    {"cp": 2, "cp_method": "ulysses"},
    {"pp": 2},
    {"dp_shard": 2},
]


@pytest.fixture(scope="module")
def theirs():
    network = diffusers("the test").LongCatImageTransformer2DModel(
        in_channels=12,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=list(AXES),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
    return network


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_prediction_and_gradients_are_those_of_diffusers(theirs):
    config = LongCatConfig(**SIZES)
    exchange = DiffusersLongCat(config, 3)
    model = config.build(3)
    state = theirs.state_dict()
    ours = exchange.to_ours(OnDemand(state, state.__getitem__))
    model.load_state_dict({name: ours[name] for name in ours})
    latents, text, t = drawn(2, 3, 8, 12), drawn(2, 8, 12, seed=2), torch.tensor([0.3, 0.8])
    packed = latents.view(2, 3, 4, 2, 6, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 24, 12)
    index = torch.arange(8.0)
    rows, columns = 8 + torch.arange(4.0), 8 + torch.arange(6.0)
    expected = theirs(
        hidden_states=packed,
        encoder_hidden_states=text,
        timestep=t,
        img_ids=torch.cartesian_prod(torch.ones(1), rows, columns),
        txt_ids=torch.stack((torch.zeros(8), index, index), -1),
    ).sample
    expected = expected.view(2, 4, 6, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)
    inputs = {
        "tokens": config.tokenize(latents),
        "timestep": 1000 * t,
        "text": text,
        "text_length": torch.full((2,), 8),
    }
    found = config.detokenize(model(inputs, config.static(CPU)))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    weight = drawn(*latents.shape, seed=3)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    given = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    wanted = to_ours(exchange.layouts(), given, exchange.parameters)
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(own, {name: wanted[name] for name in own}, 1e-5)


def test_weights_come_back_bit_for_bit_through_convert(theirs, tmp_path, monkeypatch):
    row = {"longcat_image": "longcat_exchange:DiffusersLongCat"}
    monkeypatch.setattr(diffusers_network, "NETWORKS", diffusers_network.NETWORKS | row)
    from titan_dit.config import catalog

    models = catalog.SECTIONS["model"]
    monkeypatch.setitem(models, "longcat_image", "longcat_image:LongCatConfig")
    theirs.save_pretrained(tmp_path / "theirs")
    for source, target in (("theirs", "ours"), ("ours", "back")):
        paths = str(tmp_path / source), str(tmp_path / target)
        convert.main(ConvertFlags(input=paths[0], out=paths[1], trust=source == "ours"))
    again = type(theirs).from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_its_flops_are_those_that_torch_counts():
    config = LongCatConfig(**SIZES)
    model, flops = config.build(3), config.flops(3, 8, 24)
    inputs = {
        "tokens": config.tokenize(drawn(1, 3, 8, 12)),
        "timestep": torch.tensor([300.0]),
        "text": drawn(1, 8, 12),
        "text_length": torch.tensor([8]),
    }
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(inputs, config.static(CPU)).sum().backward()
    kinds = sum(flops[kind] for kind in config.kinds)
    assert counter.get_total_flops() == flops["embed"] + kinds + flops["head"]


NETWORKS["longcat_image"] = {
    "model": {"name": "longcat_image:LongCatConfig", **SIZES},
    "data": {"channels": 3},
}


def config_of(parallel):
    return joint_config("longcat_image", parallel=parallel, training={"microbatch_size": 2})


def step_of(world, layouts):
    """Loss and gradients of a step from the same weights, under each layout."""
    found = []
    for parallel in layouts:
        trainer = Trainer(config_of(parallel), world)
        weights = {name: torch.empty(p.shape) for name, p in trainer.parameters.items()}
        randomize(weights)
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                put(parameter, weights[name])
        found.append(gradients(trainer))
    return found


def test_every_layout_gives_what_one_process_gives():
    [[(loss, expected)]] = on_ranks(1, step_of, [{}])
    ranks = on_ranks(2, step_of, LAYOUTS)
    for number, parallel in enumerate(LAYOUTS):
        found = {name: g for rank in ranks for name, g in rank[number][1].items()}
        assert ranks[0][number][0] == pytest.approx(loss, rel=1e-6), parallel
        assert_same_gradients(found, expected, 2e-6)
