"""Recomputation on every axis: the loss and the gradients of one process without it."""

import contextlib
import itertools
import json
from unittest import mock

import pytest
import torch
from harness import on_ranks
from tiny import assert_same_gradients, gradients, graphs_alone, randomize, tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_dit.config.section import UserError
from titan_dit.parallel.compile import num_graphs
from titan_dit.parallel.remat import is_part_of_sum
from titan_dit.trainer import Trainer

MODES = ("attention", "selective", "full")
CASES = [
    ({"tp": 2}, "1f1b", "selective"),
    ({"tp": 2}, "1f1b", "full"),
    ({"cp": 2}, "1f1b", "attention"),
    ({"cp": 2, "cp_method": "ulysses"}, "1f1b", "selective"),
    ({"dp_shard": 2}, "1f1b", "full"),
    ({"pp": 2}, "1f1b", "selective"),
]
WHOLE = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"cp": 2},
    {"cp": 2, "cp_method": "ulysses"},
    {"dp_shard": 2},
    {"pp": 2},
]
LONG = [case for case in itertools.product(WHOLE, ("1f1b",), MODES) if case not in CASES]
LONG += [({"pp": 2}, "zbv_zero_bubble", "attention"), ({"pp": 2}, "dualpipev", "attention")]
COMPILED = [({"tp": 2}, "selective")]
# Products without their biases; only a GPU fuses them with the collectives.
COMPILED += [({"tp": 2, "async_tp": True}, "selective")]
LONG_COMPILED = [({"pp": 2}, "attention"), ({"cp": 2}, "selective"), ({"dp_shard": 2}, "full")]


V_SHAPED = ("zbv_zero_bubble", "dualpipev")


def run(world, layout, schedule, mode, *, compiled=False):
    config = tiny_config(
        model={"num_layers": 4 if schedule in V_SHAPED else 2, "qk_norm": True},
        parallel=layout,
        pipeline={"schedule": schedule},
        training={"microbatch_size": 8 if compiled else 2 if schedule in V_SHAPED else 4},
        activation_checkpoint={"mode": mode},
        # Blocks alone: a compiled objective rounds its timesteps otherwise.
        compile={"enabled": compiled, "objective": False},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    before = num_graphs()  # Building compiles one for trial.
    result = gradients(trainer)
    return (*result, num_graphs() - before) if compiled else result


def frozen_beginning(world):
    """Loss and gradients of the last block and the head, compiled, by mode."""
    found = {}
    for mode in ("none", *MODES):
        torch._dynamo.reset()
        with graphs_alone():
            config = tiny_config(
                model={"num_layers": 2},
                training={"microbatch_size": 8, "frozen": ["embed.*", "blocks.0.*"]},
                activation_checkpoint={"mode": mode},
                compile={"enabled": True, "objective": False},
            )
            trainer = Trainer(config, world)
            randomize(trainer.parameters)
            for name in [n for n, p in trainer.parameters.items() if not p.requires_grad]:
                del trainer.parameters[name]
            found[mode] = gradients(trainer)
    return found


def one_process(world):
    """By number of layers."""
    return {2: run(world, {}, "1f1b", "none"), 4: run(world, {}, V_SHAPED[0], "none")}


def all_cases(world, cases):
    return {json.dumps(case): run(world, *case) for case in cases}


def refusals(world):
    found = []
    for schedule, mode in itertools.product(V_SHAPED, MODES[1:]):
        try:
            run(world, {"pp": 2}, schedule, mode)
        except UserError as error:
            found.append(str(error))
    return found, products_told(init_device_mesh("cpu", (2,)))


def products_told(mesh):
    """By operator and placements: (whether the inputs tell a partial sum, whether it is one)."""
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    cases = [(whole, whole), (rows, whole), (whole, columns), (columns, rows)]
    aten = torch.ops.aten
    told = {}
    for placements in cases:
        x, weight = (
            DTensor.from_local(torch.ones(4, 4), mesh, [placement]) for placement in placements
        )
        bias = DTensor.from_local(torch.ones(weight.shape[1]), mesh, [whole], run_check=False)
        for product, inputs in ((aten.mm, (x, weight)), (aten.addmm, (bias, x, weight))):
            out = product(*inputs)
            is_sum = any(placement.is_partial() for placement in out.placements)
            told[str(product), str(placements)] = is_part_of_sum(product.default, inputs), is_sum
    return told


def compiled_cases(world, cases, how):
    results = {}
    for layout, mode in cases:
        torch._dynamo.reset()
        # async_tp asks for a GPU.
        with how(), mock.patch("titan_dit.checks.device.check_matmuls"):
            results[json.dumps([layout, mode])] = run(world, layout, "1f1b", mode, compiled=True)
    return results


@pytest.fixture(scope="module")
def reference():
    [alone] = on_ranks(1, one_process)
    return alone


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.long)])
def test_every_layout_gives_the_loss_and_gradients_of_one_process(cases, reference):
    results = on_ranks(2, all_cases, cases)
    seen = {case: set() for case in results[0]}
    assert len(seen) == len(cases)
    for case, (loss, found) in (item for rank in results for item in rank.items()):
        expected_loss, expected = of_as_many_layers(reference, case)
        assert loss == pytest.approx(expected_loss, rel=1e-6), case
        # A stage has its own layers only.
        assert_same_gradients(found, {name: expected[name] for name in found})
        seen[case] |= found.keys()
    for case, names in seen.items():
        assert names == of_as_many_layers(reference, case)[1].keys(), case


def of_as_many_layers(reference, case):
    return reference[4 if json.loads(case)[1] in V_SHAPED else 2]


def test_blocks_before_the_first_gradient_are_not_recomputed():
    """torch's compiler fails on a block that is to be recomputed and has no backward."""
    [found] = on_ranks(1, frozen_beginning)
    loss, expected = found.pop("none")
    assert {name.partition(".")[0] for name in expected} == {"blocks", "head"}
    for mode, (again, gradients_found) in found.items():
        assert again == pytest.approx(loss, rel=1e-6), mode
        assert_same_gradients(gradients_found, expected)


def test_what_a_split_backward_cannot_do_is_refused_and_partial_sums_are_foreseen():
    found, told = on_ranks(2, refusals)[0]
    assert len(found) == 4
    assert all("Set mode = " in message for message in found)
    # Selective recomputation saves the reduction of a partial sum, not the sum.
    assert [foreseen for foreseen, _ in told.values()] == [is_sum for _, is_sum in told.values()]
    assert sum(foreseen for foreseen, _ in told.values()) == 2


TO_THE_END = [pytest.mark.long, pytest.mark.compiler]


@pytest.mark.parametrize(
    ("cases", "how"),
    [
        (COMPILED, graphs_alone),
        pytest.param(COMPILED + LONG_COMPILED, contextlib.nullcontext, marks=TO_THE_END),
    ],
)
def test_compiled_blocks_recompute_over_ranks_too(cases, how, reference):
    expected_loss, expected = reference[2]
    for results in on_ranks(2, compiled_cases, cases, how):
        assert len(results) == len(cases)
        for case, (loss, found, graphs) in results.items():
            # A ring also joins outputs, and gradients of its first and of later blocks.
            assert graphs == (4 if "cp" in json.loads(case)[0] else 1), case
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            assert_same_gradients(found, {name: expected[name] for name in found})
