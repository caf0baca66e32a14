import copy

import pytest
import torch
from torch import nn

from titan_dit.config.training import EMAConfig
from titan_dit.optim.ema import EMA, move_one_by_one, move_together

GO, SKIP = torch.tensor(False), torch.tensor(True)


def weights():
    torch.manual_seed(0)
    return {
        "matrix": nn.Parameter(torch.randn(4, 3)),
        "scalar": nn.Parameter(torch.randn(())),
        "vector": nn.Parameter(torch.randn(5)),
    }


def wander(parameters):
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += torch.randn_like(parameter)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("decays", [(0.9,), (0.5, 0.99, 0.9999), (0.0,)])
def test_averages_follow_a_plain_loop_in_float64(decays, warmup, every):
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=decays, warmup=warmup, every=every))
    expected = {
        decay: {name: p.detach().double() for name, p in parameters.items()} for decay in decays
    }
    for step in range(1, 31):
        wander(parameters)
        ema.update(step, skip=GO)
        if step % every:
            continue
        update = step // every
        for decay, average in expected.items():
            now = min(decay, (1 + update) / (10 + update)) if warmup else decay
            for name, p in parameters.items():
                # `every` steps at once: the product of their decays.
                kept = now**every
                average[name] = kept * average[name] + (1 - kept) * p.detach().double()
    assert list(ema.averages) == [str(decay) for decay in decays]
    for decay, average in expected.items():
        for name, values in average.items():
            got = ema.averages[str(decay)][name]
            torch.testing.assert_close(got.double(), values, rtol=1e-5, atol=1e-6)
            assert got.dtype == torch.float32


@pytest.mark.parametrize("every", [1, 2])
def test_a_skipped_step_leaves_the_averages_to_the_bit(every):
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.9, 0.5), every=every))
    wander(parameters)
    ema.update(2, skip=GO)
    before = copy.deepcopy(ema.averages)
    wander(parameters)
    ema.update(4, skip=SKIP)
    for decay, average in before.items():
        for name, values in average.items():
            assert torch.equal(ema.averages[decay][name], values)
    ema.update(6, skip=GO)
    assert not torch.equal(ema.averages["0.9"]["matrix"], before["0.9"]["matrix"])


def test_between_updates_nothing_moves():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.9,), every=5))
    before = copy.deepcopy(ema.averages)
    for step in (1, 2, 3, 4, 6, 9):
        wander(parameters)
        ema.update(step, skip=GO)
        assert torch.equal(ema.averages["0.9"]["vector"], before["0.9"]["vector"])


def test_averages_are_no_views_of_the_weights():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.9, 0.5)))
    start = parameters["matrix"].detach().clone()
    wander(parameters)
    for average in ema.averages.values():
        assert torch.equal(average["matrix"], start)
        assert not average["matrix"].requires_grad


def test_the_first_average_is_swapped_in_and_the_weights_come_back_to_the_bit():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.5, 0.9)))
    wander(parameters)
    ema.update(1, skip=GO)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    averages = copy.deepcopy(ema.averages)
    with ema.swapped_in():
        for name, p in parameters.items():
            assert torch.equal(p, averages["0.5"][name])
            assert not torch.equal(p, before[name])
    for name, p in parameters.items():
        assert torch.equal(p, before[name])
        assert p.requires_grad
        assert torch.equal(ema.averages["0.5"][name], averages["0.5"][name])


def test_the_weights_come_back_after_an_error_too():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.5,)))
    wander(parameters)
    before = {name: p.detach().clone() for name, p in parameters.items()}

    def draw():
        with ema.swapped_in():
            assert not torch.equal(parameters["matrix"], before["matrix"])
            raise RuntimeError("out of memory")

    ema.update(1, skip=GO)
    with pytest.raises(RuntimeError, match="out of memory"):
        draw()
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())


def test_swapping_leaves_the_recording_of_gradients_as_it_is():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.5,)))
    with ema.swapped_in():
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_without_averages_the_weights_stay():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=()))
    ema.update(1, skip=GO)
    before = parameters["matrix"].detach().clone()
    with ema.swapped_in():
        assert torch.equal(parameters["matrix"], before)
    assert ema.averages == {}


def test_on_a_cpu_nothing_runs_beside():
    parameters = weights()
    ema = EMA(parameters, EMAConfig(decays=(0.5,), warmup=False))
    optimizer = torch.optim.AdamW(parameters.values())
    ema.run_beside(optimizer)
    wander(parameters)
    before = {name: average.clone() for name, average in ema.averages["0.5"].items()}
    ema.update(1, skip=GO)
    for name, average in ema.averages["0.5"].items():
        torch.testing.assert_close(average, (before[name] + parameters[name].detach()) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.3, 0.8, 1.0])
def test_averages_move_alike_in_one_call(dtype, share):
    targets = [p.detach().to(dtype) for p in weights().values()]
    targets += [torch.randn(0, 3), torch.randn(2, 70_000), torch.randn(3).to(dtype)]
    before = [torch.randn_like(t) for t in targets]
    kept = [t.clone() for t in targets]
    for skipped in (torch.zeros(()), torch.ones(())):
        found = []
        for move in (move_one_by_one, move_together):
            averages = [t.clone() for t in before]
            move(averages, targets, share, skipped)
            found.append(averages)
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        if skipped or not share:
            assert all(map(torch.equal, found[1], before))
        assert all(map(torch.equal, targets, kept))


def test_a_step_that_is_not_finite_leaves_averages_moved_together_to_the_bit():
    bad, average = torch.full((3,), torch.nan), torch.randn(3)
    before = average.clone()
    move_together([average], [bad], 0.5, torch.ones(()))
    assert torch.equal(average, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_moves_the_averages_in_one_launch():
    parameters = {name: nn.Parameter(p.detach().cuda()) for name, p in weights().items()}
    ema = EMA(parameters, EMAConfig(decays=(0.9,), warmup=False))
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    wander(parameters)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        ema.update(1, skip=GO.cuda())
    move_one_by_one(
        [*expected.values()],
        [p.detach() for p in parameters.values()],
        0.1,
        torch.zeros((), device="cuda"),
    )
    for name, average in ema.averages["0.9"].items():
        torch.testing.assert_close(average, expected[name])
    assert sum("multi_tensor" in event.name for event in trace.events()) == 1
