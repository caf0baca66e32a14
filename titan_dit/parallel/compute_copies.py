"""Mixed precision on one rank: fp32 weights, and copies in bf16 that the model computes with.

With nothing to shard, all that FSDP2 does is to cast, in Python and parameter by parameter. Here a
forward casts all weights in one operator, and the end of a backward all gradients. The results have
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from titan_dit.config.layout import PrecisionConfig
from titan_dit.models.base import exact_modules

ALIGNMENT = 256
"""Elements between the starts of two copies: 512 bytes in bf16, as between CUDA's allocations."""
FLOAT8 = "off", "rowwise", "rowwise_with_gw_hp"
"""Values of [precision] float8 that cast a weight where it is used; others need FSDP2's casts."""
CHUNK = 2**25
"""Elements of gradients that are cast at a time, during which both formats are in memory."""


def suits(world_size: int, precision: PrecisionConfig) -> bool:
    """True if a rank has such copies instead of FSDP2."""
    return world_size == 1 and precision.float8 in FLOAT8 and precision.weights == "fp32"


def apply(model: nn.Module, dtype: torch.dtype, keep: bool) -> None:
    """Let a model with fp32 weights compute in `dtype`, by hooks of its forward and backward.

    The modules hold cast copies of their parameters during a forward and, with gradients, until its
    backward ends. The fp32 weights receive the gradients. `keep`: the copies keep their addresses,
    for CUDA graphs; otherwise their memory is free between steps.
    """
    if dtype == torch.float64:
        model.double()
    if dtype.itemsize >= torch.float32.itemsize:
        return
    copies = ComputeCopies(model, dtype, keep)
    model.register_forward_pre_hook(copies.begin_forward)
    model.register_forward_hook(copies.end_forward)


class ComputeCopies:
    """The copies of a model's parameters; made by the first forward, once the weights exist."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, keep: bool) -> None:
        self.model, self.dtype, self.keep = model, dtype, keep
        self.flat = torch.empty(0, dtype=dtype)
        """All copies, one after another; its storage is empty while they are not in use."""
        self.weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.places: list[tuple[dict[str, Any], str, int]] = []
        """(a module's parameters by name, one of these names, index of the weight)."""
        self.versions: list[int] = []
        """Version counters of the weights at the last cast: a later change raises them."""
        self.forwards = self.waiting = 0
        """Forwards so far, and forwards whose backward is still due."""
        self.in_backward: set[int] = set()
        """Numbers of the forwards whose backward is running."""

    @torch.inference_mode(False)  # Tensors that are made in this mode can never have gradients.
    def make(self) -> None:
        """Allocate the copies, and find where they belong."""
        exact = {id(p) for module in exact_modules(self.model) for p in module.parameters()}
        # The bytes of quantised weights are no numbers.
        self.weights = [
            p for p in self.model.parameters() if id(p) not in exact and p.is_floating_point()
        ]
        sizes = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in self.weights]
        self.flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.weights[0].device)
        self.copies = [
            nn.Parameter(part[: weight.numel()].view(weight.shape), weight.requires_grad)
            for part, weight in zip(torch.split(self.flat, sizes), self.weights, strict=True)
        ]
        number_of = {id(weight): number for number, weight in enumerate(self.weights)}
        self.places = [
            (module._parameters, name, number_of[id(weight)])
            for module in self.model.modules()
            for name, weight in module._parameters.items()
            if id(weight) in number_of
        ]

    @torch.no_grad()
    def begin_forward(self, *_: object) -> None:
        """Forward pre-hook: cast the weights, and give the copies to the modules."""
        if not self.copies:
            self.make()
        if self.in_backward:  # The last backward has failed.
            self.waiting = 0
            self.in_backward.clear()
            for copy in self.copies:
                copy.grad = None
        # A backward that is still to come has saved the copies: they stay as they are.
        if not self.waiting or self.versions != [weight._version for weight in self.weights]:
            self.waiting = 0
            self.cast()
        for copy, weight in zip(self.copies, self.weights, strict=True):
            if copy.requires_grad != weight.requires_grad:
                copy.requires_grad_(weight.requires_grad)
        self.put(self.copies)

    def cast(self) -> None:
        """Copy the weights, in one call."""
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
        torch._foreach_copy_(self.copies, self.weights)
        self.versions = [weight._version for weight in self.weights]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules hold these parameters."""
        for parameters, name, number in self.places:
            parameters[name] = tensors[number]

    def release(self, *, free: bool) -> None:
        """Return the weights to the modules, and free the copies' memory."""
        self.put(self.weights)
        if free and not self.keep:
            self.flat.untyped_storage().resize_(0)

    def end_forward(self, _module: nn.Module, _inputs: object, output: object) -> None:
        """Forward hook: wait for the backward if there will be one."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        learning = [tensor for tensor in tensors if tensor.requires_grad]
        if learning:
            self.forwards += 1
            self.waiting += 1
        for tensor in learning:
            hook = partial(self.begin_backward, self.forwards)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if not self.waiting:
            self.release(free=True)

    @torch.no_grad()
    def begin_backward(self, forward: int, _gradient: Tensor) -> None:
        """Hook of an output's gradient: put the copies back, for recomputation."""
        is_first = not self.in_backward
        self.in_backward.add(forward)
        if not is_first:
            return
        Variable._execution_engine.queue_callback(self.end_backward)
        if not self.flat.untyped_storage().nbytes():
            self.cast()  # In a second backward, which autograd then refuses.
        self.put(self.copies)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Callback after a backward: cast the gradients, and return the weights to the modules."""
        self.waiting = max(0, self.waiting - len(self.in_backward))
        self.in_backward.clear()
        self.release(free=not self.waiting)
        for weights, gradients in self.take_gradients():
            cast = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(cast, gradients)
            sums, more = [], []
            for weight, gradient in zip(weights, cast, strict=True):
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    sums.append(weight.grad)
                    more.append(gradient)
            if sums:
                torch._foreach_add_(sums, more)
            for weight in weights:  # As FSDP2 does.
                for hook in (weight._post_accumulate_grad_hooks or {}).values():
                    hook(weight)

    def take_gradients(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Weights and their copies' gradients, CHUNK elements at a time; the copies lose them."""
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        size = 0
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if copy.grad is not None:
                weights.append(weight)
                gradients.append(copy.grad)
                size += weight.numel()
                copy.grad = None
            if size >= CHUNK:
                yield weights, gradients
                weights, gradients, size = [], [], 0
        if weights:
            yield weights, gradients
