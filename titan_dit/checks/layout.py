"""Checks that ranks, batch and model fit the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from titan_dit.config.section import UserError, show
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.parallel.context import slicing_of
from titan_dit.parallel.mesh import axes
from titan_dit.parallel.tensor import TensorPlan, shard_dim
from titan_dit.pipeline.schedules.placement import check_schedule, check_split
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import schedule_of
from titan_dit.plan import RunPlan
from titan_dit.system.launched_as import LaunchedAs


def check_spec(plan: RunPlan) -> None:
    """Raise UserError unless [model] spec gives a ModelSpec."""
    model_spec: object = plan.spec
    if not isinstance(model_spec, ModelSpec):
        raise UserError(
            f"[model] spec gives a {type(model_spec).__name__}. Return a "
            "titan_dit.models.base.ModelSpec."
        )


def check_world(plan: RunPlan) -> None:
    """Raise UserError unless the product of the axes is the world size."""
    sizes, ranks = plan.sizes, plan.world_size
    if plan.parallel.dp_shard == 0:
        raise UserError("[parallel] dp_shard=0 is not a size. Set dp_shard = -1 or at least 1.")
    product = math.prod(asdict(sizes).values())
    if product == ranks:
        return
    if plan.resuming:
        refuse_refitted(plan)
    asked = {axis: getattr(plan.parallel, axis) for axis in asdict(sizes)}
    others = math.prod(size for axis, size in asked.items() if axis != "dp_shard")
    fits, fill = ranks % others == 0, asked["dp_shard"] == -1
    shown = [f"{a}={n}" for a, n in asked.items() if n > 1 or (a == "dp_shard" and not fill)]
    factors, were = " x ".join(shown), "was" if ranks == 1 else "were"
    if fill:
        raise UserError(
            f"[parallel] {factors} does not divide the {ranks} ranks started. "
            f"Launch a multiple of {others} ranks, or change the sizes."
        )
    fix = f"Set dp_shard = {ranks // others} or launch" if fits else "Launch"
    raise UserError(
        f"[parallel] {factors} = {product} ranks, but {ranks} {were} started. "
        f"{fix} {product} ranks."
    )


def refuse_refitted(plan: RunPlan) -> None:
    """Raise the error of a resumed run whose pp x cp x tp does not divide the world size."""
    ranks = plan.world_size
    one_model = plan.sizes.model
    kept = {axis: getattr(plan.sizes, axis) for axis in axes("samples", has=False)}
    below, above = ranks // one_model * one_model, -(-ranks // one_model) * one_model
    factors = " x ".join(f"{axis}={size}" for axis, size in kept.items() if size > 1)
    were = "was" if ranks == 1 else "were"
    launched = LaunchedAs.here()
    on_a_node = launched.local_world_size
    fits = [n for n in range(1, ranks // on_a_node) if n * on_a_node % one_model == 0]
    of_nodes = (
        f" On the nodes that are left: NNODES={fits[-1]}." if fits and launched.is_rank else ""
    )
    raise UserError(
        f"[parallel] {factors} = {one_model} ranks per model replica, which does not divide the "
        f"{ranks} that {were} started. Resume with "
        f"{' or '.join(str(number) for number in (below, above) if number)} ranks (any multiple "
        f"of {one_model}), or with smaller {', '.join(a for a in kept if kept[a] > 1)}.{of_nodes}"
    )


def check_tensor_specs(plan: RunPlan) -> None:
    """Raise UserError unless TensorSpecs have unique names and tokens that cp and tp divide."""
    model_spec = plan.spec
    if both := model_spec.context.keys() & model_spec.static.keys():
        raise UserError(
            f"[model] names {', '.join(sorted(both))} in both context and static, but blocks "
            "get them in one mapping. Give them different names."
        )
    for name, spec in (*model_spec.predictions.items(), *model_spec.trained_outputs.items()):
        if spec.token_dim is None or spec.shape[spec.token_dim] != model_spec.num_tokens:
            raise UserError(
                f"[model] prediction {name} is {list(spec.shape)} with token_dim={spec.token_dim}, "
                f"but num_tokens={model_spec.num_tokens}. Give one prediction per token."
            )
    for kind in ("inputs", "stream", "context", "static"):
        specs: Mapping[str, TensorSpec] = getattr(model_spec, kind)
        for name, spec in specs.items():
            tokens = None if spec.token_dim is None else spec.shape[spec.token_dim]
            if tokens is not None and tokens % plan.sizes.cp:
                raise UserError(
                    f"[parallel] cp={plan.sizes.cp} does not divide the {tokens} tokens of the "
                    f"model's {kind} {name}. "
                    f"Set cp = {largest_divisor(tokens, below=plan.sizes.cp)}."
                )
    for (name, spec), placement in zip(
        model_spec.stream.items(), plan.tensor_plan.stream, strict=True
    ):
        dim = shard_dim(placement)
        if dim is not None and plan.sizes.tp > 1:
            own = (1, *spec.shape)[dim]
            own //= plan.sizes.cp if dim - 1 == spec.token_dim else 1
            if own % plan.sizes.tp:
                raise UserError(
                    f"[parallel] tp={plan.sizes.tp} does not divide the {own} entries of the "
                    f"model's stream {name} on a rank. Set sequence_parallel = false, or another "
                    "tp or cp."
                )


def check_batch(plan: RunPlan) -> None:
    """Raise UserError unless every data-parallel rank gets whole microbatches of the batch.

    A resumed run pads its batch with samples of weight 0: it needs only one sample per rank.
    """
    sizes, batch = plan.sizes, plan.global_batch_size
    micro, ranks = plan.wanted_microbatch_size, sizes.data
    if plan.resuming:
        if ranks > batch:
            raise UserError(
                f"[training] global_batch_size={batch} is less than the {ranks} data-parallel "
                f"ranks. Launch at most {batch * sizes.model} ranks."
            )
        return
    unit = (micro or 1) * ranks
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        valid = " or ".join(str(size) for size in (below, above) if size)
        per_rank = f"microbatch_size={micro} x " if micro else ""
        if plan.sized_by_tokens:
            raise UserError(
                f"[training] tokens_per_step gives {batch} samples, which do not divide into "
                f"{per_rank}{ranks} data-parallel ranks. Set batch_multiple = {unit} or a multiple."
            )
        raise UserError(
            f"[training] global_batch_size={batch} does not divide into {per_rank}"
            f"{ranks} data-parallel ranks. Set global_batch_size = {valid}."
        )


def check_tensor(plan: RunPlan) -> None:
    """Raise UserError unless tp divides query groups and MLP width; tp > 1 needs a tensor plan."""
    model_spec, tp = plan.spec, plan.sizes.tp
    if tp > 1 and plan.tensor_plan_function is None:
        raise UserError(
            f"[parallel] tp={tp}: the model {show(plan.model_name)} has no tensor plan. "
            'Set tp = 1, or tensor_plan = "package.module:function" (docs/extending.md).'
        )
    try:
        tensor_plan = plan.tensor_plan
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(
            "[parallel] tensor_plan, called with sequence_parallel="
            f"{show(plan.parallel.sequence_parallel)}, raised {type(error).__name__}: {text}. "
            "Correct the function, or set tp = 1."
        ) from error
    if not isinstance(tensor_plan, TensorPlan):
        raise UserError(
            f"[parallel] tensor_plan: the plan of {show(plan.model_name)} returns a "
            f"{type(tensor_plan).__name__}. Return a titan_dit.parallel.tensor.TensorPlan."
        )
    if len(tensor_plan.stream) != len(model_spec.stream):
        raise UserError(
            f"[parallel] tensor_plan has placements for {len(tensor_plan.stream)} stream tensors, "
            f"but the model {show(plan.model_name)} has {len(model_spec.stream)}: "
            f"{', '.join(model_spec.stream)}. Give one placement each."
        )
    heads, groups = model_spec.num_heads, model_spec.num_key_value_heads or model_spec.num_heads
    if heads % groups:
        raise UserError(
            f"[model] num_key_value_heads={groups} does not divide num_heads={heads}. "
            f"Set num_key_value_heads = {largest_divisor(heads, below=groups)}, or leave it out "
            "for one per head."
        )
    shards = {"heads": heads, "query groups": groups, "MLP width": model_spec.ffn}
    for what, count in shards.items():
        if count % tp:
            common = math.gcd(*shards.values())
            fit = [str(size) for size in range(1, common + 1) if common % size == 0]
            raise UserError(
                f"[parallel] tp={tp} does not divide the model's {what} of {count}. Set tp = "
                f"{largest_divisor(common, below=tp)}. Sizes that divide all of "
                f"{', '.join(f'{name} ({size})' for name, size in shards.items())}: "
                f"{', '.join(fit)}."
            )


def check_context(plan: RunPlan) -> None:
    """Raise UserError unless cp divides tokens, with ulysses also heads.

    With sequence parallelism tp divides a rank's tokens. A causal ring needs two chunks of tokens
    for each rank.
    """
    model_spec, parallel, sizes = plan.spec, plan.parallel, plan.sizes
    tokens, slices = model_spec.num_tokens, sizes.cp
    if tokens % slices:
        raise UserError(
            f"[parallel] cp={sizes.cp} does not divide the {tokens} tokens of a sample. "
            f"Set cp = {largest_divisor(tokens, below=sizes.cp)}."
        )
    if parallel.sequence_parallel and tokens // slices % sizes.tp:
        raise UserError(
            f"[parallel] sequence_parallel=true: tp={sizes.tp} does not divide the "
            f"{tokens // slices} tokens of a rank. Set sequence_parallel = false, or change tp."
        )
    heads = model_spec.num_heads // sizes.tp
    if parallel.cp_method == "ulysses" and heads % sizes.cp:
        raise UserError(
            f'[parallel] cp_method="ulysses": cp={sizes.cp} does not divide the {heads} heads of a '
            f'rank (num_heads={model_spec.num_heads}, tp={sizes.tp}). Set cp_method = "ring" or '
            f"cp = {largest_divisor(heads, below=sizes.cp)}."
        )
    if sizes.cp == 1 or parallel.cp_method != "ring":
        return
    if model_spec.mask == "lengths":
        raise UserError(
            f'[parallel] cp={sizes.cp} with cp_method="ring" supports no mask by lengths, but the '
            f'model {show(plan.model_name)} has one. Set cp_method = "ulysses".'
        )
    if slicing_of(model_spec.mask, "ring") == "zigzag" and tokens % (2 * slices):
        raise UserError(
            f'[parallel] cp={slices} with cp_method="ring" and a causal mask gives each rank two '
            f"chunks of a sample, but {2 * slices} chunks do not divide its {tokens} tokens. Set "
            f'cp_method = "ulysses", or a multiple of {2 * slices} tokens.'
        )


def check_pipeline(plan: RunPlan) -> None:
    """Raise UserError unless every stage has a layer and the schedule fits the microbatches."""
    if plan.sizes.pp == 1:
        return
    sizes, pipeline, layers = plan.sizes, plan.pipeline, plan.spec.num_layers
    stages = plan.num_stages
    if stages > layers:
        raise UserError(
            f"[parallel] pp={sizes.pp} with [pipeline] schedule={show(pipeline.schedule)} has "
            f"{stages} stages, but the model has {layers} layers. Reduce pp or virtual_stages."
        )
    if pipeline.split:
        check_split(pipeline.split, layers, stages)
    check_schedule(
        pipeline.schedule,
        num_ranks=sizes.pp,
        num_microbatches=plan.num_microbatches if plan.resuming else plan.whole_microbatches,
        virtual_stages=pipeline.virtual_stages,
    )
    if ":" in pipeline.schedule:
        try:
            order = plan.order(plan.num_microbatches)
            check(
                order,
                num_stages=stages,
                num_microbatches=plan.num_microbatches,
                # torch's breadth-first class and others run backwards from the last microbatch on.
                in_sequence=schedule_of(pipeline.schedule).actions is None,
            )
        except ValueError as error:
            raise UserError(
                f"[pipeline] schedule={show(pipeline.schedule)}: {error} Correct the schedule's "
                "order."
            ) from None
    if plan.parallel.reshard_after_forward == "always":
        raise UserError(
            '[parallel] reshard_after_forward="always" would all-gather the parameters again for '
            f'every microbatch of pp={sizes.pp}. Set reshard_after_forward = "auto".'
        )


def largest_divisor(*numbers: int, below: int) -> int:
    """The largest number under `below` that divides all `numbers`."""
    return next(n for n in range(below - 1, 0, -1) if not any(number % n for number in numbers))
