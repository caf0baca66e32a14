"""Tests that need a CUDA device; skipped without one."""

import math

import pytest
import torch
from harness import on_ranks
from tiny import randomize, tiny_config, whole

from titan_dit.models import initializers
from titan_dit.ranks.stop_request import Reason, StopRequest
from titan_dit.recovery.replicas import digest
from titan_dit.rng import SampleRNG
from titan_dit.system.host_copy import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_random_numbers_are_those_of_the_cpu():
    numbers = torch.arange(5)
    there, here = SampleRNG(3, numbers.cuda()), SampleRNG(3, numbers)
    assert torch.equal(there.uniform("t", (64,)).cpu(), here.uniform("t", (64,)))
    noise = there.normal("noise", (64, 16)).cpu()
    torch.testing.assert_close(noise, here.normal("noise", (64, 16)), rtol=1e-5, atol=1e-5)


def test_a_stop_is_heard_a_step_later_and_nothing_waits_for_the_device_before():
    stop = StopRequest(2, torch.device("cuda"))
    # Pinned memory for the copies below: to allocate it waits for the device.
    HostCopy(torch.zeros((), dtype=torch.float64, device="cuda")).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert not stop.agreed()
        stop.ask(Reason.STOP)
        torch.cuda._sleep(10**8)  # The device lags behind.
        stop.flag().add_(0)
        assert not stop.agreed()
        stop.flag()
        assert not stop.copies[0].copied.query()
        assert stop.agreed()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stop.reason == Reason.STOP


def test_a_copy_to_the_host_does_not_wait_for_work_that_is_queued_later():
    values = torch.arange(1000, device="cuda") * 2
    HostCopy(values).read()  # Pinned memory: to allocate it waits for the device.
    copy = HostCopy(values)
    torch.cuda._sleep(10**8)
    assert torch.equal(copy.read(), torch.arange(1000) * 2)
    assert not torch.cuda.current_stream().query()


def test_initial_weights_are_those_of_the_cpu_to_the_bit():
    shape, elements = torch.Size((300, 500)), torch.arange(150_000)
    for initializer in (initializers.normal(0.02), initializers.xavier_uniform):
        there = initializer.values(shape, 3, elements.cuda())
        assert torch.equal(there.cpu(), initializer.values(shape, 3, elements))


def test_a_digest_is_that_of_the_cpu():
    tensor = torch.randn(2**22 + 5)  # More than a chunk of either device.
    assert digest(tensor.cuda()[: 2**15]).item() == digest(tensor[: 2**15]).item()
    changed = tensor.cuda()
    changed[-1] += 1
    assert digest(changed) != digest(tensor.cuda())


def three_steps(world, device_type, poisoned, objective):
    """Three steps of fp32 training, the second of them with a NaN if `poisoned`."""
    from titan_dit.ranks.process_group import World
    from titan_dit.trainer import Trainer

    config = tiny_config(objective={"name": objective})
    trainer = Trainer(config, World(world.rank, world.size, torch.device(device_type)))
    randomize_on(trainer)
    batches, losses, weights = trainer.batches(), [], []
    for trainer.step in (1, 2, 3):
        batch = next(batches)
        if poisoned and trainer.step == 2:
            batch.fields["latent"][0] = math.nan
        loss, _, _ = trainer.train_step(batch)
        losses.append(loss.item())
        weights.append({name: whole(p).cpu() for name, p in trainer.parameters.items()})
    trainer.guard.read(trainer.mesh.sum_loss)
    return losses, weights, trainer.guard.nan_steps


def randomize_on(trainer):
    """`tiny.randomize`, whose values are drawn on the CPU."""
    with torch.no_grad():
        moved = {name: p.cpu() if p.is_cuda else p for name, p in trainer.parameters.items()}
        randomize(moved)
        for name, p in trainer.parameters.items():
            p.copy_(moved[name])


def run_on(device_type, poisoned=False, objective="rectified_flow"):
    if device_type == "cuda":
        from titan_dit.ranks import process_group

        with process_group.start("cuda") as world:
            return three_steps(world, "cuda", poisoned, objective)
    return on_ranks(1, three_steps, "cpu", poisoned, objective)[0]


@pytest.mark.parametrize("objective", ["rectified_flow", "ddpm"])
def test_training_gives_the_losses_of_the_cpu(objective):
    found, expected = (run_on(device, objective=objective)[0] for device in ("cuda", "cpu"))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_nan_is_skipped_by_the_fused_optimizer():
    _, (first, second, third), nan_steps = run_on("cuda", poisoned=True)
    assert nan_steps == 1
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)


def fp16_steps(world, device_type):
    """(kind, loss) of five steps from a huge loss scale."""
    from titan_dit.ranks.process_group import World
    from titan_dit.trainer import Trainer

    precision = {"dtype": "fp16", "loss_scale_init": 2.0**17, "loss_scale_hysteresis": 1}
    config = tiny_config(precision=precision)
    trainer = Trainer(config, World(world.rank, world.size, torch.device(device_type)))
    randomize_on(trainer)
    batches, found = trainer.batches(), []
    for trainer.step in range(1, 6):
        trainer.train_step(next(batches))
        reading = trainer.guard.read(trainer.mesh.sum_loss)
        found.append(([bad.kind for bad in reading.bad], reading.loss))
    return found


def test_fp16_skips_the_steps_that_it_skips_on_a_cpu():
    from titan_dit.ranks import process_group

    expected = on_ranks(1, fp16_steps, "cpu")[0]
    with process_group.start("cuda") as world:
        found = fp16_steps(world, "cuda")
    assert [kinds for kinds, _ in found] == [kinds for kinds, _ in expected]
    assert {tuple(kinds) for kinds, _ in found} == {(), ("overflow",)}
    losses = [[loss for _, loss in steps] for steps in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_the_loss_scale_follows_without_waiting_for_the_device():
    from titan_dit.config.layout import PrecisionConfig
    from titan_dit.config.operation import FaultsConfig
    from titan_dit.optim.gradient_norm import clip_norm
    from titan_dit.recovery.bad_steps import Guard

    guard = Guard(FaultsConfig(), torch.device("cuda"), PrecisionConfig(dtype="fp16"))
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            weight.grad = torch.full((8,), math.inf if step > 1 else 4096.0, device="cuda")
            norm = clip_norm([weight], 0.0, loss_scale=guard.loss_scale)
            guard.check(step, 0, norm, norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kinds = [bad.kind for bad in guard.read(lambda loss: loss.float()).bad]
    assert kinds == ["overflow", "overflow"]
    assert guard.loss_scale.item() == 2048.0


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
def test_diffusion_draws_the_samples_of_the_cpu(name):
    """The noise schedule's tables and each step's noise are on the device."""
    from titan_dit.diffusion.drawing import generate, sampler_of
    from titan_dit.diffusion.guidance import Guidance

    config = tiny_config(objective={"name": "ddpm"})
    model = config.objective.model_spec(config.model).build()
    randomize(dict(model.named_parameters()))
    objective = config.objective.build(config.model, config.objective.example(config.model)[0])
    drawn = []
    for device in ("cpu", "cuda"):
        numbers = torch.arange(4, device=device)
        settings = {"seed": 0, "steps": 10, "eta": 0.5, "guidance": Guidance(2.0)}
        sampler = sampler_of(config.objective, name)
        with torch.no_grad():
            tokens = generate(
                model.to(device), objective, {"labels": numbers}, numbers, sampler=sampler,
                **settings,
            )  # fmt: skip
        drawn.append(tokens.cpu())
    torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-3, atol=1e-3)


def test_averages_beside_the_step_are_those_of_one_after_the_other():
    from torch import nn

    from titan_dit.config.training import EMAConfig
    from titan_dit.optim.ema import EMA

    torch.manual_seed(0)
    go, found = torch.zeros((), dtype=torch.bool, device="cuda"), []
    for beside in (False, True):
        torch.manual_seed(0)
        weights = {str(i): nn.Parameter(torch.randn(2**24, device="cuda")) for i in range(4)}
        optimizer = torch.optim.AdamW(weights.values(), lr=0.1, fused=True)
        ema = EMA(weights, EMAConfig(decays=(0.5,), warmup=False))
        if beside:
            ema.run_beside(optimizer)
        for step in range(1, 6):
            for weight in weights.values():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            ema.update(step, skip=go)
        found.append({name: average.cpu() for name, average in ema.averages["0.5"].items()})
    for name, average in found[0].items():
        assert torch.equal(average, found[1][name])


def forbidden_to_wait(world, objective, planted):
    """Run a third step in which any host-device synchronisation is an error."""
    from titan_dit.trainer import Trainer

    config = tiny_config(
        objective={"name": objective},
        training={"microbatch_size": 4},
        faults={"spike_ratio": 10.0, "spike_after": 1},
    )
    trainer = Trainer(config, world)
    batches = trainer.batches()
    for trainer.step in (1, 2):  # The first steps create AdamW's state.
        trainer.train_step(next(batches))
    if planted:
        original = trainer.executor.loss
        trainer.executor.loss = lambda *args: (
            original(*args) * (1 + 0 * original(*args).sum().item())
        )
    trainer.step, batch = 3, next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _, _ = trainer.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return loss.item()


@pytest.mark.parametrize("objective", ["rectified_flow", "ddpm"])
def test_a_step_does_not_wait_for_the_device(objective):
    from titan_dit.ranks import process_group

    with process_group.start("cuda") as world:
        assert math.isfinite(forbidden_to_wait(world, objective, planted=False))
        with pytest.raises(RuntimeError, match="synchroniz"):
            forbidden_to_wait(world, objective, planted=True)
