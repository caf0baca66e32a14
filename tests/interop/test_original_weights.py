import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titan_dit.config.section import UserError
from titan_dit.interop import original_dit
from titan_dit.interop.original_dit import Original, infer
from titan_dit.models.dit_config import SIZES, DiTConfig

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "dit_reference.safetensors"
STATE = {
    name.removeprefix("model."): tensor
    for name, tensor in load_file(FIXTURE).items()
    if name.startswith("model.")
}


def originals(config, output_channels):
    """Random weights under the original's names."""
    torch.manual_seed(0)
    original = Original(config, output_channels)
    state = {name: torch.randn(shape) for name, shape in original.shapes().items()}
    return original, state | {"pos_embed": original_dit.positions(config)}


def test_every_bit_comes_back():
    original = infer(STATE, heads=4)
    back = dict(original.to_original(original.to_ours(STATE)))
    assert back.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("outputs", [3, 6])
@pytest.mark.parametrize("patch", [2, 4])
@pytest.mark.parametrize("mlp_ratio", [4.0, 2.5])
def test_our_weights_come_back_through_the_originals_names(outputs, patch, mlp_ratio):
    config = DiTConfig(
        hidden_size=48, num_layers=2, num_heads=6, patch_size=patch, mlp_ratio=mlp_ratio,
        latent_size=8,
        in_channels=3,
        num_classes=7,
    )  # fmt: skip
    original, state = originals(config, outputs)
    ours = original.to_ours(state)
    model = config.build(outputs)
    model.load_state_dict(ours)
    back = dict(original.to_original(ours))
    assert all(torch.equal(back[name], state[name]) for name in state)
    found = infer(state, heads=6)
    assert found == original
    assert found.learn_sigma == (outputs == 6)
    again = found.to_ours(back)
    assert all(torch.equal(again[name], ours[name]) for name in ours)


@pytest.mark.parametrize("size", ["S", "B", "L", "XL"])
def test_the_named_sizes_are_recognised(size):
    hidden, layers, heads = SIZES[size]
    with torch.device("meta"):
        config = DiTConfig(size=f"{size}/4", latent_size=32, in_channels=4, num_classes=1000)
        shapes = Original(config, 8).shapes()
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
    found = infer(state, heads=None)
    assert found.config == dataclasses.replace(config, size=None)
    assert found.config.shape == (hidden, layers, heads, 4)
    assert original_dit.name_of(found.config) == f"{size}/4"


def test_other_sizes_need_the_number_of_heads():
    with pytest.raises(UserError, match=r"hidden_size=48, num_layers=2 is none of S, .* --heads N"):
        infer(STATE, heads=None)
    with pytest.raises(UserError, match="is not divisible by num_heads=5"):
        infer(STATE, heads=5)


def refused(state):
    with pytest.raises(UserError) as caught:
        infer(state, heads=4).to_ours(state)
    return str(caught.value)


def test_whatever_does_not_fit_is_named():
    state = dict(STATE) | {"blocks.0.attn.extra": torch.ones(1)}
    del state["blocks.1.mlp.fc2.bias"]
    state["t_embedder.mlp.0.weight"] = torch.ones(48, 255)
    state["final_layer.linear.bias"] = torch.cat((torch.ones(31), torch.tensor([float("nan")])))
    state["x_embedder.proj.bias"] = torch.ones(48, dtype=torch.int32)
    # Kinds that become fp32; of the first one that is infinity.
    state["t_embedder.mlp.2.bias"] = torch.full((48,), 1e300, dtype=torch.float64)
    state["t_embedder.mlp.0.bias"] = torch.ones(48).to(torch.float8_e4m3fn)
    message = refused(state)
    for line in (
        "missing: blocks.1.mlp.fc2.bias",
        "unexpected: blocks.0.attn.extra",
        "wrong shape: t_embedder.mlp.0.weight is [48, 255], not [48, 256]",
        "NaN or infinity in final_layer.linear.bias",
        "NaN or infinity in t_embedder.mlp.2.bias",
        "not floating point: x_embedder.proj.bias is torch.int32",
    ):
        assert line in message


def test_a_hole_in_the_blocks_is_named():
    state = {name.replace("blocks.1.", "blocks.2."): tensor for name, tensor in STATE.items()}
    message = refused(state)
    assert "missing: blocks.1.attn.qkv.weight" in message
    assert "unexpected: blocks.2." in message


@pytest.mark.parametrize(
    "name",
    ["x_embedder.proj.weight", "pos_embed", "y_embedder.embedding_table.weight"],
)
def test_what_is_no_dit_is_said_to_be_none(name):
    state = {k: v for k, v in STATE.items() if k != name}
    assert f"{name} is missing, so this is no DiT" in refused(state)
    assert f"{name} is [5]; a DiT's has" in refused(dict(STATE) | {name: torch.ones(5)})


def test_a_kernel_of_nothing_is_no_dit():
    for shape in ((0, 4, 2, 2), (48, 4, 0, 0)):
        message = refused(dict(STATE) | {"x_embedder.proj.weight": torch.ones(shape)})
        assert "none of them 0" in message


def test_a_prefix_of_all_names_is_told():
    message = refused({f"net.{name}": tensor for name, tensor in STATE.items()})
    assert "all names have the prefix net.:" in message


def test_an_empty_state_dict_is_no_dit():
    assert "It holds no tensors" in refused({})


def test_learned_positions_are_refused():
    assert "learned position embeddings are not supported" in refused(
        dict(STATE) | {"pos_embed": STATE["pos_embed"] + 5e-4}
    )
    assert "15 is not a square" in refused(dict(STATE) | {"pos_embed": STATE["pos_embed"][:, :15]})


def test_other_output_channels_are_refused():
    wide = {"final_layer.linear.weight": torch.ones(48, 48)}
    assert "12 output channels, but a DiT with 4 latent channels" in refused(dict(STATE) | wide)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precision_become_fp32(dtype):
    half = {k: v.to(dtype) for k, v in STATE.items()}
    ours = infer(half, heads=4).to_ours(half)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    assert torch.equal(ours["head.out.bias"], half["final_layer.linear.bias"].float())


def test_a_network_the_original_does_not_have_is_not_written():
    config = DiTConfig(
        hidden_size=48,
        num_layers=1,
        num_heads=4,
        patch_size=2,
        latent_size=8,
        in_channels=4,
        num_classes=3,
        qk_norm=True,
    )
    model = config.build(8)
    with pytest.raises(UserError, match="qk_norm"):
        Original(config, 8).to_original(dict(model.named_parameters()))


def test_the_rows_of_qkv_are_those_of_each_head():
    """A round trip cannot detect a wrong permutation of rows."""
    original = infer(STATE, heads=4)
    rows = original.to_ours(STATE)["blocks.0.attn.qkv.weight"]
    theirs = STATE["blocks.0.attn.qkv.weight"]
    head_dim = 12
    for head in range(4):
        for part in range(3):
            ours_row, their_row = (head * 3 + part) * head_dim, (part * 4 + head) * head_dim
            assert torch.equal(rows[ours_row : ours_row + 12], theirs[their_row : their_row + 12])


def test_moments_move_with_their_weights():
    original = infer(STATE, heads=4)
    names = [name for name in STATE if name != "pos_embed"]
    moments = {
        name: {"step": torch.tensor(9), "exp_avg": STATE[name], "exp_avg_sq": STATE[name] ** 2}
        for name in names
    }
    ours, weights = original.adam_to_ours(moments), original.to_ours(STATE)
    assert ours.keys() == weights.keys()
    for name, state in ours.items():
        assert torch.equal(state["exp_avg"], weights[name])
        assert torch.equal(state["exp_avg_sq"], weights[name] ** 2)
        assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
        assert state["step"] == 9
    del moments["final_layer.linear.bias"]
    with pytest.raises(UserError, match=r"missing: final_layer\.linear\.bias"):
        original.adam_to_ours(moments)
