"""The interface of an optimizer: updates local shards, and can skip a step on the device."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_dit.config.parameter_groups import GroupConfig, groups_of
from titan_dit.config.section import UserError
from titan_dit.models.base import ModelSpec
from titan_dit.optim.sections import Group as Group

# Classes of users import it from this module (docs/extending.md).
from titan_dit.optim.sections import OptimizerConfig as OptimizerConfig
from titan_dit.optim.sections import Parameters as Parameters
from titan_dit.optim.stochastic_rounding import PIECE, StochasticRounding
from titan_dit.ranks.shards import as_shard


def shards_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards; plain tensors are their own.

    Take them anew for every use: FSDP2 may move an uneven shard in a forward, to pad it.
    """
    # `to_local` makes a view of every parameter: 2.6 us each, 0.8 ms for the 291 of XL.
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def sharded_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Wrap a tensor of a parameter's local shape with the parameter's placements; no copy.

    The last dim may be shorter, as by a block's scale. A plain parameter has plain shards.
    """
    if not isinstance(parameter, DTensor):
        return shard
    local = parameter._local_tensor.shape
    if shard.shape == local:
        return as_shard(shard, parameter)
    # Shards may be uneven: the whole shape cannot be computed from one.
    *rows, columns = parameter.shape
    return as_shard(shard, parameter, (*rows, columns * shard.shape[-1] // local[-1]))


def pieces(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors whose shards have `most` elements together; a larger one is alone."""
    found: list[Tensor] = []
    size = 0
    for tensor, shard in zip(tensors, shards_of(tensors), strict=True):
        if found and size + shard.numel() > most:
            yield found
            found, size = [], 0
        found.append(tensor)
        size += shard.numel()
    if found:
        yield found


def outline(weight: Tensor) -> Tensor:
    """Zeros in fp32 of a bf16 weight's shape, which take no memory; other weights as they are."""
    if weight.dtype != torch.bfloat16:
        return weight
    return torch.zeros((), device=weight.device).expand(weight.shape)


def follows(state: Sequence[int], weight: Sequence[int]) -> bool:
    """True if a state can be cut where its weight is: equal shapes, or fewer columns."""
    if len(state) < 2 or state[-1] == 0:
        return tuple(state) == tuple(weight)
    return tuple(state[:-1]) == tuple(weight[:-1]) and weight[-1] % state[-1] == 0


State = dict[str, Tensor]
"""An optimizer's tensors of one parameter by name, such as "exp_avg"."""
NOTHING: Parameters = MappingProxyType({})


class Optimizer(torch.optim.Optimizer, ABC):
    """Updates every rank's own shards, in place.

    `state` holds what a checkpoint saves, with the placements of the parameters; `shards` the same
    memory as local tensors.
    """

    whole_states: ClassVar[tuple[str, ...]] = ()
    """Keys of states that are equal on all ranks, such as a count of steps. All others are shards:
    tensors of the shape of the parameter's shard, whose last dim may be divided."""

    def __init__(self, groups: Iterable[Group], defaults: Mapping[str, Any]) -> None:
        super().__init__(groups, dict(defaults))
        self.skip = torch.tensor(False)
        """A scalar on the device; if true, a step changes nothing. Reading it synchronises."""
        self.shards: dict[Tensor, State] = {}
        self.rounding: StochasticRounding | None = None
        """Rounds weights in bf16; None if there are none."""
        for group in self.param_groups:
            self._make_states(group)

    @abstractmethod
    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """The states of a group's parameters before the first step, for their shards `weights`.

        A key outside `whole_states` must have the shape of its weight; its last dim may be
        shorter by a whole factor, the same on all ranks.
        """

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Group,
    ) -> None:
        """Update shards and states of one group's parameters in place, unless `skip` is true.

        An optimizer that needs whole tensors, or all groups at once, overrides `step` instead.
        """
        raise NotImplementedError

    def is_elementwise(self, group: Group) -> bool:
        """True if `new_states` reads shapes alone, and `update` may get a group part by part.

        Weights in bf16 are then updated PIECE elements at a time, not a whole group at once: the
        fp32 values in between take less memory.
        """
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; those in bf16 are rounded at random."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if not learning:
                continue
            if learning[0].dtype == torch.bfloat16:
                self._step_in_fp32(learning, group)
                continue
            gradients = shards_of([p.grad for p in learning])
            states = [self.shards[p] for p in learning]
            self.update(shards_of(learning), gradients, states, group)

    def _step_in_fp32(self, learning: Sequence[Tensor], group: Group) -> None:
        """`step` of parameters in bf16."""
        assert self.rounding is not None
        most = PIECE if self.is_elementwise(group) else sys.maxsize
        for some in pieces(learning, most):
            shards = shards_of(some)
            weights = [shard.float() for shard in shards]
            gradients = [g.float() for g in shards_of([p.grad for p in some if p.grad is not None])]
            self.update(weights, gradients, [self.shards[p] for p in some], group)
            for parameter, shard, weight in zip(some, shards, weights, strict=True):
                # A skipped step leaves bf16 numbers, which stay as they are.
                self.rounding.round(
                    parameter, shard, weight, compiles=bool(group.get("fused", False))
                )

    @torch.no_grad()
    def _make_states(self, group: Group) -> None:
        weights = shards_of(group["params"])
        # Moments are fp32: a second moment in bf16 would miss steps of a thousandth.
        in_fp32 = outline if self.is_elementwise(group) else to_fp32
        found = self.new_states([in_fp32(weight) for weight in weights], group)
        made = zip(group["params"], weights, found, strict=True)
        for parameter, weight, states in made:
            for key, state in states.items():
                if key not in self.whole_states and not follows(state.shape, weight.shape):
                    raise UserError(
                        f"[optimizer] {type(self).__name__}: the state {key} has the shape "
                        f"{list(state.shape)}, its parameter's shard {list(weight.shape)}. Name it "
                        "in whole_states if it is equal on all ranks, or give it the shard's shape."
                    )
            self.shards[parameter] = states
            self.state[parameter] = {
                key: state if key in self.whole_states else sharded_like(state, parameter)
                for key, state in states.items()
            }


def to_fp32(weight: Tensor) -> Tensor:
    """A bf16 weight in fp32; other weights as they are."""
    return weight.float() if weight.dtype == torch.bfloat16 else weight


def build_optimizer(
    parameters: Parameters,
    config: OptimizerConfig,
    model_spec: ModelSpec,
    copies: Parameters = NOTHING,
    seed: int = 0,
) -> Optimizer:
    """Build the optimizer over a rank's parameters; freeze those of frozen groups.

    `seed`: of the random rounding of weights in bf16. Raises UserError if the optimizer takes steps
    of its own, which would round such weights to the nearest number.

    Frozen groups are also frozen in `copies`, this rank's copies of tied weights, by their owners'
    names. Call it before the first forward, in which FSDP2 learns which parameters are trained.
    """
    for some in (parameters, copies):
        freeze(some, config.groups)
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    optimizer = config.build(trained, model_spec)
    if any(p.dtype == torch.bfloat16 for p in trained.values()):
        # torch wraps the method of every class.
        if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(Optimizer.step):
            raise UserError(
                f'[precision] weights="bf16" rounds what `update` of an optimizer returns, but '
                f"{type(optimizer).__name__} has a `step` of its own. Set [precision] weights = "
                '"fp32", or another [optimizer] name.'
            )
        optimizer.rounding = StochasticRounding(seed, {p: n for n, p in trained.items()})
    return optimizer


def freeze(parameters: Parameters, groups: Sequence[GroupConfig]) -> None:
    """Compute no gradients of the parameters of frozen groups."""
    for name, group in groups_of(parameters, groups).items():
        if group.frozen:
            parameters[name].requires_grad_(False)


def apply_gradients(optimizer: Optimizer, lr: float, skip: Tensor, step: int = 0) -> None:
    """Take one optimizer step at `lr`, unless `skip` (a scalar on the device) is true.

    `step`: its number in the run, of which the rounding of weights in bf16 is a function.
    """
    if optimizer.rounding is not None:
        optimizer.rounding.step = step
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    # Parameters in host memory are updated there: the host waits for the verdict.
    optimizer.skip = skip.to(device_of(optimizer.param_groups[0]["params"]))
    optimizer.step()
    for group in optimizer.param_groups:  # As `zero_grad`, which first opens a profiler's range.
        for parameter in group["params"]:
            parameter.grad = None


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """The device of parameters; "cpu" with [offload] parameters."""
    return next(iter(parameters)).device


def optimizer_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, State]:
    """The optimizer's tensors by parameter name, to save or to load in place."""
    state = optimizer.state
    return {name: state[parameter] for name, parameter in parameters.items() if parameter in state}
