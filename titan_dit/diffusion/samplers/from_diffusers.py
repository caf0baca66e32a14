"""Schedulers of diffusers as samplers: `diffusers:CLASS`."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.diffusion.noise_schedule import NoiseSchedule
from titan_dit.diffusion.samplers.base import Sampler, Settings
from titan_dit.pictures.library import diffusers

PREFIX = "diffusers:"
PREDICTIONS = {"eps": "epsilon", "v": "v_prediction", "x": "sample"}
"""[objective] prediction -> diffusers' prediction_type."""
NAMED = 'Name another class, such as "diffusers:DPMSolverMultistepScheduler".'
OTHER = "Choose another scheduler, or more or fewer steps."
POINT = 0.5
"""Value of every element of the data in `check`."""
LARGEST_MISS, LEFT = 0.035, 3.5
"""Largest error in `check`, whose noise is at most 2: absolute, and in units of the sigma of the
first training step. Some schedulers leave 1% of the noise on purpose, others that step's noise."""


@runtime_checkable
class RawDenoiser(Protocol):
    """A network of discrete diffusion that predicts at any timestep, as `ddpm.Reverse` does."""

    @property
    def prediction(self) -> str:
        """The network's prediction, a key of `PREDICTIONS`."""

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of training."""

    def values(self, x: Tensor, timestep: Float[Tensor, " b"]) -> Tensor:
        """The prediction, without a variance."""


def sampler(name: str, path: str, where: str) -> Sampler:
    """The sampler "diffusers:CLASS" for a kind of diffusion; `where` names the key in errors."""
    library = diffusers(f"{where}={show(name)}")
    kind = getattr(library, name.removeprefix(PREFIX), None)
    if not inspect.isclass(kind) or not issubclass(kind, library.SchedulerMixin):
        raise UserError(
            f"{where}={show(name)}: diffusers has no scheduler {name.removeprefix(PREFIX)}. {NAMED}"
        )
    accepted = inspect.signature(kind).parameters
    if path == "rectified_flow":
        config = config_of_flow(kind.__name__, accepted)
        if config is None:
            raise UserError(
                f"{where}={show(name)} does not solve flows: it has no flow sigmas. {NAMED}"
            )

        def of_flow(velocity: Any, noise: Tensor, settings: Settings) -> Tensor:
            def raw(x: Tensor, timestep: Tensor) -> Tensor:
                return velocity(x, timestep / 1000)  # type: ignore[no-any-return]

            # The scheduler's own shift, and not one of the times that it then shifts again.
            own = {key: settings.shift for key in ("shift", "flow_shift") if key in accepted}
            return run(kind(**config, **own), raw, noise, settings)

        of_flow.__name__ = kind.__name__
        return of_flow
    if "trained_betas" not in accepted:
        raise UserError(
            f"{where}={show(name)} is not for discrete diffusion: it takes no betas. {NAMED}"
        )

    def of_ddpm(network: RawDenoiser, noise: Tensor, settings: Settings) -> Tensor:
        config = {"trained_betas": betas(network.schedule), "clip_sample": False}
        config |= {"num_train_timesteps": len(network.schedule)}
        config |= {"prediction_type": PREDICTIONS[network.prediction]}
        config |= {"snr_shift_scale": 1.0}  # CogVideoX's would change the noise levels.
        if "prediction_type" not in accepted and network.prediction != "eps":
            raise UserError(
                f"{where}={show(name)} predicts the noise only, but [objective] "
                f"prediction={show(network.prediction)}. {NAMED}"
            )
        return run(
            kind(**{k: v for k, v in config.items() if k in accepted}),
            network.values,
            noise,
            settings,
        )

    of_ddpm.__name__ = kind.__name__
    return of_ddpm


def check(draw: Sampler, process: Any, steps: int, what: str) -> None:
    """Raise UserError unless a scheduler ends at the data, tested with data equal to `POINT`.

    Some schedulers run towards noise, have noise levels of their own, or stop before the data.
    `process`: as `draw` takes it; its network is replaced by the exact one for `POINT`. `what`
    names the scheduler in errors.
    """
    is_discrete = isinstance(process, RawDenoiser)
    exact = PointDenoiser(process.prediction, process.schedule) if is_discrete else point_velocity
    first = math.sqrt(1 - process.schedule.alpha_bar[0]) if is_discrete else 0.0
    noise = torch.linspace(-2, 2, 8)[None, None]
    settings = Settings(steps, keys=lambda: torch.zeros(1, dtype=torch.int64))
    try:
        with torch.no_grad():
            missed = (draw(exact, noise, settings) - POINT).abs().max().item()
    except UserError:
        raise
    except Exception as error:  # Of any kind: diffusers does not check its arguments.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{what} cannot draw in {steps} steps ({reason}). {OTHER}") from None
    if not missed <= max(LARGEST_MISS, LEFT * first):
        raise UserError(
            f"{what} does not end at the data in {steps} steps: it misses them by {missed:.2g}. "
            f"{OTHER}"
        )


def point_velocity(x: Float[Tensor, "b n d"], t: Float[Tensor, " b"]) -> Tensor:
    """The velocity of a flow to `POINT`."""
    return (x - POINT) / t.clamp(min=1e-3)[:, None, None]


@dataclass(frozen=True)
class PointDenoiser:
    """The exact network of discrete diffusion for data equal to `POINT`: a `RawDenoiser`."""

    prediction: str
    schedule: NoiseSchedule

    def values(self, x: Float[Tensor, "b n d"], timestep: Float[Tensor, " b"]) -> Tensor:
        """The prediction at any timestep, also between two steps."""
        bars = torch.tensor(self.schedule.alpha_bar, dtype=torch.float64)
        low = timestep.long().clamp(0, len(bars) - 1)
        high = (low + 1).clamp(max=len(bars) - 1)
        bar = torch.lerp(bars[low], bars[high], timestep.double() - low)[:, None, None]
        signal, sigma = bar.sqrt().float(), (1 - bar).sqrt().float()
        noise = (x - signal * POINT) / sigma
        return {
            "eps": noise,
            "v": signal * noise - sigma * POINT,
            "x": torch.full_like(x, POINT),
        }[self.prediction]


def config_of_flow(name: str, accepted: Any) -> dict[str, Any] | None:
    """The settings with which a scheduler solves a flow; None if it cannot."""
    if name.startswith("FlowMatch"):
        return {}
    if "use_flow_sigmas" in accepted:
        return {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return None


def betas(schedule: NoiseSchedule) -> list[float]:
    """The betas of a noise schedule."""
    bars = (1.0, *schedule.alpha_bar)
    return [1 - now / before for before, now in itertools.pairwise(bars)]


def run(scheduler: Any, raw: Any, noise: Float[Tensor, "b n d"], settings: Settings) -> Tensor:
    """Draw with a scheduler; its fresh noise depends on each sample's seed, not on the batch."""
    scheduler.set_timesteps(settings.steps, device=noise.device)
    more: dict[str, Any] = {}
    accepted = inspect.signature(scheduler.step).parameters
    if "generator" in accepted:
        more["generator"] = generators(settings.seeds(), noise.device)
    if "eta" in accepted:
        more["eta"] = settings.eta
    x = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    for timestep in scheduler.timesteps:
        given = x
        if hasattr(scheduler, "scale_model_input"):
            given = scheduler.scale_model_input(x, timestep)
        found = raw(given, timestep.float().expand(len(x)).to(x.device))
        x = scheduler.step(found, timestep, x, **more).prev_sample
    return x


def generators(seeds: Int64[Tensor, " b"], device: torch.device) -> list[torch.Generator]:
    """A generator for every sample."""
    return [torch.Generator(device).manual_seed(seed) for seed in seeds.tolist()]
