"""A step reads no tensor's value on the host, and leaves no tensor in a reference cycle.

On a GPU the host would wait for the value, and the device run dry; and memory that a cycle holds is
freed only when Python's garbage collector runs (system/garbage_collection.py).
"""

import gc

import pytest
import torch
from harness import on_ranks
from tiny import randomize, tiny_config
from waits import Waits

from titan_dit.execution import LocalExecutor
from titan_dit.trainer import Trainer

CASES = {
    1: [({}, "rectified_flow"), ({}, "ddpm"), ({}, "rectified_flow", "fp16")],
    2: [
        ({"dp_shard": 2}, "rectified_flow"),
        ({"tp": 2}, "rectified_flow"),
        ({"cp": 2}, "rectified_flow"),
        ({"pp": 2}, "rectified_flow"),
    ],
}
QUESTIONS = {
    "item": lambda t: t.sum().item(),
    "if": lambda t: 1 if t.sum() > 0 else 0,
    "any": lambda t: float(t.isnan().any()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
}


def asked(trainer, batches):
    """The synchronising reads of one more step."""
    trainer.step += 1
    batch = next(batches)
    with Waits() as found:
        trainer.train_step(batch)
    return found


def in_the_loss(trainer, ask, when="forward"):
    """Plant a read of the per-token loss, or of its gradient."""
    original = trainer.executor.loss

    def loss(prediction, targets):
        per_token = original(prediction, targets)
        if when == "forward":
            ask(per_token.detach())
        else:
            per_token.register_hook(lambda gradient: ask(gradient) and None)
        return per_token

    trainer.executor.loss = loss
    return lambda: setattr(trainer.executor, "loss", original)


def behind_the_backward(trainer, ask):
    """Plant a read of the gradient norm."""
    original = trainer.guard.check

    def check(step, cursor, loss, grad_norm):
        ask(grad_norm)
        return original(step, cursor, loss, grad_norm)

    trainer.guard.check = check
    return lambda: setattr(trainer.guard, "check", original)


def left_in_cycles(trainer, batches):
    """How many tensors are in what only the collector frees, after one more step."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    asked(trainer, batches)
    gc.collect()
    gc.set_debug(0)
    gc.enable()
    left = sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)
    gc.garbage.clear()
    return left


def in_a_cycle(tensor):
    """Plant a tensor that only the collector frees."""
    cycle = [tensor]
    cycle.append(cycle)


def found_in_steps(world):
    """Of every layout: what a step asks for and leaves, as it is and with something planted."""
    found, left, item = {}, {}, QUESTIONS["item"]
    for parallel, objective, *dtype in CASES[world.size]:
        config = tiny_config(
            parallel=parallel,
            objective={"name": objective},
            training={"microbatch_size": 4},
            faults={"spike_ratio": 10.0, "spike_after": 1},
            precision={"dtype": next(iter(dtype), "fp32")},
        )
        trainer = Trainer(config, world)
        randomize(trainer.parameters)
        batches, case = trainer.batches(), f"{parallel} {objective} {dtype}"
        for trainer.step in (1, 2):  # They make AdamW's state, and the like.
            trainer.train_step(next(batches))
        found[case] = asked(trainer, batches)
        undo = behind_the_backward(trainer, item)
        found[f"planted behind the backward, {case}"] = asked(trainer, batches)
        undo()
        if isinstance(trainer.executor, LocalExecutor):
            undo = in_the_loss(trainer, item, "backward")
            found[f"planted in the backward, {case}"] = asked(trainer, batches)
            undo()
            for name, ask in QUESTIONS.items() if parallel == {} and objective == "ddpm" else ():
                undo = in_the_loss(trainer, ask)
                found[f"planted {name}, {case}"] = asked(trainer, batches)
                undo()
        found[f"{case}, again"] = asked(trainer, batches)
        left[case] = left_in_cycles(trainer, batches)
        undo = behind_the_backward(trainer, lambda norm: in_a_cycle(norm.clone()))
        left[f"planted in {case}"] = left_in_cycles(trainer, batches)
        undo()
    return found, left


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request):
    return on_ranks(request.param, found_in_steps)


def test_a_step_asks_no_tensor_for_its_value(ranks):
    for asked_for, _ in ranks:
        for case, found in asked_for.items():
            if case.startswith("planted"):
                assert found, f"{case}: not seen"
            else:
                assert found == [], f"{case}: {found}"


def test_a_step_leaves_no_tensor_in_a_cycle(ranks):
    for _, left in ranks:
        for case, tensors in left.items():
            assert tensors == case.startswith("planted"), case
