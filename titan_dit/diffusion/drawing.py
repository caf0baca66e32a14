"""Draw samples from a trained network: initial noise, guidance, a sampler; and their decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config import catalog
from titan_dit.config.dotted_names import look_up
from titan_dit.config.section import UserError, show
from titan_dit.config.training import SamplingConfig
from titan_dit.diffusion.base import Predict
from titan_dit.diffusion.conditions import Given, completed
from titan_dit.diffusion.guidance import (
    Conditional,
    Guidance,
    LowExpert,
    by_noise_level,
    guided,
    scales,
)
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers import from_diffusers
from titan_dit.diffusion.samplers.base import Sampler, Settings, chosen
from titan_dit.diffusion.sections import DiffusionConfig
from titan_dit.diffusion.text_lengths import by_text_length
from titan_dit.objectives.base import DataShare, Forward
from titan_dit.pictures import autoencoder
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.rng import SampleRNG

PIXELS = (0.0, 255.0)
"""Values of black and white in decoded pictures."""
FPS = 16.0
"""Frames per second of drawn clips, if the data do not say."""


@runtime_checkable
class Drawing(Protocol):
    """Sampler settings: those of [sampling] and of the flags of `sample`."""

    @property
    def sampler(self) -> str:
        """Sampler name, "auto", or "package.module:function"."""

    @property
    def steps(self) -> int:
        """Number of sampling steps."""

    @property
    def shift(self) -> float | None:
        """Shift of a flow's times; None takes that of training."""

    @property
    def cfg_scale(self) -> float:
        """Scale of guidance; 1 is none."""

    @property
    def cfg_channels(self) -> int | None:
        """Guide only the first `cfg_channels` channels; None guides all."""

    @property
    def cfg_interval(self) -> tuple[float, ...]:
        """Guide at these noise levels only."""

    @property
    def cfg_rescale(self) -> float:
        """How far the guided prediction is rescaled to the std of the conditional one, 0 to 1."""


def sampler_of(objective: DiffusionConfig, name: str, where: str = "[sampling] sampler") -> Sampler:
    """The sampler `name` of an objective ("auto": its first); UserError if it does not fit."""
    if name.startswith(from_diffusers.PREFIX):
        return from_diffusers.sampler(name, objective.name, where)
    table = catalog.SAMPLERS.get(objective.name, {})
    if name not in table and any(name in others for others in catalog.SAMPLERS.values()):
        raise UserError(
            f"{where}={show(name)} does not fit [objective] name={show(objective.name)}. "
            f"Valid: auto, {', '.join(table)}."
        )
    if name == "auto" and not table:
        raise UserError(
            f'{where}="auto": [objective] name={show(objective.name)} has no default sampler. Set '
            'one: "package.module:function".'
        )
    found: Sampler = look_up(table, where, name_of_sampler(objective, name))
    evaluations = getattr(found, "evaluations", 1)
    if type(evaluations) is not int or evaluations < 1:
        raise UserError(
            f"{where}={show(name)}: its attribute evaluations={show(evaluations)} is no whole "
            "number above 0. Set it to the calls of the network in a step, or leave it out."
        )
    return found


def name_of_sampler(objective: DiffusionConfig, name: str) -> str:
    """The sampler's name, with "auto" replaced by the objective's first sampler."""
    return next(iter(catalog.SAMPLERS[objective.name])) if name == "auto" else name


def check(objective: Diffusion, drawing: Drawing, where: str) -> None:
    """Raise UserError on settings that cannot work; `where` formats a key, "[sampling] {}"."""
    sampler = sampler_of(objective.config, drawing.sampler, where.format("sampler"))
    most, channels = objective.most_sampling_steps, objective.channels
    if most is not None and drawing.steps > most:
        raise UserError(
            f"{where.format('steps')}={drawing.steps}: the network is trained with {most} steps. "
            f"Set at most {most}."
        )
    if drawing.shift is not None and objective.shift is None:
        raise UserError(
            f"{where.format('shift')}={drawing.shift:g} is for flows, but [objective] "
            f"name={show(objective.config.name)} has no times to shift. Leave it out."
        )
    if drawing.sampler.startswith(from_diffusers.PREFIX):
        what = f"{where.format('sampler')}={show(drawing.sampler)}"
        process = objective.process(lambda x, timestep: x)
        from_diffusers.check(sampler, process, drawing.steps, what)
    if drawing.cfg_channels is not None and drawing.cfg_channels > channels:
        key = where.format("cfg_channels" if "[" in where else "cfg-channels")
        raise UserError(
            f"{key}={drawing.cfg_channels}: a latent has {channels} channels. "
            f"Set at most {channels}."
        )
    interval = drawing.cfg_interval
    if len(interval) != 2 or not interval[0] < interval[1]:
        key = where.format("cfg_interval" if "[" in where else "cfg-interval")
        raise UserError(
            f"{key}={show(interval)}: give two noise levels from 0 (data) to 1 (noise), the lower "
            "one first, such as 0.1 0.8."
        )


def guidance_of(drawing: Drawing, weak: Conditional | None = None) -> Guidance:
    """The guidance that settings ask for; `weak` is the prediction of a worse network."""
    first, last = drawing.cfg_interval
    return Guidance(
        drawing.cfg_scale, drawing.cfg_channels, (first, last), drawing.cfg_rescale, weak
    )


def generate(
    forward: Forward,
    objective: Diffusion,
    given: Given,
    numbers: Int64[Tensor, " b"],
    *,
    seed: int,
    sampler: Sampler,
    steps: int,
    shift: float | None = None,
    guidance: Guidance = Guidance(),  # noqa: B008 - frozen.
    noise: Float[Tensor, "b n d"] | None = None,
    null: Given | None = None,
    share: DataShare | None = None,
    low: LowExpert | None = None,
    **settings: Any,
) -> Float[Tensor, "b n d"]:
    """Draw one sample per row of a condition, as tokens.

    The noise of a sample depends only on `seed` and on its entry in `numbers`, not on the batch or
    the number of ranks. `noise`: initial noise instead of the seed's. `shift`: of a flow's times;
    None takes that of training. `null`: a condition of each sample to guide away from, in place of
    none. `share`: the data ranks that hold the network together and draw as many samples each.
    `low`: the network below a noise level; `forward` is the one from there up. `settings`: further
    fields of the sampler's `Settings`, such as `eta`.
    """
    device = numbers.device
    if null is None:
        null = objective.condition.null(len(numbers), device)
    channels, shape = objective.channels, objective.model.token_shape

    def predict(x: Tensor, timestep: Tensor, of: Given) -> Tensor:
        static = objective.with_text(of).static(device)
        return forward({"tokens": x, "timestep": timestep, **of}, static).float()

    def guide_by(network: Conditional, scale: float, of: Given, instead: Given) -> Predict:
        each = scales(
            scale,
            guided=channels if guidance.channels is None else guidance.channels,
            outputs=objective.config.output_channels(channels),
            pixels=shape[1] // channels,
            device=device,
        )
        return guided(network, of, instead, each, guidance, objective.noise_level)

    def draw(rows: Tensor | slice, conditions: Sequence[Given]) -> dict[str, Tensor]:
        rng = SampleRNG(seed, numbers[rows])
        of, instead = conditions
        guide = guide_by(predict, guidance.scale, of, instead)
        if low is not None:
            scale = guidance.scale if low.scale is None else low.scale
            below = guide_by(low.predict, scale, of, instead)
            guide = by_noise_level(guide, below, low.boundary, objective.noise_level)
        drawn = sampler(
            objective.process(guide),
            rng.normal("sample", shape) if noise is None else noise[rows],
            Settings(
                steps,
                fresh=lambda step: rng.normal(f"sample/{step}", shape),
                shift=(objective.shift_in(steps) or 1.0) if shift is None else shift,
                keys=lambda: rng.keys("sample/keys"),
                **settings,
            ),
        )
        return {"drawn": drawn}

    null = completed({name: value.to(device) for name, value in null.items()}, given)
    return by_text_length(objective.model, [given, null], draw, share)["drawn"]


def samples(
    forward: Forward,
    objective: Diffusion,
    sampling: SamplingConfig,
    seed: int,
    given: Given,
    numbers: Int64[Tensor, " b"],
    share: DataShare,
) -> Float[Tensor, "b c *size"]:
    """Draw samples in stored units, as [sampling] says; `share` as in `generate`."""
    tokens = generate(
        forward,
        objective,
        given,
        numbers,
        seed=seed,
        sampler=sampler_of(objective.config, sampling.sampler),
        steps=sampling.steps,
        shift=sampling.shift,
        guidance=guidance_of(sampling),
        share=share,
        **chosen(sampling),
    )
    return objective.data.to_stored_units(objective.model.detokenize(tokens))


def check_autoencoder(objective: Diffusion, sampling: SamplingConfig) -> None:
    """Load [sampling] vae; UserError if it did not make the data's latents."""
    if sampling.vae:
        vae = autoencoder_of(objective, sampling)
        vae.check_fits(objective.data, "[sampling] vae", objective.channels)


@contextmanager
def decoder(
    objective: Diffusion, sampling: SamplingConfig, device: torch.device
) -> Iterator[Autoencoder]:
    """The autoencoder of [sampling] vae, on `device` within the block and on the CPU after."""
    vae = autoencoder_of(objective, sampling)
    vae.module.to(device)
    try:
        yield vae
    finally:
        vae.module.cpu()


def autoencoder_of(objective: Diffusion, sampling: SamplingConfig) -> Autoencoder:
    """The autoencoder of [sampling] vae, on the CPU; loaded once."""
    assert sampling.vae
    if sampling.vae not in objective.autoencoders:
        on_cpu = torch.device("cpu")
        objective.autoencoders[sampling.vae] = autoencoder.load(
            sampling.vae, on_cpu, "[sampling] vae"
        )
    return objective.autoencoders[sampling.vae]
