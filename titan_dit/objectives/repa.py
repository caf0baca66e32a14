"""Representation alignment (REPA, arXiv:2410.06940): a second loss on the output of one block.

Its gradient joins that of the block's output (`Joined`), on the pipeline stage that holds the
block: the loss needs no other stage, and nothing but the stream travels between them. The module
follows its block, outside of what recomputation runs twice. Features and weights come as side
inputs, so that microbatches and slices of tokens are those of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call

from titan_dit.config.section import UserError
from titan_dit.config.training import RepaConfig
from titan_dit.data.latent_facts import FEATURES
from titan_dit.models import initializers
from titan_dit.models.base import Model, ModelSpec, SideInputs, Stream, TensorSpec
from titan_dit.models.initializers import Independent, Initializer
from titan_dit.objectives.base import Prepared, at_least_fp32

WEIGHT, FACTOR = "repa_weight", "repa_factor"
"""Side inputs: weights of the tokens in the step's loss, [b, n]; factor of the gradient."""
TOKENS = "tokens"
"""The stream's tensor whose tokens are aligned."""
EPSILON = 1e-6


def fan_bound(shape: torch.Size) -> float:
    """Xavier's bound, sqrt(6 / (fan_in + fan_out)), also of a convolution [out, in, h, w]."""
    return math.sqrt(6 / (math.prod(shape[1:]) + shape[0] * math.prod(shape[2:])))


XAVIER = Independent("uniform", fan_bound)


class Alignment(nn.Module):
    """Projects a block's tokens, and adds the gradient of their distance from the features."""

    own_tokens: Callable[[Tensor], Tensor] = staticmethod(lambda tokens: tokens)
    """Values [b, n, ...] of a cp rank's tokens -> values of this tp rank's tokens; replaced by
    sequence parallelism."""
    join_tokens: Callable[[Tensor], Tensor] = staticmethod(lambda tokens: tokens)
    """This rank's tokens -> all tokens of the picture, which a convolution takes."""
    own_of_all: Callable[[Tensor], Tensor] = staticmethod(lambda tokens: tokens)
    """The inverse of `join_tokens`."""
    own_weights: Callable[[Tensor], Tensor] | None = None
    """A parameter -> a plain tensor; tp replaces it."""

    def __init__(self, config: RepaConfig, width: int, place: int, grid: tuple[int, int]) -> None:
        """`width`: of the tokens, which are the stream's tensor `place`. `grid`: rows, columns."""
        super().__init__()
        assert config.dim
        self.grid, self.place, inner = grid, place, config.hidden_size
        self.projector: nn.Module
        self.is_conv = config.projector == "conv"
        if self.is_conv:
            self.projector = nn.Conv2d(width, config.dim, 3, padding=1)
        else:
            self.projector = nn.Sequential(
                nn.Linear(width, inner),
                nn.SiLU(),
                nn.Linear(inner, inner),
                nn.SiLU(),
                nn.Linear(inner, config.dim),
            )
        self.sums: Tensor | None = None
        """[sum of weight x loss, sum of weights] over tokens since the last `take_sums`."""

    def rests(self, side: SideInputs) -> bool:
        """See `Model.objective`: without gradients, and after [repa] last_step."""
        return not torch.is_grad_enabled() or FEATURES not in side

    def forward(self, stream: Stream, side: SideInputs) -> Stream:
        """The same stream; its gradient is that of this loss, too."""
        tokens, weight = stream[self.place], self.own_tokens(side[WEIGHT])
        projected = self.project(tokens)
        losses = -similarity(projected, self.own_tokens(side[FEATURES]))  # [b, n]
        loss = (losses * weight).sum()
        value = loss.detach()
        found = torch.stack([value.float(), weight.sum().float()])
        self.sums = found if self.sums is None else self.sums + found
        # NaN if the loss is not finite, so that the gradient norm shows it: see execution.scored.
        factor = side[FACTOR].to(loss.dtype) * (1 + (value - value))
        joined = Joined.apply(tokens, loss, factor)  # type: ignore[no-untyped-call]
        return (*stream[: self.place], joined, *stream[self.place + 1 :])

    def project(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n dim"]:
        """Predicted features of a rank's tokens."""
        if not self.is_conv:
            return self.projected(tokens)
        pictures = torch.unflatten(self.join_tokens(tokens).transpose(1, 2), 2, self.grid)
        return self.own_of_all(self.projected(pictures).flatten(2).transpose(1, 2))

    def projected(self, x: Tensor) -> Tensor:
        """The projector's output [b, n, features], with its parameters as plain tensors."""
        weights = dict(self.projector.named_parameters())
        x = x.to(next(iter(weights.values())).dtype)
        if self.own_weights is None:
            found: Tensor = self.projector(x)
            return found
        plain = {name: self.own_weights(weight) for name, weight in weights.items()}
        return functional_call(self.projector, plain, (x,))  # type: ignore[no-any-return]

    def take_sums(self) -> Tensor | None:
        """Return `sums`, and reset them."""
        found, self.sums = self.sums, None
        return found


class Joined(torch.autograd.Function):
    """Tokens whose gradient is also that of a loss times a factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        """The tokens, unchanged; `loss` and `factor` are scalars."""
        ctx.save_for_backward(factor)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of the tokens, which is `grad`, and of the loss, which is `factor`."""
        (factor,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad, factor, None


def similarity(a: Float[Tensor, "b n d"], b: Shaped[Tensor, "b n d"]) -> Float[Tensor, "b n"]:
    """The cosine of the angle between two vectors of each token, in fp32 or fp64."""
    wide = at_least_fp32(a)
    return F.cosine_similarity(wide, b.to(wide.dtype), dim=-1, eps=EPSILON)


def normalized(features: Shaped[Tensor, "b n d"], share: float | None) -> Shaped[Tensor, "b n d"]:
    """Features without a share of their mean over tokens, divided by their std over tokens.

    iREPA's spatial normalisation (arXiv:2512.10794); None leaves them as they are.
    """
    if share is None:
        return features
    # Not in fp16 again: an element that is equal in all tokens has std 0, and gets huge.
    wide = at_least_fp32(features)
    std, mean = torch.std_mean(wide, dim=1, keepdim=True)
    return (wide - share * mean) / (std + EPSILON)


def with_alignment(spec: ModelSpec, config: RepaConfig, grid: tuple[int, int]) -> ModelSpec:
    """A network with the module of [repa] behind its block. Raises UserError if it has none.

    `grid`: rows and columns of a picture's tokens.
    """
    block = config.block
    assert block
    if block > spec.num_layers:
        raise UserError(
            f"[repa] block={block}, but [model] has {spec.num_layers} blocks. Set a number from 1 "
            f"to {spec.num_layers}."
        )
    if config.dim is None:
        raise UserError(
            f"[repa] block={block} without dim. Set dim, the elements of a token's features, as "
            "`data encode --features` prints them."
        )
    if TOKENS not in spec.stream:
        raise UserError(
            f"[repa] block={block}: the stream of [model] is {', '.join(spec.stream)}, without "
            f"{TOKENS}. Name the picture's tokens so in its spec, or leave [repa] out."
        )
    if "reference_rotary" in spec.static:
        raise UserError(
            f"[repa] block={block} with [model] reference_tokens=true: blocks hold the tokens of "
            "the reference beside the picture's, and [repa] aligns the picture's alone. Set "
            "condition_channels in place of reference_tokens, or leave [repa] out."
        )
    number, width = spec.stream[TOKENS].shape
    if number != math.prod(grid):
        raise UserError(
            f"[repa] block={block}: [model] has {number} tokens for {grid[0]} x {grid[1]} of the "
            "picture: it pads them, which [repa] does not take. Leave it out."
        )
    place = [*spec.stream].index(TOKENS)

    def build() -> Model:
        model = spec.build()
        model.objective[str(block - 1)] = Alignment(config, width, place, grid)
        return model

    own = {
        FEATURES: TensorSpec((number, config.dim), token_dim=0),
        WEIGHT: TensorSpec((number,), token_dim=0, dtype=torch.float32),
    }
    return replace(
        spec, build=build, context={**spec.context, **own}, optional=(*spec.optional, *own)
    )


def alignments(model: Model) -> list[Alignment]:
    """The modules of [repa] in a part of a network: one or none."""
    return [module for module in model.objective.values() if isinstance(module, Alignment)]


def table_of(model: Model) -> dict[str, Initializer]:
    """Initial distributions of the projectors' parameters, by name: Xavier, zero biases."""
    return {
        name: initializers.zeros if name.endswith("bias") else XAVIER
        for name, _ in model.named_parameters()
        if name.startswith("objective.")
    }


def weighted(config: RepaConfig, prepared: Prepared, loss_scale: Tensor | None) -> Prepared:
    """A batch with the side inputs of its `Alignment`; unchanged without features.

    The loss is a mean over the step's tokens, as the objective's. `loss_scale`: see
    `Executor.step`.
    """
    if FEATURES not in prepared.context:
        return prepared
    weight, total = prepared.token_weight, prepared.total_tokens
    assert total is not None
    weight = weight.expand(-1, prepared.context[FEATURES].shape[1])
    factor = torch.full((), config.weight, dtype=torch.float32, device=weight.device)
    if loss_scale is not None:
        factor = factor * loss_scale
    return replace(
        prepared,
        context={**prepared.context, WEIGHT: weight / total},
        static={**prepared.static, FACTOR: factor},
    )


def readings(
    parts: Iterable[Model], device: torch.device, total: Callable[[Tensor], Tensor]
) -> Mapping[str, float | None]:
    """`repa_loss`: mean over the tokens since the last call; {} if there were none. Collective.

    `total`: all-reduce over all ranks. Ranks of tp that hold the same tokens count alike.
    """
    sums = torch.zeros(2, device=device)
    for module in (each for part in parts for each in alignments(part)):
        found = module.take_sums()
        sums = sums if found is None else sums + found
    loss, weight = total(sums).tolist()
    if weight == 0:
        return {}
    value = loss / weight
    return {"repa_loss": value if math.isfinite(value) else None}


def reading(
    config: RepaConfig,
    parts: Iterable[Model],
    device: torch.device,
    total: Callable[[Tensor], Tensor],
) -> Callable[[], Mapping[str, float | None]]:
    """`readings` of a run; of one without [repa] always {}, without communication."""
    return partial(readings, [*parts], device, total) if config.block else dict
