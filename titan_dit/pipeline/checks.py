"""Whether a model, a batch and a schedule fit the mesh: asked before anything is built."""

from __future__ import annotations

import math
from typing import Any

from titan_dit.config import JobConfig
from titan_dit.models.base import ModelConfig
from titan_dit.parallel import float8_checks, remat
from titan_dit.parallel.mesh import AxisSizes, check_batch
from titan_dit.schedules.balance import check_split
from titan_dit.schedules.layout import SPLIT_BACKWARD, check_schedule, stages_per_rank
from titan_dit.section import UserError, show


def check_layout(
    config: JobConfig[Any, Any, Any], sizes: AxisSizes, following: bool = False
) -> None:
    """Raise a UserError that names the section, the values and a fix.

    `following`: of a run that has begun, whose batch need not divide (see `check_batch`).
    """
    check_batch(config.training, sizes, following)
    check_tensor(config.model, sizes)
    check_context(config, sizes)
    check_pipeline(config, sizes, following)
    check_compile(config, sizes)
    remat.check(config.remat, config.pipeline, config.compile, sizes)
    float8_checks.check(config, sizes)


def check_tensor(model: ModelConfig, sizes: AxisSizes) -> None:
    """Heads and the MLP's width are cut by tp."""
    for what, count in (("heads", model.num_heads), ("MLP width", model.ffn)):
        if count % sizes.tp:
            raise UserError(
                f"[parallel] tp={sizes.tp} does not divide the model's {what} of {count}. "
                f"Set tp = {largest_divisor(model.num_heads, model.ffn, below=sizes.tp)}."
            )


def check_context(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> None:
    """Tokens are sliced by cp and, with sequence parallelism, by tp; ulysses exchanges heads."""
    model, parallel = config.model, config.parallel
    tokens, slices = model.token_shape[0], sizes.cp
    if tokens % slices:
        raise UserError(
            f"[parallel] cp={sizes.cp} does not divide the {tokens} tokens of a sample. "
            f"Set cp = {largest_divisor(tokens, below=sizes.cp)}."
        )
    if parallel.sequence_parallel and tokens // slices % sizes.tp:
        raise UserError(
            f"[parallel] sequence_parallel=true: {tokens // slices} tokens of a rank do not divide "
            f"by tp={sizes.tp}. Set sequence_parallel = false, or another tp or cp."
        )
    heads = model.num_heads // sizes.tp
    if parallel.cp_method == "ulysses" and heads % sizes.cp:
        raise UserError(
            f'[parallel] cp_method="ulysses": cp={sizes.cp} does not divide the {heads} heads of a '
            f'rank (heads={model.num_heads}, tp={sizes.tp}). Set cp_method = "ring" or '
            f"cp = {largest_divisor(heads, below=sizes.cp)}."
        )


def check_pipeline(
    config: JobConfig[Any, Any, Any], sizes: AxisSizes, following: bool = False
) -> None:
    """Stages need layers, schedules need microbatches, and some of them cannot be compiled."""
    if sizes.pp == 1:
        return
    pipeline, layers = config.pipeline, config.model.num_layers
    stages = sizes.pp * stages_per_rank(pipeline.schedule, pipeline.virtual_stages)
    if stages > layers:
        raise UserError(
            f"[parallel] pp={sizes.pp} with [pipeline] schedule={show(pipeline.schedule)} makes "
            f"{stages} stages, but the model has {layers} layers. Set a smaller pp or "
            "virtual_stages."
        )
    if pipeline.split:
        check_split(pipeline.split, layers, stages)
    check_schedule(
        pipeline.schedule,
        num_ranks=sizes.pp,
        num_microbatches=(num_microbatches if following else whole_microbatches)(config, sizes),
        virtual_stages=pipeline.virtual_stages,
    )
    if pipeline.schedule in SPLIT_BACKWARD and config.compile.enabled:
        raise UserError(
            f"[pipeline] schedule={show(pipeline.schedule)} splits the backward pass, which torch "
            "cannot do with compiled blocks. Set [compile] enabled = false, or schedule = "
            '"interleaved_1f1b".'
        )
    if config.parallel.reshard_after_forward == "always":
        raise UserError(
            '[parallel] reshard_after_forward="always" would gather the parameters anew for every '
            f'microbatch of pp={sizes.pp}. Set "auto".'
        )


def check_compile(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> None:
    """CUDA graphs keep the values of one forward pass."""
    settings = config.compile
    if not (settings.enabled and settings.cuda_graphs):
        return
    ranks = math.prod(vars(sizes).values())
    if ranks > 1:
        raise UserError(
            f"[compile] cuda_graphs=true is for one GPU, but {ranks} ranks were started. "
            "Set cuda_graphs = false."
        )
    passes = num_microbatches(config, sizes)
    if passes > 1:
        raise UserError(
            f"[compile] cuda_graphs=true keeps the values of one forward pass, but a step has "
            f"{passes}. Set cuda_graphs = false, or [training] microbatch_size = "
            f"{config.training.global_batch_size}."
        )


def microbatch_size(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> int:
    """Samples of one forward pass on one rank; in a pipeline, 1 if unset.

    Less than what is set where that leaves fewer rows without a sample.
    """
    share = -(-config.training.global_batch_size // sizes.data)
    return -(-share // num_microbatches(config, sizes))


def num_microbatches(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> int:
    """Forward passes of one rank in a step: the fewest that hold its share and the schedule runs.

    A batch that divides, on ranks that a fresh run may have, needs no more than there are samples.
    """
    least = whole_microbatches(config, sizes)
    if sizes.pp == 1:
        return least
    # Equal rounds come again after pp microbatches, and dualpipev takes any 2 pp.
    enough = range(least, least + 2 * sizes.pp + 1)
    return next((number for number in enough if runs(config, sizes, number)), least)


def whole_microbatches(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> int:
    """Microbatches that a rank's share fills, the last one perhaps in part."""
    share = -(-config.training.global_batch_size // sizes.data)
    return -(-share // (config.training.microbatch_size or (1 if sizes.pp > 1 else share)))


def runs(config: JobConfig[Any, Any, Any], sizes: AxisSizes, number: int) -> bool:
    """Whether the schedule can run so many microbatches."""
    pipeline = config.pipeline
    try:
        check_schedule(
            pipeline.schedule,
            num_ranks=sizes.pp,
            num_microbatches=number,
            virtual_stages=pipeline.virtual_stages,
        )
    except UserError:
        return False
    return True


def rows_per_rank(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> int:
    """Rows of every data-parallel rank's batch: its share, and what fills up the microbatches."""
    return num_microbatches(config, sizes) * microbatch_size(config, sizes)


def largest_divisor(*numbers: int, below: int) -> int:
    """The largest number under `below` that divides all of them."""
    return next(n for n in range(below - 1, 0, -1) if not any(number % n for number in numbers))
