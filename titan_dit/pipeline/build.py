"""A model on the meta device to an executor: cut, spread over the mesh, given its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titan_dit.config import JobConfig
from titan_dit.models.base import Model
from titan_dit.parallel import float8, tensor
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor import TensorPlan
from titan_dit.pipeline.base import Executor, Shapes
from titan_dit.pipeline.checks import microbatch_size, num_microbatches
from titan_dit.pipeline.local import LocalExecutor
from titan_dit.pipeline.pipelined import PipelinedExecutor
from titan_dit.pipeline.sliced import SlicedExecutor
from titan_dit.pipeline.trial import try_out
from titan_dit.schedules.balance import check_split, layers_of_stages, split_layers
from titan_dit.schedules.layout import rank_of_stage, stages_of_rank, stages_per_rank
from titan_dit.schedules.orders import pipeline_order

Config = JobConfig[Any, Any, Any]


@dataclass(frozen=True)
class Built:
    """A network in place, ready to run."""

    executor: Executor
    parameters: dict[str, nn.Parameter]
    """This rank's, under the names of the whole network."""
    num_parameters: int
    """Of the whole network."""
    flops_per_sample: int
    """Of the whole network, forward and backward."""
    notes: Sequence[str]
    """What a user had better know of how it was built."""


def build(
    config: Config, mesh: Mesh, plan: Callable[[bool], TensorPlan], device: torch.device
) -> Built:
    """The part of the network that this rank holds, spread over the mesh, with initial weights."""
    try_out(config, mesh.sizes, device)
    parts, count, flops = spread(config, mesh, plan)
    for part in parts.values():
        initialize(part, part.init_laws(), config.job.seed, device)
    parameters = {name: p for part in parts.values() for name, p in part.named_parameters()}
    executor = executor_of(config, mesh, parts, plan, device)
    notes = float8.account(parts.values(), config.precision)
    return Built(executor, parameters, count, flops, notes)


def spread(
    config: Config, mesh: Mesh, plan: Callable[[bool], TensorPlan]
) -> tuple[dict[int, Model], int, int]:
    """The stages of this rank on the meta device, spread over the mesh.

    Beside them the parameters and FLOPs of the whole network, as in `Built`.
    """
    stages = split_of(config, mesh)
    tokens = config.model.token_shape[0] // mesh.sizes.cp
    parts: dict[int, Model] = {}
    for stage in stages_held(config, mesh):
        with torch.device("meta"):
            channels = config.model.sample_shape[0]
            model: Model = config.model.build(config.objective.output_channels(channels))
        count = sum(parameter.numel() for parameter in model.parameters())
        flops = model.flops_per_sample(config.model.token_shape[0])
        model.cut(stages[stage], is_first=stage == 0, is_last=stage == len(stages) - 1)
        parallelize(
            model,
            mesh,
            plan,
            config.parallel,
            config.precision,
            config.remat,
            config.compile,
            rows=microbatch_size(config, mesh.sizes) * tokens,
        )
        parts[stage] = model
    return parts, count, flops


def stages_held(config: Config, mesh: Mesh) -> tuple[int, ...]:
    """The stages of this rank."""
    pipeline = config.pipeline
    if mesh.sizes.pp == 1:
        return (0,)
    return stages_of_rank(
        pipeline.schedule, mesh.pp.get_local_rank(), mesh.sizes.pp, pipeline.virtual_stages
    )


def split_of(config: Config, mesh: Mesh) -> tuple[range, ...]:
    """The layers of every stage."""
    pipeline, pp = config.pipeline, mesh.sizes.pp
    if pp == 1:
        return (range(config.model.num_layers),)
    count, layers = (
        pp * stages_per_rank(pipeline.schedule, pipeline.virtual_stages),
        config.model.num_layers,
    )
    if pipeline.split:
        return layers_of_stages(check_split(pipeline.split, layers, count))
    channels = config.model.sample_shape[0]
    embed, head = config.model.edge_costs(config.objective.output_channels(channels))
    return layers_of_stages(split_layers(layers, count, embed=embed, head=head))


def executor_of(
    config: Config,
    mesh: Mesh,
    parts: dict[int, Model],
    plan: Callable[[bool], TensorPlan],
    device: torch.device,
) -> Executor:
    """What runs the parts, on all tokens or on a slice of them."""
    inner = whole_token_executor(config, mesh, parts, plan, device)
    if mesh.sizes.cp == 1:
        return inner
    targets = dict.fromkeys(config.objective.token_targets, 1)
    return SlicedExecutor(inner, mesh.cp, {**config.model.token_dims, **targets})


def whole_token_executor(
    config: Config,
    mesh: Mesh,
    parts: dict[int, Model],
    plan: Callable[[bool], TensorPlan],
    device: torch.device,
) -> Executor:
    """A pipeline, or the one part as it is."""
    pipeline, pp = config.pipeline, mesh.sizes.pp
    size, number = microbatch_size(config, mesh.sizes), num_microbatches(config, mesh.sizes)
    if pp == 1:
        return LocalExecutor(parts[0], config.objective.loss, size)
    count = pp * stages_per_rank(pipeline.schedule, pipeline.virtual_stages)
    return PipelinedExecutor(
        parts,
        mesh.pp,
        pipeline_order(
            pipeline.schedule,
            num_ranks=pp,
            num_microbatches=number,
            virtual_stages=pipeline.virtual_stages,
        ),
        [rank_of_stage(pipeline.schedule, stage, pp) for stage in range(count)],
        shapes_of(config, mesh, plan, size),
        config.objective.loss,
        size,
        number,
        device,
    )


def shapes_of(config: Config, mesh: Mesh, plan: Callable[[bool], TensorPlan], size: int) -> Shapes:
    """What a microbatch looks like on this rank between stages."""
    num_tokens, values = config.model.token_shape
    channels = config.model.sample_shape[0]
    outputs = values // channels * config.objective.output_channels(channels)
    num_tokens //= mesh.sizes.cp
    dtype = DTYPES[config.precision.dtype]
    with torch.device("meta"):
        stream = tuple(
            torch.empty(shape, dtype=dtype, requires_grad=True)
            for shape in tensor.local_shapes(
                config.model.stream_shapes(size, num_tokens),
                plan(config.parallel.sequence_parallel),
                mesh.sizes.tp,
            )
        )
        return Shapes(
            tokens=(torch.empty(size, num_tokens, values),),
            stream=stream,
            prediction=(torch.empty(size, num_tokens, outputs, dtype=dtype),),
        )
