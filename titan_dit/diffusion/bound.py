"""The variational bound of discrete diffusion, in bits (arXiv:2006.11239 sec. 2 and 3.3)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.diffusion.noise_schedule import Tables, per_sample

HALF_BIN = 1 / 255
"""Half the distance of two grey levels of an 8-bit picture in [-1, 1]."""


def bits_per_value(
    clean: Float[Tensor, "b ..."],
    noisy: Float[Tensor, "b ..."],
    step: Int64[Tensor, " b"],
    estimate: Float[Tensor, "b ..."],
    log_variance: Float[Tensor, "b ..."],
    tables: Tables,
) -> Float[Tensor, "b ..."]:
    """The bound's term of each sample's step, for every value of the sample.

    The KL divergence from q(x_k-1 | x_k, x_0) to the network's law, whose mean comes from its
    `estimate` of x_0; at step 0 the likelihood of the data under the network's law.
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
    """KL(p || q) of two normal laws, in nats."""
    gap = log_variance_p - log_variance_q
    distance = (mean_p - mean_q).square() * torch.exp(-log_variance_q)
    return 0.5 * (torch.exp(gap) - gap - 1 + distance)


def log_likelihood(
    x: Float[Tensor, "*s"], mean: Float[Tensor, "*s"], log_variance: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Log probability of the 8-bit bin around x under a normal law (arXiv:2006.11239 eq. 13).

    The outermost bins reach to infinity. Latents are no 8-bit pictures, but the original DiT
    trains with this term as it is.
    """
    precision = torch.exp(-0.5 * log_variance)
    below_upper_edge = normal_cdf(precision * (x - mean + HALF_BIN))
    below_lower_edge = normal_cdf(precision * (x - mean - HALF_BIN))
    inside = torch.where(x > 0.999, 1 - below_lower_edge, below_upper_edge - below_lower_edge)
    inside = torch.where(x < -0.999, below_upper_edge, inside)
    return inside.clamp(min=1e-12).log()


def normal_cdf(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The tanh approximation of the standard normal's distribution function, within 3e-4."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
