"""Newton-Schulz iterations: U V^T of a matrix U S V^T, nearly, by matmuls alone.

The quintic's coefficients are those of https://kellerjordan.github.io/posts/muon: they grow small
singular values fastest. After 5 iterations those above about 0.01 of the norm are between 0.7 and
1.2, smaller ones are still growing.
"""

from __future__ import annotations

from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise matrices [k, a, b] in their own dtype."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The spectral norm becomes at most 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = gram.baddbmm(gram, gram, beta=B, alpha=C)
        x = x.baddbmm(polynomial, x, beta=A)
    found: Tensor = x.mT if is_tall else x
    return found


def cost(count: int, rows: int, columns: int) -> float:
    """FLOPs of an iteration on `count` matrices: 2 m^2 M twice and 2 m^3 once."""
    small, large = sorted((rows, columns))
    return count * 2.0 * small**2 * (2 * large + small)
