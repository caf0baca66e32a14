import pytest
import torch
from torch import nn

from titan_dit.config.section import UserError
from titan_dit.optim.adamw import AdamW
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.optim.sections import AdamWConfig

GO, SKIP = torch.tensor(False), torch.tensor(True)
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def weights():
    torch.manual_seed(0)
    return {"matrix": nn.Parameter(torch.randn(4, 3)), "vector": nn.Parameter(torch.randn(5))}


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def reference(parameters):
    return torch.optim.AdamW(parameters.values(), fused=False, foreach=False, **SETTINGS)


def build(fused):
    parameters = weights()
    return parameters, build_optimizer(parameters, AdamWConfig(fused=fused, **SETTINGS), None)


def snapshot(optimizer, parameters):
    tensors = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state[p].items():
            tensors[f"{name}.{key}"] = value.clone()
    return tensors


@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_torchs_adamw(fused):
    parameters, optimizer = build(fused)
    expected = weights()
    adamw = reference(expected)
    for step in range(1, 8):
        rate = 0.02 / step
        give_gradients(parameters, step)
        give_gradients(expected, step)
        apply_gradients(optimizer, rate, skip=GO)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        for name, p in parameters.items():
            torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=1e-6)
    for name, p in parameters.items():
        for key, value in adamw.state[expected[name]].items():
            torch.testing.assert_close(optimizer.state[p][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_weights_moments_and_count_to_the_bit(fused):
    parameters, optimizer = build(fused)
    for step in (1, 2):
        give_gradients(parameters, step)
        apply_gradients(optimizer, 0.02, skip=GO)
    before = snapshot(optimizer, parameters)
    give_gradients(parameters, 3)
    for bad in (float("nan"), float("inf")):
        parameters["matrix"].grad[1, 1] = bad
        apply_gradients(optimizer, 0.02, skip=SKIP)
        give_gradients(parameters, 3)
    after = snapshot(optimizer, parameters)
    assert after.keys() == before.keys()
    assert before["matrix.step"] == 2
    for name, values in before.items():
        assert torch.equal(after[name], values), name


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_skipped_step_training_goes_on_as_if_it_had_not_been(fused):
    parameters, optimizer = build(fused)
    undisturbed, other = build(fused)
    for step, skip in ((1, SKIP), (1, GO), (2, SKIP), (2, GO), (3, GO)):
        give_gradients(parameters, step)
        apply_gradients(optimizer, 0.02, skip=skip)
        if not skip:
            give_gradients(undisturbed, step)
            apply_gradients(other, 0.02, skip=GO)
    for name, values in snapshot(other, undisturbed).items():
        assert torch.equal(snapshot(optimizer, parameters)[name], values), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skip", [GO, SKIP])
def test_gradients_are_gone_after_every_step(fused, skip):
    # Gradients of a bad step must not accumulate into the next one's.
    parameters, optimizer = build(fused)
    give_gradients(parameters, 1)
    apply_gradients(optimizer, 0.02, skip=skip)
    assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize("fused", [False, True])
def test_tensors_made_before_the_first_step_are_those_of_a_fresh_adamw(fused):
    parameters, optimizer = build(fused)
    made = optimizer_tensors(optimizer, parameters)
    assert list(made) == ["matrix", "vector"]
    assert all((value == 0).all() for state in made.values() for value in state.values())
    expected = weights()
    adamw = torch.optim.AdamW(expected.values(), fused=fused, **SETTINGS)
    for step in (1, 2):
        give_gradients(parameters, step)
        apply_gradients(optimizer, 0.02, skip=GO)
        give_gradients(expected, step)
        adamw.step()
    for name, p in parameters.items():
        assert torch.equal(p, expected[name])
        state = adamw.state[expected[name]]
        assert made[name].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(made[name][key], value)
            assert made[name][key].dtype == value.dtype


@pytest.mark.parametrize("fused", [False, True])
def test_filling_the_tensors_moves_the_state_to_another_optimizer(fused):
    parameters, optimizer = build(fused)
    for step in (1, 2, 3):
        give_gradients(parameters, step)
        apply_gradients(optimizer, 0.02, skip=GO)
    others, resumed = build(fused)
    for name, state in optimizer_tensors(resumed, others).items():
        for key, value in state.items():
            value.copy_(optimizer.state[parameters[name]][key])
        others[name].data.copy_(parameters[name])
    for each, its_optimizer in ((parameters, optimizer), (others, resumed)):
        give_gradients(each, 4)
        apply_gradients(its_optimizer, 0.02, skip=GO)
    for name, values in snapshot(optimizer, parameters).items():
        assert torch.equal(snapshot(resumed, others)[name], values), name


class WithFactors(AdamW):
    """A state that is equal on all ranks, and not of its parameter's shape."""

    def new_states(self, weights, group):
        states = super().new_states(weights, group)
        return [state | {"factor": torch.ones(3)} for state in states]


def test_a_state_that_is_no_shard_must_be_named():
    groups = AdamWConfig().grouped(weights())
    with pytest.raises(UserError, match=r"WithFactors: the state factor has the shape \[3\]"):
        WithFactors(groups, AdamWConfig().defaults)
    named = type("Named", (WithFactors,), {"whole_states": (*AdamW.whole_states, "factor")})
    made = named(groups, AdamWConfig().defaults)
    assert all("factor" in state for state in made.state.values())
