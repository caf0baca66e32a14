"""Tensor and sequence parallelism: a plan of styles by submodule name, applied from outside.

Between blocks the stream is plain local tensors. The exception is DiT's condition: a replicated
DTensor, so that the gradients of all blocks accumulate before one all-reduce. Tokens may lie as
[n, b, d] in memory, so that they are gathered without a copy (`TokenFirst`).

An output layer sharded by rows (`ColwiseParallel`) gives each rank the logits of some rows of the
vocabulary (arXiv:1909.08053 sec. 3). The loss then takes three all-reduces of one number per token,
instead of an all-gather of the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from titan_dit.config.did_you_mean import nearest
from titan_dit.config.section import UserError
from titan_dit.kernels import cross_entropy
from titan_dit.models.base import Model, Stream, kind_of
from titan_dit.models.layers import JoinedRotary, NormOverHeads
from titan_dit.models.sample_dropout import SampleDropout
from titan_dit.models.vocabulary import Vocabulary
from titan_dit.ranks.shards import local

Styles = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan: placements of the stream, styles by submodule name."""

    stream: tuple[Shard | Replicate | None, ...]
    """Placement of each stream tensor between blocks. Shard: a local shard. Replicate: a DTensor
    whose gradients accumulate before one all-reduce. None: a whole plain tensor."""
    embed: Styles
    block: Styles
    """Styles of a block, unless `kinds` has those of its kind."""
    head: Styles
    kinds: Mapping[str, Styles] = field(default_factory=dict)
    """Kind of a block (`models.base.kind_of`) -> its styles."""
    token_first: bool = False
    """Tokens that are Shard(1) lie as [n, b, d] in memory, as `TokenFirst` styles take them."""

    def styles_of(self, block: nn.Module) -> Styles:
        """The styles of a block."""
        return self.kinds.get(kind_of(block), self.block)


def shard_dim(placement: Shard | Replicate | None) -> int | None:
    """The sharded dim, counting the batch dim; None if not sharded."""
    return placement.dim if isinstance(placement, Shard) else None


def sequence_shards(num_ranks: int, plan: TensorPlan) -> int:
    """Ranks over which the tokens between blocks are sharded; 1 if every rank has all."""
    return num_ranks if any(shard_dim(placement) == 1 for placement in plan.stream) else 1


def uncut(num_streams: int) -> TensorPlan:
    """The plan of a model without tensor parallelism."""
    return TensorPlan(stream=(None,) * num_streams, embed={}, block={}, head={})


def apply(model: Model, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Shard a model on the meta device; hooks call `enter` before and `leave` after its blocks."""
    parts = [(model.embed, plan.embed), (model.head, plan.head)]
    parts += [(block, plan.styles_of(block)) for block in model.blocks.values()]
    for part, styles in parts:
        if part is not None:
            apply_styles(part, mesh, styles)
    model.tie()
    if (size := sequence_shards(mesh.size(), plan)) > 1:
        rank = mesh.get_local_rank()
        for module in model.blocks.modules():
            if isinstance(module, SampleDropout):
                module.own_tokens = partial(own_chunk, rank=rank, size=size)
            elif isinstance(module, JoinedRotary):
                module.shards = size
    if model.embed is not None:
        model.embed.register_forward_hook(lambda _, __, out: enter(out, mesh, plan))
    else:
        model.register_forward_pre_hook(lambda _, args: (received(args[0], mesh, plan), *args[1:]))
    if model.head is not None:
        model.head.register_forward_pre_hook(
            lambda _, args: (leave(args[0], mesh, plan), *args[1:])
        )
    else:
        model.register_forward_hook(lambda _, __, out: to_send(out, plan))


def apply_styles(part: nn.Module, mesh: DeviceMesh, styles: Styles) -> None:
    """Shard a part of a model; UserError if a style names none of its submodules."""
    names = dict(part.named_modules())
    if unknown := [name for name in styles if name not in names]:
        raise UserError(
            f"[parallel] tensor_plan: {type(part).__name__} has no submodule "
            f"{unknown[0]}.{nearest(unknown[0], [name for name in names if name])}"
        )
    # An optional submodule that is disabled, such as a norm.
    present = {k: v for k, v in styles.items() if not isinstance(names[k], nn.Identity)}
    parallelize_module(part, mesh, present)


def check_tied(model: Model, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Raise UserError if a plan shards tied weights in two ways.

    The model is whole and on the meta device. Copies of its parts are sharded, since only a style
    itself knows what it does.
    """
    if not model.tied or model.embed is None or model.head is None:
        return
    trial = nn.ModuleDict({"embed": copy.deepcopy(model.embed), "head": copy.deepcopy(model.head)})
    apply_styles(trial["embed"], mesh, plan.embed)
    apply_styles(trial["head"], mesh, plan.head)
    for pair in model.tied.items():
        found = [placed(trial.get_parameter(name)) for name in pair]
        if found[0] != found[1]:
            raise UserError(
                f"[parallel] tensor_plan: {pair[0]} is {found[0]}, but {pair[1]}, to which it is "
                f"tied, is {found[1]}. Shard them alike."
            )


def placed(parameter: nn.Parameter) -> str:
    """A parameter's placement over tp, in words."""
    if not isinstance(parameter, DTensor):
        return "whole"
    (placement,) = parameter.placements
    return f"sharded by dim {placement.dim}" if isinstance(placement, Shard) else "replicated"


def own_chunk(positions: Tensor, rank: int, size: int) -> Tensor:
    """Positions [n / tp, ...] of the tokens that a rank holds between blocks, from all [n, ...].

    Cut as by `Shard(1)`.
    """
    share = positions.shape[0] // size
    return positions.narrow(0, rank * share, share)


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module whose inputs are equal on every rank, see `Replicated`."""
    parallelize_module(module, mesh, Replicated())


def local_shapes(
    shapes: tuple[tuple[int, ...], ...], plan: TensorPlan, num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """The shapes of one rank's stream between pipeline stages, from the global shapes."""
    if num_ranks == 1:
        return shapes
    found = []
    for shape, placement in zip(shapes, plan.stream, strict=True):
        own = list(shape)
        if isinstance(placement, Shard):
            own[placement.dim] //= num_ranks
        if is_token_first(placement, plan):
            own[:2] = own[1::-1]
        found.append(tuple(own))
    return tuple(found)


def enter(stream: Stream, mesh: DeviceMesh, plan: TensorPlan) -> Stream:
    """Convert the stream's whole plain tensors to the placements in `plan.stream`."""
    parts = []
    for tensor, placement in zip(stream, plan.stream, strict=True):
        if is_token_first(placement, plan):
            tensor = batch_first(split(token_first(tensor), mesh, 0))
        elif isinstance(placement, Shard):
            tensor = split(tensor, mesh, placement.dim)
        parts.append(tensor)
    return wrap(tuple(parts), mesh, plan)


def leave(stream: Stream, mesh: DeviceMesh, plan: TensorPlan) -> Stream:
    """The inverse of `enter`."""
    whole = []
    for tensor, placement in zip(unwrap(stream), plan.stream, strict=True):
        if is_token_first(placement, plan):
            tensor = batch_first(join(token_first(tensor), mesh, 0))
        elif isinstance(placement, Shard):
            tensor = join(tensor, mesh, placement.dim)
        whole.append(tensor)
    return tuple(whole)


def is_token_first(placement: Shard | Replicate | None, plan: TensorPlan) -> bool:
    """True for a stream tensor [b, n, ...] whose memory is [n, b, ...]."""
    return plan.token_first and shard_dim(placement) == 1


def received(stream: Stream, mesh: DeviceMesh, plan: TensorPlan) -> Stream:
    """The stream of a later pipeline stage, from local tensors in their memory order."""
    ordered = tuple(
        batch_first(tensor) if is_token_first(placement, plan) else tensor
        for tensor, placement in zip(stream, plan.stream, strict=True)
    )
    return wrap(ordered, mesh, plan)


def to_send(stream: Stream, plan: TensorPlan) -> Stream:
    """The inverse of `received`."""
    return tuple(
        token_first(tensor) if is_token_first(placement, plan) else tensor
        for tensor, placement in zip(unwrap(stream), plan.stream, strict=True)
    )


def wrap(stream: Stream, mesh: DeviceMesh, plan: TensorPlan) -> Stream:
    """Wrap `Replicate` tensors as DTensors, so that gradients accumulate before the all-reduce."""
    return tuple(
        DTensor.from_local(tensor, mesh, [placement], run_check=False)
        if isinstance(placement, Replicate)
        else tensor
        for tensor, placement in zip(stream, plan.stream, strict=True)
    )


def unwrap(stream: Stream) -> Stream:
    """The inverse of `wrap`."""
    return tuple(local(tensor) for tensor in stream)


def split(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's shard of a whole tensor [..., s, ...], s at `dim`: [..., s / tp, ...].

    Backward all-gathers the gradient.
    """
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(dim)]).to_local()


def join(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """All-gather the shards [..., s / tp, ...] of a tensor at `dim`: [..., s, ...].

    Backward keeps this rank's shard of the gradient.
    """
    part = DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
    # Every rank computes the same from here on, so the gradients are equal.
    return part.redistribute(placements=[Replicate()]).to_local()


def token_first(x: Tensor) -> Tensor:
    """[b, n, ...] to a contiguous [n, b, ...]; a view if memory has this order already."""
    return x.transpose(0, 1).contiguous()


def batch_first(x: Tensor) -> Tensor:
    """A contiguous [n, b, ...] as [b, n, ...], a view; its gradient is `token_first`."""
    result: Tensor = _BatchFirst.apply(x)  # type: ignore[no-untyped-call]
    return result


class _BatchFirst(torch.autograd.Function):
    """See `batch_first`. autograd's own gradient would be a view, which no collective takes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return token_first(grad)


class TokenFirst(ParallelStyle):
    """A style that gives its module tokens [n, b, d]; outside of it they are [b, n, d].

    A collective joins or splits its tensor along dim 0. With samples first in memory, the tokens of
    several samples would have to be cut and joined again around every collective.

    Only for modules that treat every token alike, such as linears. Placements of the inner style
    count the dims of [n, b, d]. The attribute `token_first` of the module is True.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (token_first(args[0]), *args[1:]))
        module = self.style._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: batch_first(out))
        module.token_first = True  # type: ignore[assignment]
        return module


def inner(style: ParallelStyle | None) -> ParallelStyle | None:
    """The style that shards the parameters."""
    return style.style if isinstance(style, TokenFirst) else style


def on_tokens(style: ParallelStyle, sequence_parallel: bool) -> ParallelStyle:
    """The style of a module over tokens: `TokenFirst` with sequence parallelism."""
    return TokenFirst(style) if sequence_parallel else style


def columns(sequence_parallel: bool) -> ParallelStyle:
    """The style of a linear over tokens that is sharded by its outputs."""
    tokens = Shard(0) if sequence_parallel else Replicate()
    return on_tokens(ColwiseParallel(input_layouts=tokens), sequence_parallel)


def rows(sequence_parallel: bool) -> ParallelStyle:
    """The style of a linear over tokens that is sharded by its inputs."""
    tokens = Shard(0) if sequence_parallel else Replicate()
    return on_tokens(RowwiseParallel(output_layouts=tokens), sequence_parallel)


def attention_and_mlp(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Styles of a block's `attn`, sharded by heads, and `mlp`, by its width (arXiv:1909.08053)."""
    return {
        "attn.qkv": columns(sequence_parallel),
        "attn.q_norm": ShardedNorm(),
        "attn.k_norm": ShardedNorm(),
        "attn.out": rows(sequence_parallel),
        "mlp.up": columns(sequence_parallel),
        "mlp.down": rows(sequence_parallel),
    }


def norm_of_tokens(sequence_parallel: bool) -> ParallelStyle:
    """The style of a norm between blocks' layers: on a rank's tokens, or replicated."""
    return TokenFirst(ShardedNorm(dim=0)) if sequence_parallel else Replicated()


def attention_beside_mlp(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """`attention_and_mlp` for a block in which both read the same tokens and add to the same.

    Its junction `read` gathers the tokens once, `summed` reduces both results as one.
    """
    tokens = Shard(0) if sequence_parallel else Replicate()

    def columns() -> ParallelStyle:
        return on_tokens(ColwiseParallel(), sequence_parallel)

    def rows() -> ParallelStyle:
        style = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        return on_tokens(style, sequence_parallel)

    return {
        **attention_and_mlp(sequence_parallel),
        "read": on_tokens(Gathered(tokens), sequence_parallel),
        "attn.qkv": columns(),
        "mlp.up": columns(),
        "attn.out": rows(),
        "mlp.down": rows(),
        "summed": on_tokens(Reduced(tokens), sequence_parallel),
    }


class Gathered(ParallelStyle):
    """A junction from a rank's tokens, placed as `tokens`, to all tokens: a replicated DTensor.

    The gradients of the layers that read it are partial sums, added up before one reduction.
    """

    def __init__(self, tokens: Placement) -> None:
        super().__init__()
        self.tokens = [tokens]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, __: object, own: Tensor) -> Tensor:
            found = DTensor.from_local(own, device_mesh, self.tokens, run_check=False)
            return found.redistribute(placements=[Replicate()])

        module.register_forward_hook(gather)
        return module


class Reduced(ParallelStyle):
    """A junction from a DTensor of partial sums over all tokens to a rank's, placed as `tokens`."""

    def __init__(self, tokens: Placement) -> None:
        super().__init__()
        self.tokens = [tokens]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def reduce(_: nn.Module, __: object, partial_sums: DTensor) -> Tensor:
            return partial_sums.redistribute(placements=self.tokens).to_local()

        module.register_forward_hook(reduce)
        return module


class ModulationColwise(ColwiseParallel):
    """A column-parallel linear whose output is all-gathered and applied to the rank's tokens.

    With sharded tokens each rank's output gradient covers only its tokens: a partial sum.
    """

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__(output_layouts=Replicate(), use_local_output=False)
        self.gradient = Partial() if sequence_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        gradient = [self.gradient]
        module.register_forward_hook(lambda _, __, out: out.to_local(grad_placements=gradient))
        return module


class ModulationReplicated(ParallelStyle):
    """A replicated table that is added to the condition, a replicated DTensor, for a rank's tokens.

    Gradients as in `ModulationColwise`: partial sums with sharded tokens.
    """

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.gradient = Partial() if sequence_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gradient = [self.gradient]

        def localize(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local(grad_placements=gradient)

        return distribute_module(module, device_mesh, None, None, localize)


class Replicated(ParallelStyle):
    """Replicated parameters (DTensors), for a module whose inputs are whole on all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def distribute(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs
            )

        def localize(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, distribute, localize)


class ShardedNorm(ParallelStyle):
    """A norm on shards along dim 1: heads of [b, heads, n, head_dim], or tokens of [b, n, d].

    Along `dim` 0 within `TokenFirst`. A rank's weight gradient covers only its shard: a partial sum
    over tp, which FSDP reduces.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.placements = [Shard(dim)]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements

        def distribute(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, placements, run_check=False) for x in inputs)

        def localize(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, distribute, localize)


class SummedNorm(ParallelStyle):
    """`NormOverHeads` on a rank's heads: its weights are sharded, its sums of squares all-reduced.

    Forward and backward each take one all-reduce of two fp32 numbers per token, one of the query
    and one of the key.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, NormOverHeads)

        def shard(_: str, norm: nn.Module, mesh: DeviceMesh) -> None:
            for name, weight in list(norm.named_parameters(recurse=False)):
                own = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
                norm.register_parameter(name, nn.Parameter(own))

        module.total = partial(total_over_ranks, mesh=device_mesh)
        module.own = local
        return distribute_module(module, device_mesh, shard)


def total_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a tensor of any shape over the ranks.

    Backward sums the gradient, of which each rank has a part.
    """
    part = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    total = part.redistribute(placements=[Replicate()]).to_local()
    # Two steps: a gradient that is a partial sum would pass the redistribution as it is.
    whole = DTensor.from_local(total, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def shard_logits(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let every `Vocabulary` of a model take logits that are sharded over the 1D `mesh`."""
    for module in model.modules():
        if isinstance(module, Vocabulary):
            module.score = partial(score_shard, mesh, module.rows)
            module.whole = partial(gather_logits, mesh, module.rows)


def score_shard(mesh: DeviceMesh, rows: int, logits: Tensor, targets: Tensor, size: int) -> Tensor:
    """`Vocabulary.score` of logits [b, n, this rank's rows], for targets [b, n].

    The logits have all `rows` if the plan replicates the layer.
    """
    if logits.shape[-1] == rows:
        return cross_entropy.cross_entropy(logits, targets, size)
    group = mesh.get_group()

    def reduced(value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(value, operation, group)
        return value

    shard = cross_entropy.VocabularyShard(
        first=mesh.get_local_rank() * largest_share(rows, mesh),
        largest=partial(reduced, operation=dist.ReduceOp.MAX),
        total=partial(reduced, operation=dist.ReduceOp.SUM),
    )
    return cross_entropy.cross_entropy(logits, targets, size, shard)


def gather_logits(mesh: DeviceMesh, rows: int, logits: Tensor) -> Tensor:
    """`Vocabulary.whole`: all-gather logits [b, n, this rank's rows] to [b, n, rows].

    Without gradients.
    """
    if logits.shape[-1] == rows:
        return logits
    mine = F.pad(logits, (0, largest_share(rows, mesh) - logits.shape[-1])).contiguous()
    parts = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(parts, mine, group=mesh.get_group())
    return torch.cat(parts, -1)[..., :rows]


def largest_share(rows: int, mesh: DeviceMesh) -> int:
    """Rows of every rank but the last ones, which have fewer if the ranks do not divide `rows`."""
    return -(-rows // mesh.size())
