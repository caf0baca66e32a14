"""Samples from a trained network: noise, guidance and a sampler put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config import JobConfig
from titan_dit.models.base import ModelConfig
from titan_dit.objectives.base import Objective
from titan_dit.parallel.mesh import Mesh
from titan_dit.rng import SampleRNG
from titan_dit.samplers.base import Sampler, Settings
from titan_dit.samplers.guidance import guided, scales
from titan_dit.section import UserError

Forward = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(inputs, static) -> prediction: `Executor.predict`, or the network itself."""


def spread_labels(num: int, classes: list[int]) -> Int64[Tensor, " num"]:
    """`num` labels that go through `classes` in order, in shares that differ by one at most."""
    index = torch.arange(num) * len(classes) // num
    return torch.tensor(classes)[index]


def preview_labels(num: int, num_classes: int) -> Int64[Tensor, " num"]:
    """Labels for a small grid: at most ten classes, so that each is seen several times."""
    shown = max(1, min(10, num_classes, num // 4))
    return spread_labels(num, list(range(shown)))


def check_drawing(
    objective: Objective, model: ModelConfig, steps: int, cfg_channels: int | None, where: str
) -> None:
    """Refuse what no sample can be drawn with; `where` is how keys are written, "[sampling] {}"."""
    most, channels = objective.most_sampling_steps, model.sample_shape[0]
    if most is not None and steps > most:
        raise UserError(
            f"{where.format('steps')}={steps}: the network is trained with {most} steps. Set at "
            f"most {most}."
        )
    if cfg_channels is not None and cfg_channels > channels:
        key = where.format("cfg_channels" if "[" in where else "cfg-channels")
        raise UserError(
            f"{key}={cfg_channels}: a latent has {channels} channels. Set at most {channels}."
        )


def generate(
    forward: Forward,
    objective: Objective,
    model: ModelConfig,
    labels: Int64[Tensor, " b"],
    numbers: Int64[Tensor, " b"],
    *,
    seed: int,
    sampler: Sampler,
    steps: int,
    eta: float = 0.0,
    cfg_scale: float = 1.0,
    cfg_channels: int | None = None,
    noise: Float[Tensor, "b n d"] | None = None,
) -> Float[Tensor, "b n d"]:
    """Tokens of one sample per label.

    The noise of sample number i depends on (seed, i) alone: neither the batch it is drawn in nor
    the number of ranks changes a sample. `cfg_channels` guides the first channels only; None all.
    `noise` is where to start from in place of the seed's.
    """
    rng, static = SampleRNG(seed, numbers), model.static(labels.device)
    channels, (_, values) = model.sample_shape[0], model.token_shape

    def predict(x: Tensor, timestep: Tensor, of: Tensor) -> Tensor:
        return forward({"tokens": x, "timestep": timestep, "labels": of}, static).float()

    scale = scales(
        cfg_scale,
        guided=channels if cfg_channels is None else cfg_channels,
        outputs=objective.output_channels(channels),
        pixels=values // channels,
        device=labels.device,
    )
    return sampler(
        objective.process(guided(predict, labels, scale), channels),
        rng.normal("sample", model.token_shape) if noise is None else noise,
        Settings(steps, eta, lambda step: rng.normal(f"sample/{step}", model.token_shape)),
    )


def previews(
    forward: Forward,
    config: JobConfig[Any, Any, Any],
    mesh: Mesh,
    sampler: Sampler,
    device: torch.device,
) -> tuple[Float[Tensor, "num n d"], Int64[Tensor, " num"]]:
    """What [sampling] asks for, and its labels; each data rank draws its share, all have all."""
    sampling, ranks = config.sampling, mesh.sizes.data
    share = -(-sampling.num // ranks)
    numbers = torch.arange(share * ranks, device=device)
    labels = preview_labels(sampling.num, config.model.num_classes).to(device)
    mine = numbers[mesh.data_rank * share :][:share]
    tokens = generate(
        forward,
        config.objective,
        config.model,
        labels[mine.clamp(max=sampling.num - 1)],  # Beyond `num`: rows to be cut off.
        mine,
        seed=config.job.seed,
        sampler=sampler,
        steps=sampling.steps,
        eta=sampling.eta,
        cfg_scale=sampling.cfg_scale,
        cfg_channels=sampling.cfg_channels,
    )
    return mesh.gather_over_data(tokens)[: sampling.num], labels
