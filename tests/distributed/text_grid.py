"""What the grids of GPT and BERT share: one step measured, and compared with one process."""

import json

from test_grid import compare
from tiny import randomize, torch_rng, whole

from titan_dit.data import loader
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.trainer import Trainer


def measure(world, config):
    """Loss, gradients, their norm and logits."""
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batch = next(trainer.batches())
    rows = [(number, number) for number in range(3)]
    inspect, device = trainer.objective.inspect, world.device
    first = loader.load_samples(trainer.source, rows, inspect, device, 3.0)
    few = trainer.objective.prepare(first, torch_rng(trainer, first))
    lengths = {name: value for name, value in few.context.items() if name == "lengths"}
    logits = trainer.executor.predict(few.inputs, few.static, lengths)
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
    gradients = {name: whole(p.grad) for name, p in trainer.parameters.items()}
    norm = clip_norm(trainer.parameters.values(), 0).item()
    return loss, gradients, norm, logits


def key_of(kind, dtype, layers):
    """A reference's key: the kind of model, what it computes in, its layers."""
    return json.dumps([kind, dtype, layers])


def rounding_of(kind, references):
    """The error of one process's own gradients in fp32: it differs between CPUs."""
    key = key_of(kind, "fp64", 5)
    if key not in references:
        return 0.0
    return compare(references[key_of(kind, "fp32", 5)], references[key])["gradient"]


def check(by_rank, references):
    """Results of every rank by json of (parallel, pipeline, kind, dtype), as `compare` has them."""
    for case in by_rank[0]:
        _, _, kind, dtype = json.loads(case)
        names = set().union(*(results[case]["names"] for results in by_rank))
        wholes = [set(found[1]) for key, found in references.items() if json.loads(key)[0] == kind]
        assert names in wholes, case
        tolerance = {"fp32": max(1e-6, 2 * rounding_of(kind, references)), "fp64": 1e-9}[dtype]
        for results in by_rank:
            found = results[case]
            assert found["loss"] <= 1e-6, case  # It is summed and shown in fp32.
            for what in ("norm", "prediction", "gradient"):
                limit = 1e-6 if what == "norm" else tolerance
                assert found[what] <= limit, (case, what, found[what], found["worst"])
