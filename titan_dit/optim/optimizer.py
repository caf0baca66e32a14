"""The interface of an optimizer: updates local shards, and can skip a step on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    # Shards may be uneven: the whole shape cannot be computed from one.
    shape, stride = parameter.shape, parameter.stride()
    if shard.shape != local:
        shape = torch.Size((*shape[:-1], shape[-1] * shard.shape[-1] // local[-1]))
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, shape=shape, stride=stride
    )


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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if learning:
                gradients = shards_of([p.grad for p in learning])
                states = [self.shards[p] for p in learning]
                self.update(shards_of(learning), gradients, states, group)

    @torch.no_grad()
    def _make_states(self, group: Group) -> None:
        weights = shards_of(group["params"])
        made = zip(group["params"], weights, self.new_states(weights, group), strict=True)
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


def build_optimizer(
    parameters: Parameters,
    config: OptimizerConfig,
    model_spec: ModelSpec,
    copies: Parameters = NOTHING,
) -> Optimizer:
    """Build the optimizer over a rank's parameters; freeze those of frozen groups.

    Frozen groups are also frozen in `copies`, this rank's copies of tied weights, by their owners'
    names. Call it before the first forward, in which FSDP2 learns which parameters are trained.
    """
    for some in (parameters, copies):
        freeze(some, config.groups)
    return config.build({n: p for n, p in parameters.items() if p.requires_grad}, model_spec)


def freeze(parameters: Parameters, groups: Sequence[GroupConfig]) -> None:
    """Compute no gradients of the parameters of frozen groups."""
    for name, group in groups_of(parameters, groups).items():
        if group.frozen:
            parameters[name].requires_grad_(False)


def apply_gradients(optimizer: Optimizer, lr: float, skip: Tensor) -> None:
    """Take one optimizer step at `lr`, unless `skip` (a scalar on the device) is true."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    optimizer.skip = skip
    optimizer.step()
    for group in optimizer.param_groups:  # As `zero_grad`, which first opens a profiler's range.
        for parameter in group["params"]:
            parameter.grad = None


def optimizer_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, State]:
    """The optimizer's tensors by parameter name, to save or to load in place."""
    state = optimizer.state
    return {name: state[parameter] for name, parameter in parameters.items() if parameter in state}
