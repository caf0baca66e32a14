"""titan_dit's training step, built from the same parts as in the trainer.

These parts need torch and jaxtyping only. The trainer also needs packages for configs and data,
which a bare machine may lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelConfig,
    PrecisionConfig,
)
from titan_dit.config.training import EMAConfig
from titan_dit.data.base import Batch
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.sections import DiffusionConfig
from titan_dit.execution import LocalExecutor, Output, TokenLoss
from titan_dit.kernels import attention
from titan_dit.models.base import Model
from titan_dit.models.dit_config import DiTConfig
from titan_dit.objectives.base import Objective
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, shards_of
from titan_dit.optim.sections import AdamWConfig
from titan_dit.parallel import compute_copies
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.compile import compile_prepare, compile_score
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor_plans.dit import plan
from titan_dit.rng import SampleRNG

MAX_GRAD_NORM = 1.0


def resident_batch(config: DiTConfig, batch: int, device: torch.device) -> Batch:
    """A batch of random latents on the device, so that a step includes no loading."""
    return Batch(
        fields={
            "latent": torch.randn(batch, *config.sample_shape, device=device),
            "label": torch.randint(0, config.num_classes, (batch,), device=device),
        },
        sample_numbers=torch.arange(batch, device=device),
        weight=torch.ones(batch, device=device),
        total_weight=float(batch),
    )


def learning(config: DiTConfig, path: DiffusionConfig) -> Diffusion:
    """The objective for `resident_batch`."""
    facts = LatentFacts(shape=config.sample_shape, count=1, num_classes=config.num_classes)
    return path.build(config, facts)


def network(config: DiTConfig, path: DiffusionConfig) -> Model:
    """The model of the objective, on the meta device."""
    with torch.device("meta"):
        return path.model_spec(config).build()


def loss_of(objective: Objective) -> TokenLoss:
    """The objective's loss of a single prediction."""

    def adapted(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
        assert isinstance(output, Tensor)
        return objective.loss({"prediction": output}, targets)

    return adapted


def trainer_step(
    config: DiTConfig,
    batch: int,
    device: torch.device,
    path: DiffusionConfig,
    mesh: Mesh,
    *,
    compiled: bool,
    ends: bool = False,
    cuda_graphs: bool = False,
    reshard: str = "auto",
    precision: PrecisionConfig | None = None,
    remat: str = "none",
    attend: attention.Attend | None = None,
    layout: Mapping[str, Any] | None = None,
    compiling: Mapping[str, Any] | None = None,
    optimizer_config: Any = None,
    fsdp: bool = False,
) -> Callable[[], Tensor]:
    """A bf16 step, in the order of `Trainer.__init__` and `train_step`.

    `attend` overrides the attention of `precision`; `layout` and `compiling` are further keys of
    [parallel] and [compile]; `optimizer_config` replaces that of AdamW. `fsdp`: FSDP2 on one rank,
    too.
    """
    precision = precision or PrecisionConfig(dtype="bf16")
    model, objective = network(config, path), learning(config, path)
    parallel = ParallelConfig(**{"reshard_after_forward": reshard, **(layout or {})})
    recompute = ActivationCheckpointConfig(mode=remat)  # type: ignore[arg-type]
    keys = {"enabled": compiled, "ends": ends, "cuda_graphs": cuda_graphs, **(compiling or {})}
    compilation = CompileConfig(**keys)
    rows, styles = batch * config.token_shape[0], plan(parallel.sequence_parallel)
    with patch.object(compute_copies, "FLOAT8", () if fsdp else compute_copies.FLOAT8):
        parallelize(model, mesh, styles, parallel, precision, recompute, compilation, rows)
    if attend is not None:
        attention.apply(model, attend)
    initialize(model, model.initializers(), 0, device)
    parameters = dict(model.named_parameters())
    randomize([shard.detach() for shard in shards_of(parameters.values())])
    prepare = compile_prepare(objective, compilation, device)
    executor = LocalExecutor(model, loss_of(objective), None)
    executor.score = compile_score(executor.score, objective, compilation, device)
    optimizer = build_optimizer(parameters, optimizer_config or AdamWConfig(), config.spec())
    ema = EMA(parameters, EMAConfig())
    ema.run_beside(optimizer)
    data = resident_batch(config, batch, device)
    taken = 0

    def step() -> Tensor:
        nonlocal taken
        taken += 1
        loss = executor.step(prepare(data, SampleRNG(0, data.sample_numbers)))
        bad = ~clip_norm(parameters.values(), MAX_GRAD_NORM).isfinite()
        apply_gradients(optimizer, 1e-4, skip=bad)
        ema.update(taken, skip=bad)
        return loss

    return step


@torch.no_grad()
def randomize(parameters: list[Tensor]) -> None:
    """Fill with N(0, 0.02).

    adaLN-Zero starts with zero gates, so all gradients in the blocks are zero. On zeros a GPU draws
    less power and runs faster than in training.
    """
    for parameter in parameters:
        parameter.normal_(std=0.02)
