"""Build an executor: cut a model into stages, parallelize them, initialise the weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titan_dit.config.section import UserError, show
from titan_dit.data.base import Batch
from titan_dit.execution import (
    BucketedExecutor,
    Executor,
    InputShapes,
    LocalExecutor,
    SlicedExecutor,
    TokenDims,
    TokenLoss,
    by_name,
    shapes_of_spec,
    with_dropout_words,
)
from titan_dit.models import lora, lora_dropout
from titan_dit.models.base import Model, ModelSpec, TensorSpec, default_initializer, kind_of
from titan_dit.models.initializers import Initializer
from titan_dit.models.layers import Attention
from titan_dit.objectives import repa
from titan_dit.objectives.base import Objective, Placement, Prepared, with_collect
from titan_dit.parallel import fsdp, tensor
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.compile import compile_prepare, compile_score, expect_shapes
from titan_dit.parallel.context import slicing_of
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.pipeline import tied
from titan_dit.pipeline.schedules.schedule import neighbours
from titan_dit.plan import RunPlan
from titan_dit.rng import SampleRNG

if TYPE_CHECKING:
    from titan_dit.pipeline.recording import PipelineRecording
    from titan_dit.pipeline.run_time import Links
    from titan_dit.pipeline.stage import Shapes


@dataclass(frozen=True)
class BuiltNetwork:
    """A network that is ready to run."""

    executor: Executor
    prepare: Callable[[Batch, SampleRNG], Prepared]
    """`Objective.collect`, then `prepare` for training; compiled with [compile] objective."""
    parameters: dict[str, nn.Parameter]
    """This rank's parameters, under the names of the whole network."""
    copies: Mapping[str, nn.Parameter]
    """Copies of tied weights that another stage owns, by the owners' names."""
    num_parameters: int
    """Parameters of the whole network."""
    flops_by_bucket: tuple[int, ...]
    """FLOPs of forward and backward of the whole network, for a sample of each bucket; one number
    if all data has one shape."""
    notes: Sequence[str]
    """Console lines about the build."""
    recording: PipelineRecording | None
    """Recording of the pipeline's timeline; None without a pipeline."""
    readings: Callable[[], Mapping[str, float | None]] = dict
    """Values for the next row of metrics, measured in the network since the last one. Collective.
    """

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of a sample of the largest bucket."""
        return max(self.flops_by_bucket)


def build(plan: RunPlan, objective: Objective, mesh: Mesh, device: torch.device) -> BuiltNetwork:
    """Build this rank's part of the network, parallelized, with initial weights."""
    if plan.compile.enabled:
        expect_shapes(len(plan.each_bucket))
    parts, count, flops = build_stages(plan, mesh)
    modules = objective.modules()
    count += sum(p.numel() for p in modules.parameters()) if modules is not None else 0
    for part in parts.values():
        table = {**part.initializers(), **lora.initializers(part), **repa.table_of(part)}
        initialize_by(plan, part, table, device)
    parameters = own_parameters(parts)
    if plan.num_stages - 1 in parts:  # The last stage computes the loss.
        parameters |= place_modules(plan, objective, mesh, device)
    executor = run_executor(plan, objective, mesh, parts, device)
    placement = Placement(
        partial(fsdp.shard_frozen, mesh=mesh.data, device=device),
        mesh.sizes.data,
        lambda: mesh.same_samples(device),
    )
    lines = objective.place_frozen(placement, max(flops))
    return BuiltNetwork(
        executor=executor,
        prepare=prepare_of(plan, objective, device),
        parameters=parameters,
        copies=copies_of(parts),
        num_parameters=count,
        flops_by_bucket=flops,
        notes=[*lines, *float8_lines(plan, parts), *executor.notes],
        recording=recording_of(executor, plan, mesh),
        readings=repa.reading(plan.repa, parts.values(), device, mesh.sum_over_all),
    )


def prepare_of(
    plan: RunPlan, objective: Objective, device: torch.device
) -> Callable[[Batch, SampleRNG], Prepared]:
    """See `BuiltNetwork.prepare`; with the random words of [lora] dropout."""
    prepare = with_collect(objective, compile_prepare(objective, plan.compile, device))
    if not plan.lora.dropout:
        return prepare
    specs = {shapes_of_spec(each.spec): each.spec for each in plan.each_bucket}

    def spec_of(prepared: Prepared) -> ModelSpec:
        shapes = frozenset((name, tuple(t.shape[1:])) for name, t in prepared.inputs.items())
        return specs.get(shapes, plan.spec)

    return with_dropout_words(prepare, spec_of)


def float8_lines(plan: RunPlan, parts: Mapping[int, Model]) -> list[str]:
    """Console lines about float8 layers; [] without float8."""
    if plan.precision.float8 == "off":
        return []
    from titan_dit.parallel import float8

    return float8.console_lines(parts.values(), plan.precision)


def recording_of(executor: Executor, plan: RunPlan, mesh: Mesh) -> PipelineRecording | None:
    """The recording of a run's first pipeline, on every rank.

    None without pp, and of buckets, whose steps run in different orders.
    """
    if mesh.sizes.pp == 1 or plan.buckets:
        return None
    from titan_dit.pipeline.pipelined import PipelinedExecutor
    from titan_dit.pipeline.recording import PipelineRecording

    pipelined = executor.inner if isinstance(executor, SlicedExecutor) else executor
    assert isinstance(pipelined, PipelinedExecutor)
    sizes = [plan.spec.cost(layers) for layers in plan.stage_layers]
    others = [field.name for field in fields(AxisSizes) if field.name != "pp"]
    takes_part = not any(mesh.axis(name).get_local_rank() for name in others)
    count = mesh.sizes.product("samples") * mesh.sizes.model // mesh.sizes.pp
    pipeline = mesh.axis("pp")
    return PipelineRecording(pipelined, pipeline, sizes, takes_part=takes_part, num_pipelines=count)


def own_parameters(parts: Mapping[int, Model]) -> dict[str, nn.Parameter]:
    """Parameters that this rank trains and saves, by name; without copies of tied weights."""
    return {
        name: parameter
        for part in parts.values()
        for name, parameter in part.named_parameters()
        if name not in part.tied
    }


def copies_of(parts: Mapping[int, Model]) -> dict[str, nn.Parameter]:
    """This rank's copies of tied weights, see `tied.copies_of`."""
    return {name: copy for part in parts.values() for name, copy in tied.copies_of(part).items()}


def build_stages(plan: RunPlan, mesh: Mesh) -> tuple[dict[int, Model], int, tuple[int, ...]]:
    """This rank's stages on the meta device, parallelized.

    Also returns the parameters and FLOPs by bucket of the whole network, as in `BuiltNetwork`.
    """
    last = plan.num_stages - 1
    parts: dict[int, Model] = {}
    for stage in plan.stages_of(mesh.axis("pp").get_local_rank()):
        with torch.device("meta"):
            model = plan.spec.build()
        check_model(model, plan.spec)
        mesh.p2p.open(neighbours(plan.stage_ranks, joins_ends=bool(model.tied)))
        count = sum(parameter.numel() for parameter in model.parameters())
        tokens = [each.spec.num_attended_tokens for each in plan.each_bucket]
        flops = tuple(model.flops_per_sample(number) for number in tokens)
        if plan.sizes.tp > 1:
            tensor.check_tied(model, mesh.axis("tp"), plan.tensor_plan)
        model.cut(plan.stage_layers[stage], is_first=stage == 0, is_last=stage == last)
        parallelize(
            model,
            mesh,
            plan.tensor_plan,
            plan.parallel,
            plan.precision,
            plan.activation_checkpoint,
            plan.compile,
            tokens=microbatch_tokens(plan),
            adapters=plan.lora,
            streams=plan.spec.stream,
            device=plan.device,
            offload=plan.offload,
        )
        parts[stage] = model
    return parts, count, flops


def microbatch_tokens(plan: RunPlan) -> int:
    """Tokens of a microbatch on a rank, of the largest bucket; of one that float8 does not fit."""
    tokens = [each.microbatch_size * each.attended_per_rank for each in plan.each_bucket]
    if plan.precision.float8 == "off":
        return max(tokens)
    from titan_dit.parallel.float8 import UNIT

    return max(tokens, key=lambda number: (number % UNIT != 0, number))


def check_model(model: Model, model_spec: ModelSpec) -> None:
    """Raise UserError if a model contradicts its spec."""
    wanted = [str(layer) for layer in range(model_spec.num_layers)]
    blocks = getattr(model, "blocks", None)
    if not isinstance(model, Model) or not isinstance(blocks, nn.ModuleDict):
        raise UserError(
            f"[model] builds a {type(model).__name__}, which is no titan_dit.models.base.Model. "
            "Derive it from that class, with embed, blocks (a ModuleDict) and head."
        )
    if list(blocks) != wanted:
        raise UserError(
            f"[model] its spec says num_layers={model_spec.num_layers}, but its blocks are "
            f"{', '.join(blocks) or 'none'}. Key them by layer, from 0 to "
            f"{model_spec.num_layers - 1}."
        )
    kinds = tuple(map(kind_of, blocks.values()))
    if kinds != model_spec.kinds:
        raise UserError(
            f"[model] its spec says layer_kinds={show(model_spec.layer_kinds)}, but the attribute "
            f"`kind` of its blocks is {show(kinds)}. Make them agree."
        )
    heads = model_spec.num_heads
    groups = model_spec.num_key_value_heads or heads
    for name, layer in model.named_modules():
        if not isinstance(layer, Attention):
            continue
        wanted_of_layer = {"mask": model_spec.mask, "num_key_value_heads": groups}
        found = {"mask": layer.mask, "num_key_value_heads": heads // layer.group_size}
        for key, value in wanted_of_layer.items():
            if found[key] != value:
                raise UserError(
                    f"[model] its spec says {key}={show(value)}, but {name} has "
                    f"{key}={show(found[key])}. Make them the same."
                )


def place_modules(
    plan: RunPlan, objective: Objective, mesh: Mesh, device: torch.device
) -> dict[str, nn.Parameter]:
    """The parameters of the objective's modules, replicated over tp, sharded like the model's."""
    modules = objective.modules()
    if modules is None:
        return {}
    for module in modules.values():
        if mesh.sizes.tp > 1:
            tensor.replicate(module, mesh.axis("tp"))
        fsdp.shard_module(module, mesh.fsdp, plan.precision, on_host=plan.offload.parameters)
    # A prefix, so that their names differ from the model's.
    holder = nn.ModuleDict({"objective": modules})
    tensors = itertools.chain(holder.named_parameters(), holder.named_buffers())
    initializers = {name: default_initializer(name, tensor) for name, tensor in tensors}
    initializers |= {
        f"objective.{name}": initializer for name, initializer in objective.initializers().items()
    }
    initialize_by(plan, holder, initializers, device)
    return dict(holder.named_parameters())


def initialize_by(
    plan: RunPlan, module: nn.Module, table: Mapping[str, Initializer], device: torch.device
) -> None:
    """Allocate and initialise a module that is on the meta device, as the plan says."""
    on_host = plan.offload.parameters
    initialize(module, table, plan.seed, device, plan.initial_weights, on_host=on_host)


def run_executor(
    plan: RunPlan, objective: Objective, mesh: Mesh, parts: dict[int, Model], device: torch.device
) -> Executor:
    """The executor of a run.

    Data in buckets gets an executor for each bucket, over the same parts.
    """
    links = links_of(plan, mesh, device)
    # Wide and tall pictures of as many tokens share one.
    by_shapes = {shapes_of_spec(each.spec): each for each in plan.each_bucket}
    found = {
        shapes: executor_of(each, objective, mesh, parts, device, links)
        for shapes, each in by_shapes.items()
    }
    if not plan.buckets:
        return next(iter(found.values()))
    drawn = {shapes_of_spec(spec): spec for spec in objective.drawn_specs()}

    def make(shapes: InputShapes) -> Executor | None:
        """Build the executor for shapes that only sampling uses; None for unknown shapes."""
        if shapes not in drawn:
            return None
        own = replace(plan, spec=drawn[shapes], buckets=())
        return executor_of(own, objective, mesh, parts, device, links)

    return BucketedExecutor(found, make)


def links_of(plan: RunPlan, mesh: Mesh, device: torch.device) -> Links | None:
    """The connections of a run in run-time order, for the largest messages; else None."""
    if not plan.decides_at_run_time:
        return None
    # Lazy imports: most runs have no run-time order.
    from titan_dit.pipeline.run_time import Decisions, Links
    from titan_dit.pipeline.transports.choice import open_transport
    from titan_dit.pipeline.transports.shared_memory import Layout

    # With the largest shape: pictures may be drawn with longer captions than are trained on.
    streams = [shapes_of(each).stream for each in (plan, *plan.buckets)]
    largest = max(streams, key=lambda stream: Layout(stream).num_bytes)
    pipeline = plan.pipeline
    transport, line = open_transport(
        mesh.p2p, plan.stage_ranks, largest, device, pipeline.transport, pipeline.network
    )
    return Links(transport, line, Decisions(mesh.same_work))


def executor_of(
    plan: RunPlan,
    objective: Objective,
    mesh: Mesh,
    parts: dict[int, Model],
    device: torch.device,
    links: Links | None = None,
) -> Executor:
    """The executor of the parts, on all tokens or on a cp rank's slice of them.

    `links`: see `links_of`.
    """
    spec = lora_dropout.with_words(plan.spec) if plan.lora.dropout else plan.spec
    executor = whole_token_executor(
        plan,
        mesh,
        parts,
        by_name(
            objective.loss,
            tuple(plan.spec.trained_outputs),
            plan.tokens_per_rank,
        ),
        device,
        links,
    )
    executor.score = compile_score(executor.score, objective, plan.compile, device)
    if mesh.sizes.cp > 1:
        dims = TokenDims.of(spec, objective.token_targets)
        slicing = slicing_of(plan.spec.mask, plan.parallel.cp_method)
        executor = SlicedExecutor(executor, mesh.axis("cp"), dims, slicing)
    executor.sum_over_data, executor.spec = mesh.sum_over_data, spec
    if plan.repa.block:
        executor.with_side_inputs = partial(repa.weighted, plan.repa)
    return executor


def whole_token_executor(
    plan: RunPlan,
    mesh: Mesh,
    parts: dict[int, Model],
    loss: TokenLoss,
    device: torch.device,
    links: Links | None,
) -> Executor:
    """The pipelined executor, or the local one without pp."""
    if mesh.sizes.pp == 1:
        return LocalExecutor(parts[0], loss, plan.microbatch_size)
    # Lazy imports: most runs have no pipeline.
    from titan_dit.pipeline.pipelined import PipelinedExecutor, PipelineParts

    given = PipelineParts(
        parts=parts,
        p2p=mesh.p2p,
        order=plan.order(plan.num_microbatches),
        stage_ranks=plan.stage_ranks,
        shapes=shapes_of(plan),
        loss=loss,
        microbatch_size=plan.microbatch_size,
        device=device,
        dtype=plan.dtype,
    )
    if not plan.decides_at_run_time:
        notes = [f"pipeline: {plan.runtime.line}"]
        if not plan.runtime.torch:
            return PipelinedExecutor(given, notes)
        from titan_dit.pipeline.torch_runtime import TorchExecutor

        return TorchExecutor(given, runtime=plan.runtime, notes=notes)
    from titan_dit.pipeline.run_time import DecidingExecutor

    assert links
    return DecidingExecutor(given, memory=plan.pipeline.memory, links=links)


def shapes_of(plan: RunPlan) -> Shapes:
    """The tensors of a microbatch between the stages of this rank, and after the last one."""
    from titan_dit.pipeline.stage import Shapes

    model_spec, size = plan.spec, plan.microbatch_size

    def local(spec: TensorSpec) -> tuple[int, ...]:
        dims = enumerate(spec.shape)
        own = (n // plan.sizes.cp if dim == spec.token_dim else n for dim, n in dims)
        return size, *own

    def empty(spec: TensorSpec, shape: tuple[int, ...], *, learns: bool = False) -> Tensor:
        dtype = spec.dtype_under(plan.dtype)
        learns = learns and dtype.is_floating_point
        return torch.empty(shape, dtype=dtype, requires_grad=learns)

    stream = list(model_spec.stream.values())
    wholes = tuple(local(spec) for spec in stream)
    shapes = tensor.local_shapes(wholes, plan.tensor_plan, plan.sizes.tp)
    with torch.device("meta"):
        return Shapes(
            stream=tuple(
                empty(spec, shape, learns=True) for spec, shape in zip(stream, shapes, strict=True)
            ),
            predictions=tuple(empty(spec, local(spec)) for spec in model_spec.predictions.values()),
            losses=torch.empty(
                size, plan.tokens_per_rank, dtype=torch.promote_types(plan.dtype, torch.float32)
            ),
        )
