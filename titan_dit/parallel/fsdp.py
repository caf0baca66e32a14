"""FSDP2: parameters, gradients, optimizer state sharded over dp_shard and cp (arXiv:2304.11277).

A unit, all-gathered and reduced at once, is some blocks, or embed and head. Only this file calls
torch's fully_shard and the methods that it adds.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from titan_dit.config.layout import ParallelConfig, PrecisionConfig
from titan_dit.models.base import Model, exact_modules
from titan_dit.ranks.shards import local

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
RESHARD: dict[str, bool | None] = {"auto": None, "always": True, "never": False}

LARGEST_UNIT = 4, 2**27
"""Maximum blocks, and parameters on a tp rank, of an automatic unit: 4 blocks of DiT-XL/2, 1 of the
3B. Its copies are 256 MiB in bf16, its gradients 512 MiB in fp32, each up to twice at a time."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    *,
    on_host: bool = False,
) -> None:
    """Shard by units of a few blocks, so that a few blocks' parameters are gathered at a time.

    `on_host`: the shards and their gradients are in host memory; see `OffloadConfig.parameters`.
    """
    # A block returns its condition as a view. FSDP2 warns about in-place operations on views; the
    # models have none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.dtype],
        reduce_dtype=torch.promote_types(DTYPES[precision.dtype], torch.float32),
        # The timestep must stay fp32; the model casts its tokens itself.
        cast_forward_inputs=False,
    )
    # Pipelines keep parameters gathered: an all-gather per microbatch costs too much, and with a
    # split backward torch loses gradients. A single shard would only be copied twice.
    alone = mesh.size(mesh.ndim - 1) == 1 and not on_host
    keeps = parallel.pp > 1 or (alone and parallel.reshard_after_forward == "auto")
    reshard = False if keeps else RESHARD[parallel.reshard_after_forward]
    if precision.dtype == "fp64":
        model.double()
    if precision.weights == "bf16":
        hold_in_bf16(model)
    blocks = [*model.get_submodule("blocks").children()]
    parts = units(blocks, parallel.blocks_per_fsdp_unit)
    if DTYPES[precision.dtype].itemsize < 4 or precision.weights == "bf16":
        shard_exact(model, mesh, replace(policy, param_dtype=policy.reduce_dtype), on_host=on_host)
    beside = [[module] for module in getattr(model, "objective", {}).values()]
    for part in (*parts, *beside, [model]):
        # All modules of a unit have one state.
        with integers_allowed():
            sharded, *_ = fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                offload_policy=offload_policy(mesh, on_host=on_host),
            )
        sum_gradients(sharded, mesh)
    set_prefetch([part[0] for part in parts], parallel.prefetch or 0)


@contextlib.contextmanager
def integers_allowed() -> Iterator[None]:
    """Let FSDP2 of torch 2.11 shard integers: its parameters at first require gradients."""
    if torch.__version__ >= "2.12":
        yield
        return
    made = nn.Parameter.__new__

    def new(cls: Any, data: torch.Tensor, requires_grad: bool = True) -> Any:
        return made(cls, data, requires_grad and data.is_floating_point())

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = made  # type: ignore[method-assign]


def hold_in_bf16(model: nn.Module) -> None:
    """Change the format of a model's parameters, except for codes and those of `Model.exact`."""
    exact = {id(p) for module in exact_modules(model) for p in module.parameters()}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and id(parameter) not in exact:
                held = parameter.detach().to(torch.bfloat16)
                setattr(module, name, nn.Parameter(held, parameter.requires_grad))
    if isinstance(model, Model):
        model.tie()


def offload_policy(mesh: DeviceMesh, *, on_host: bool) -> OffloadPolicy:
    """Where FSDP2 holds shards: on the device, or in pinned host memory."""
    if not on_host:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def shard_exact(
    model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, on_host: bool
) -> None:
    """Shard the modules of `Model.exact` as one unit, gathered from a forward to its backward.

    A unit has one dtype, so these modules cannot join their blocks' units. Hooks inside compiled
    blocks would break the graph: the model's pre-forward hook gathers the unit, FSDP2's
    end-of-backward callback reduces its gradients.
    """
    if not (exact := exact_modules(model)):
        return
    sharded, *_ = fully_shard(
        exact,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=False,
        offload_policy=offload_policy(mesh, on_host=on_host),
    )
    state = sharded._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    sum_gradients(sharded, mesh)
    # After FSDP2's own hook, which `fully_shard` puts first.
    model.register_forward_pre_hook(lambda *_: sharded.unshard())


def sum_gradients(sharded: FSDPModule, mesh: DeviceMesh) -> None:
    """Sum gradients over the ranks: the loss is already divided by the global token count."""
    if mesh.size() > 1:  # One rank would divide its gradients by 1.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum.


def units(blocks: Sequence[nn.Module], size: int | None) -> list[list[nn.Module]]:
    """Consecutive blocks, `size` to a unit; None takes sizes that double from 1 up to LARGEST_UNIT.

    The first all-gather of a step and its last reduce-scatter overlap with no work. Both belong to
    the first unit, so it is the smallest. The collectives of later units overlap with the work on
    the units before them.
    """
    largest = max((count_parameters(block) for block in blocks), default=1)
    ends = itertools.accumulate(unit_sizes(len(blocks), largest, size), initial=0)
    return [list(blocks[first:last]) for first, last in itertools.pairwise(ends)]


def unit_sizes(num_blocks: int, parameters: float, size: int | None) -> tuple[int, ...]:
    """Blocks of each unit.

    `parameters`: elements of the largest block on a tp rank. `size`: [parallel]
    blocks_per_fsdp_unit.
    """
    if size:
        most, step = size, size
    else:
        most, step = max(1, min(LARGEST_UNIT[0], int(LARGEST_UNIT[1] // max(1, parameters)))), 1
    found, left = [], num_blocks
    while left > 0:
        found.append(min(step, left))
        left, step = left - step, min(2 * step, most)
    return tuple(found)


def count_parameters(block: nn.Module) -> int:
    """Parameters of a block on a tp rank; two bytes of a quantised weight count as one."""
    own = [local(parameter) for parameter in block.parameters()]
    return sum(p.numel() if p.is_floating_point() else p.numel() // 2 for p in own)


def shard_module(
    module: nn.Module, mesh: DeviceMesh, precision: PrecisionConfig, *, on_host: bool = False
) -> None:
    """Shard a module of the objective in fp32, or in fp64 with [precision] dtype = "fp64"."""
    if precision.dtype == "fp64":
        module.double()
    # After a forward without a backward, a later forward must not reuse the gathered parameters.
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=True,
        offload_policy=offload_policy(mesh, on_host=on_host),
    )
    sum_gradients(sharded, mesh)


def shard_frozen(
    module: nn.Module, blocks: Sequence[nn.Module], *, mesh: DeviceMesh, device: torch.device
) -> None:
    """Move a module without gradients to a device, sharded by `blocks` and the rest.

    It keeps the dtypes of its parameters, which are gathered where they are needed.
    """
    if mesh.size() > 1:
        for part in (*blocks, module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    module.to(device)


def set_prefetch(parts: list[nn.Module], count: int) -> None:
    """Explicit prefetch: every unit all-gathers the next `count`, in forward and backward.

    `parts`: a module of each unit.

    FSDP2's implicit prefetch starts too late if the host is slower than the device.
    """
    if not count:
        return
    sharded: list[FSDPModule] = [part for part in parts if isinstance(part, FSDPModule)]
    for number, part in enumerate(sharded):
        part.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + count])
        before = sharded[max(0, number - count) : number]
        part.set_modules_to_backward_prefetch(before[::-1])


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Reduce gradients in the next backward (the last microbatch), or only accumulate them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)


def before_gathers(model: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Make every `gather` of a model call `prepare(model)` first."""
    prepared: Any = model
    prepared.prepare_gather = prepare


def gather(model: nn.Module) -> None:
    """Start to all-gather all parameters, for a pipeline stage; the forward waits for them."""
    if prepare := getattr(model, "prepare_gather", None):
        prepare(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)


def hold_gradients(model: nn.Module) -> None:
    """Accumulate the gradients of each following backward, until `reduce_gradients`."""
    if isinstance(model, FSDPModule):
        set_last(model, False)
        module: Any = model
        if hasattr(model, "finalize_backward"):  # New in torch 2.15.
            module.set_manual_backward_finalization(True)


def accumulators(model: nn.Module) -> list[Callable[[], None]]:
    """Functions that add a microbatch's gradients to the sums of earlier ones; call all, in order.

    FSDP's hooks do this at the end of a backward. A split backward runs the hooks in its first
    half: weight gradients computed between two of them would be summed in bf16, with a result that
    depends on the order. Only parameters whose sums have another dtype are included. Call it after
    a forward.
    """
    states: list[Any] = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    found: list[Callable[[], None]] = []
    for group in (group for state in states for group in groups_of(state)):
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # New in torch 2.15.
            found.append(partial(group._set_unsharded_grad_dtypes, defer_upcast=False))
            continue
        for one in group.fsdp_params:
            if hasattr(one, "_unsharded_param") and one.reduce_dtype is not None:
                found += [
                    one.accumulate_unsharded_grad_if_needed,
                    one.to_accumulated_grad_if_needed,
                ]
    return found


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the accumulated gradients and free the all-gathered parameters.

    FSDP's own hooks do this in a backward by autograd; a split backward does not run them.
    """
    if not isinstance(model, FSDPModule):
        return
    set_last(model, True)
    module: Any = model
    if hasattr(model, "finalize_backward"):  # New in torch 2.15.
        module.finalize_backward()
        module.set_manual_backward_finalization(False)
        return
    root = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in groups_of(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def set_last(model: FSDPModule, is_last: bool) -> None:
    """Say if the next backward is the last: FSDP then reduces gradients and frees parameters."""
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def groups_of(state: Any) -> list[Any]:
    """FSDP's parameter groups of a module; torch 2.11 has one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def reshard(model: nn.Module) -> None:
    """Free the all-gathered parameters after a forward without a backward.

    A later forward would reuse these copies although the weights have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
