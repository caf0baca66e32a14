"""A tiny run with random weights, including non-zero gates."""

import contextlib
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from titan_dit.config import catalog, config_file
from titan_dit.parallel.init import put

TABLES = {
    "model": {
        "name": "dit",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "patch_size": 2,
        "latent_size": 8,
        "in_channels": 1,
        "num_classes": 10,
    },
    "objective": {"name": "rectified_flow", "condition_dropout": 0.25},
    "data": {"name": "digits"},
    "training": {"steps": 4, "gc_every": 0, "global_batch_size": 16},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    "ema": {"decays": [0.9, 0.99]},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


def tiny_config(**sections):
    """TABLES with keys of some sections replaced: tiny_config(training={"steps": 2})."""
    return built(TABLES, sections)


def built(tables, sections):
    """The config of `tables` with the keys of `sections` replaced."""
    tables = {name: dict(table) for name, table in tables.items()}
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    return config_file.build(tables, catalog.variant)


@contextlib.contextmanager
def graphs_alone():
    """torch.compile without code generation: graphs run operator by operator.

    The code that Inductor makes of a graph takes g++ most of a minute, and is the same on every
    layout.
    """
    compile = torch.compile

    def compile_graph(*args, options=None, **kwargs):
        assert options is None, "these are Inductor's"
        return compile(*args, backend="aot_eager_decomp_partition", **kwargs)

    with mock.patch.object(torch, "compile", compile_graph):
        yield


def inputs_of(config):
    """What a model's `embed` takes, for four samples; the same every time."""
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randn(4, *config.token_shape, generator=generator),
        "timestep": torch.rand(4, generator=generator) * 1000,
        "labels": torch.arange(4),
    }


@torch.no_grad()
def randomize(parameters):
    """Non-zero weights, equal on every layout.

    From the initial weights of adaLN-Zero the gates are 0 and would hide a broken attention.
    """
    for name in sorted(parameters):
        seed = sum(ord(letter) * (i + 1) for i, letter in enumerate(name))
        generator = torch.Generator().manual_seed(seed)
        shape = parameters[name].shape
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        put(parameters[name], torch.randn(shape, generator=generator) * scale)


def whole(tensor):
    """A plain copy of a tensor that may be sharded."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def state(trainer):
    """Everything that a checkpoint holds, whole, by name."""
    tensors = trainer.tensors()
    flat = {f"model.{name}": whole(p) for name, p in tensors["model"].items()}
    for name, moments in tensors["optimizer"].items():
        flat |= {f"optimizer.{name}.{key}": whole(value) for key, value in moments.items()}
    for decay, average in tensors["ema"].items():
        flat |= {f"ema.{decay}.{name}": whole(value) for name, value in average.items()}
    return flat | {"step": torch.tensor(trainer.step), "cursor": torch.tensor(trainer.cursor)}


def gradients(trainer):
    """Loss and every gradient of the next batch, whole."""
    batch = next(trainer.batches())
    rng = torch_rng(trainer, batch)
    loss = trainer.executor.step(trainer.built.prepare(batch, rng))
    found = {name: whole(p.grad) for name, p in trainer.parameters.items()}
    for parameter in trainer.parameters.values():
        parameter.grad = None
    return trainer.mesh.sum_loss(loss).item(), found


def torch_rng(trainer, batch):
    from titan_dit.rng import SampleRNG

    return SampleRNG(trainer.config.job.seed, batch.sample_numbers)


def assert_same_gradients(found, expected, tolerance=1e-6):
    """max|difference| against max|g| of the tensor, with a floor from the global norm.

    The true gradient of the key bias is 0: relative to itself its error is noise.
    """
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        scale = max(reference.abs().max().item(), 1e-3 * norm)
        error = (found[name] - reference).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error / scale:.1e}"


def distance(found, expected):
    """|difference| / |expected| over the gradients of the parameters that a rank holds."""
    norm = torch.stack([expected[name].norm() for name in found]).norm()
    return (torch.stack([(found[n] - expected[n]).norm() for n in found]).norm() / norm).item()
