"""The variational bound of discrete-time diffusion, in bits (arXiv:2006.11239 sec. 2 and 3.3)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.diffusion.noise_schedule import Tables, per_sample

HALF_BIN = 1 / 255
"""Half the bin width of an 8-bit picture in [-1, 1]."""


def bits_per_value(
    clean: Float[Tensor, "b ..."],
    noisy: Float[Tensor, "b ..."],
    step: Int64[Tensor, " b"],
    estimate: Float[Tensor, "b ..."],
    log_variance: Float[Tensor, "b ..."],
    tables: Tables,
) -> Float[Tensor, "b ..."]:
    """The bound's term at each sample's step, per element, in bits.

    The KL divergence from q(x_k-1 | x_k, x_0) to the network's distribution, whose mean follows
    from its `estimate` of x_0. At step 0 it is the negative log-likelihood of the data.
    """
    mean = tables.posterior_mean(estimate, noisy, step)
    divergence = gaussian_kl(
        tables.posterior_mean(clean, noisy, step),
        per_sample(tables.posterior_log_variance, step, clean),
        mean,
        log_variance,
    )
    surprise = -log_likelihood(clean, mean, log_variance)
    is_last = (step == 0).view(-1, *[1] * (clean.ndim - 1))
    return torch.where(is_last, surprise, divergence) / math.log(2)


def gaussian_kl(
    mean_p: Float[Tensor, "*s"],
    log_variance_p: Float[Tensor, "*#s"],
    mean_q: Float[Tensor, "*s"],
    log_variance_q: Float[Tensor, "*#s"],
) -> Float[Tensor, "*s"]:
    """KL(p || q) of two normal distributions, in nats."""
    gap = log_variance_p - log_variance_q
    distance = (mean_p - mean_q).square() * torch.exp(-log_variance_q)
    return 0.5 * (torch.exp(gap) - gap - 1 + distance)


def log_likelihood(
    x: Float[Tensor, "*s"], mean: Float[Tensor, "*s"], log_variance: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Log probability of the 8-bit bin around x under a normal (arXiv:2006.11239 eq. 13).

    The outermost bins reach to infinity. Latents are not 8-bit, but the original DiT trains with
    this term too.
    """
    precision = torch.exp(-0.5 * log_variance)
    below_upper_edge = normal_cdf(precision * (x - mean + HALF_BIN))
    below_lower_edge = normal_cdf(precision * (x - mean - HALF_BIN))
    inside = torch.where(x > 0.999, 1 - below_lower_edge, below_upper_edge - below_lower_edge)
    inside = torch.where(x < -0.999, below_upper_edge, inside)
    return inside.clamp(min=1e-12).log()


def normal_cdf(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The standard normal CDF by its tanh approximation, within 3e-4."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
