"""The bugs that layouts are prone to, planted one by one: the comparison of the grid sees each."""

import json
from unittest import mock

import pytest
import torch
from harness import on_ranks
from test_grid import CP, DDPM, FLOW, PP, TP, case_config, compare, measure, schedule

from titan_dit.objectives.rectified_flow import RectifiedFlow
from titan_dit.parallel import fsdp, gradients, tensor
from titan_dit.pipeline import build
from titan_dit.pipeline.runtime import Runtime, Stage
from titan_dit.rng import SampleRNG
from titan_dit.schedules.action import Action, Kind

pytestmark = pytest.mark.timeout(900)


def other_times_on_the_cp_ranks(world):
    """Each rank of a sample draws for itself."""
    original = RectifiedFlow.prepare

    def prepare(self, batch, rng):
        return original(self, batch, SampleRNG(rng.seed + world.rank, rng.sample_numbers))

    return mock.patch.object(RectifiedFlow, "prepare", prepare)


def whole_gradient_of_the_modulation(world):
    """A rank's gradient is of its tokens alone, but is taken for that of all."""

    def replicated(self, sequence_parallel):
        original(self, sequence_parallel=False)

    original = tensor.ModulationColwise.__init__
    return mock.patch.object(tensor.ModulationColwise, "__init__", replicated)


def condition_cut_off_between_stages(world):
    """The gradient of the condition stays in its stage."""
    original = Stage.forward_maybe_with_nosync

    def forward(self, *args, **kwargs):
        if not self.is_first:
            args = (args[0], args[1].detach())
        return original(self, *args, **kwargs)

    return mock.patch.object(Stage, "forward_maybe_with_nosync", forward)


def norm_of_one_stage(world):
    """Every stage clips by its own gradients."""
    return mock.patch.object(gradients.dist, "all_reduce", return_value=None)


def losses_by_the_order_they_came_in(world):
    """As torch's own runtime finds them."""

    def get(self, stage, mb_index):
        return list(self.losses.values())[mb_index] if stage.is_last else None

    return mock.patch.object(Runtime, "_maybe_get_loss", get)


def out_of_order(*args, num_microbatches, **kwargs):
    """GPipe whose microbatches go forward from the last to the first, and back the other way."""
    numbers = range(num_microbatches)
    return tuple(
        (
            *(Action(Kind.FORWARD, stage, number) for number in reversed(numbers)),
            *(Action(Kind.BACKWARD, stage, number) for number in numbers),
        )
        for stage in range(2)
    )


BUGS = {
    "other times": (CP, {}, FLOW, other_times_on_the_cp_ranks, "gradient"),
    "modulation": (TP, {}, FLOW, whole_gradient_of_the_modulation, "gradient"),
    "condition": (PP, schedule("1f1b"), DDPM, condition_cut_off_between_stages, "gradient"),
    "norm": (PP, schedule("1f1b"), FLOW, norm_of_one_stage, "norm"),
    "losses": (PP, schedule("gpipe"), FLOW, losses_by_the_order_they_came_in, "gradient"),
}


def planted(world):
    """The error that the bug is to show in, without and with it."""
    expected = {
        json.dumps(objective): measure_alone(world, case_config({}, {}, objective))
        for objective in (FLOW, DDPM)
    }
    found = {}
    for name, (parallel, pipeline, objective, bug, shows) in BUGS.items():
        config, pair = case_config(parallel, pipeline, objective), []
        for patch in (mock.MagicMock(), bug(world)):
            order = build.pipeline_order if name != "losses" else out_of_order
            with mock.patch.object(build, "pipeline_order", order), patch:
                result = compare(measure(world, config), expected[json.dumps(objective)])
            pair.append(result[shows])
        found[name] = pair
    return found


def measure_alone(world, config):
    """One process's numbers, on every rank of a larger world: data-parallel copies of one batch."""
    return torch.load(REFERENCE_FILE.format(config.objective.name), weights_only=False)


REFERENCE_FILE = ""


def reference(world, folder):
    for objective in (FLOW, DDPM):
        config = case_config({}, {}, objective)
        torch.save(measure(world, config), f"{folder}/{config.objective.name}.pt")


def planted_with_references(world, folder):
    global REFERENCE_FILE
    REFERENCE_FILE = f"{folder}/{{}}.pt"
    return planted(world)


def test_each_planted_bug_is_seen(tmp_path):
    on_ranks(1, reference, str(tmp_path))
    by_rank = on_ranks(2, planted_with_references, str(tmp_path))
    for name in BUGS:
        assert all(results[name][0] <= 1e-6 for results in by_rank), name
        assert max(results[name][1] for results in by_rank) > 1e-3, name


def in_bf16(world):
    """The loss of a step in bf16, and with the timestep cast to it as FSDP does by default."""
    found = []
    for cast in (False, True):
        original = fsdp.MixedPrecisionPolicy

        def policy(original=original, cast=cast, **kwargs):
            return original(**kwargs | {"cast_forward_inputs": cast})

        with mock.patch.object(fsdp, "MixedPrecisionPolicy", policy):
            found.append(measure(world, case_config({}, {}, FLOW, "bf16"))[0])
    return [*found, measure(world, case_config({}, {}, FLOW))[0]]


def test_a_timestep_cast_to_bf16_is_seen():
    [(kept, cast, exact)] = on_ranks(1, in_bf16)
    assert kept == pytest.approx(exact, rel=5e-3)
    assert abs(cast - exact) > 3 * abs(kept - exact)
