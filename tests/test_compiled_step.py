"""A compiled step against an eager one of the same device: what is drawn, loss, gradients.

On a CPU without the compiler's code (`graphs_alone`); on a GPU with it, which CI never runs.
"""

import contextlib
from typing import NamedTuple

import pytest
import torch
from harness import on_ranks
from tiny import distance, graphs_alone, randomize, tiny_config, torch_rng, whole

from titan_dit.diffusion.conditions import NO_LABEL
from titan_dit.parallel.compile import num_graphs
from titan_dit.parallel.init import put
from titan_dit.trainer import Trainer

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [(name, dtype) for name in ("rectified_flow", "ddpm") for dtype in ("fp32", "bf16")]
TO_THE_END = [pytest.mark.long, pytest.mark.compiler]
ROUNDING = {"fp32": 1e-4, "bf16": 0.03}
"""Relative to the norm of all gradients. A compiled block rounds to bf16 less often."""


class Step(NamedTuple):
    drawn: dict[str, torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]
    graphs: int


def a_step(world, objective, dtype, enabled):
    """The first step from random weights."""
    start = num_graphs()
    config = tiny_config(
        objective={"name": objective},
        precision={"dtype": dtype},
        compile={"enabled": enabled},
        training={"microbatch_size": 8},
    )
    trainer = Trainer(config, world)
    weights = {name: torch.empty(p.shape) for name, p in trainer.parameters.items()}
    randomize(weights)
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            put(parameter, weights[name].to(world.device))
    batch = next(trainer.batches())
    prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
    loss = trainer.executor.step(prepared)
    drawn = {**prepared.inputs, **prepared.targets}
    gradients = {name: whole(p.grad).cpu() for name, p in trainer.parameters.items()}
    drawn = {name: tensor.cpu() for name, tensor in drawn.items()}
    return Step(drawn, loss.item(), gradients, num_graphs() - start)


def both(world, cases, how):
    """Of every case an eager step and a compiled one."""
    found = {}
    for case in cases:
        torch._dynamo.reset()
        eager = a_step(world, *case, False)
        with how():
            found[case] = eager, a_step(world, *case, True)
    return found


@pytest.mark.parametrize(
    ("device", "how", "cases"),
    [
        pytest.param("cpu", graphs_alone, CASES[::3], id="graphs"),
        pytest.param("cpu", contextlib.nullcontext, CASES, marks=TO_THE_END, id="cpu"),
        *(
            pytest.param("cuda", contextlib.nullcontext, [case], marks=GPU, id="-".join(case))
            for case in CASES
        ),
    ],
)
def test_a_compiled_step_draws_the_numbers_and_has_the_gradients_of_an_eager_one(
    device, how, cases
):
    where = {"RANKS_ON": device, "LOCAL_RANK": "0"}
    # In a rank: pytest's own process checks shapes, which cannot be compiled.
    [found] = on_ranks(1, both, cases, how, variables=where)
    for (objective, dtype), (eager, compiled) in found.items():
        assert eager.graphs == 0
        assert compiled.graphs >= 3, (objective, dtype)  # prepare, the blocks, the loss.
        assert_same_draws(compiled.drawn, eager.drawn)
        assert compiled.loss == pytest.approx(eager.loss, rel=ROUNDING[dtype])
        assert compiled.gradients.keys() == eager.gradients.keys()
        assert distance(compiled.gradients, eager.gradients) < ROUNDING[dtype]


def assert_same_draws(found, expected):
    """Integers are equal, floats up to rounding; some labels are dropped."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        rounding = 1e-5 if tensor.is_floating_point() else 0
        torch.testing.assert_close(found[name], tensor, rtol=rounding, atol=rounding)
    dropped = (expected["labels"] == NO_LABEL).sum()
    assert 0 < dropped < len(expected["labels"])
