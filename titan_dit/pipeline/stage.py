"""One stage of a pipeline: forward and backward of its microbatches, without communication.

A backward may be split in two halves: the gradients of the inputs, later those of the weights.
Zero-bubble schedules send the input gradients at once and fill bubbles with the second half
(arXiv:2401.10241 sec. 2). The first half runs the nodes of autograd's graph that lead to an input.
Where one of them also leads to weights, the gradient that reaches it is kept: the second half
starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from titan_dit.config.section import UserError
from titan_dit.execution import Output
from titan_dit.models.base import Model, SideInputs, Stream
from titan_dit.parallel import fsdp


@dataclass(frozen=True)
class Shapes:
    """The tensors of one microbatch between stages and after the last one, on the meta device."""

    stream: tuple[Tensor, ...]
    predictions: tuple[Tensor, ...]
    losses: Tensor
    """Losses per token, [b, n]."""


Gradients: TypeAlias = Sequence[Tensor] | None
"""Gradients of the floating-point tensors of a stage's output; None if the output is the loss."""


class Stage:
    """A part of the model on this rank. Frees what no later action of a microbatch needs."""

    def __init__(self, part: Model, index: int, num_stages: int, stream: Stream) -> None:
        self.part, self.index, self.stream = part, index, stream
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.kept: dict[int, tuple[Stream, Stream]] = {}
        """Microbatch -> (inputs, outputs), between its forward and its backward."""
        self.halves: dict[int, WeightHalf] = {}
        """Microbatch -> weight half of its backward, after `backward_input`."""
        self.postponed: dict[int, Gradients] = {}
        """First stage only: microbatch -> output gradients, until `backward_weight`."""

    @cached_property
    def accumulators(self) -> list[Callable[[], None]]:
        """See `fsdp.accumulators`; first read after the first forward."""
        return fsdp.accumulators(self.part)

    def forward(self, given: Mapping[str, Tensor] | Stream, side_inputs: SideInputs) -> Output:
        """The output of this stage; the first one takes named inputs, the others a stream."""
        out: Output = self.part(given, side_inputs)
        if self.is_last:
            return out
        self.check(out)
        return out

    def check(self, out: Output) -> None:
        """Raise UserError unless an output has the shapes and dtypes of the stream.

        The next rank receives into buffers of these shapes.
        """
        found = [(t.shape, t.dtype) for t in out]
        wanted = [(t.shape, t.dtype) for t in self.stream]
        if found != wanted:
            raise UserError(
                f"[model] stage {self.index} returns a stream of {shown(out)}, but the spec says "
                f"{shown(self.stream)}. Make `ModelSpec.stream` and the blocks agree."
            )

    def keep(self, microbatch: int, inputs: Stream, outputs: Stream) -> None:
        """Keep a microbatch for its backward; the output of the last stage is the loss."""
        self.kept[microbatch] = inputs, outputs

    def backward(self, microbatch: int, gradients: Gradients) -> Stream:
        """Full backward: return the input gradients, accumulate the weights' gradients."""
        inputs, outputs, gradients = self.pop_learning(microbatch, gradients)
        if outputs:  # A first stage whose parameters are all frozen has none.
            torch.autograd.backward(outputs, gradients)
        return with_zeros([tensor.grad for tensor in inputs], inputs)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Stream:
        """Return the input gradients; `backward_weight` must follow."""
        if self.is_first:  # It has no input gradient: all its work is for the weights.
            self.postponed[microbatch] = gradients
            return ()
        inputs, outputs, gradients = self.pop_learning(microbatch, gradients)
        parameters = self.part.parameters()
        found, self.halves[microbatch] = split_backward(outputs, gradients, inputs, parameters)
        return with_zeros(found, inputs)

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the gradients of the weights."""
        if self.is_first:
            self.backward(microbatch, self.postponed.pop(microbatch))
        else:
            self.halves.pop(microbatch).run()
            for accumulate in self.accumulators:
                accumulate()

    def pop_learning(
        self, microbatch: int, gradients: Gradients
    ) -> tuple[Stream, list[Tensor], list[Tensor] | None]:
        """The differentiable inputs and outputs of a microbatch, and the outputs' gradients."""
        inputs, outputs = self.kept.pop(microbatch)
        learning = tuple(tensor for tensor in inputs if tensor.requires_grad)
        if gradients is None:
            return learning, list(outputs), None
        floating = [tensor for tensor in outputs if tensor.is_floating_point()]
        pairs = zip(floating, gradients, strict=True)
        used = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
        return learning, [tensor for tensor, _ in used], [gradient for _, gradient in used]


def with_zeros(gradients: Sequence[Tensor | None], inputs: Stream) -> Stream:
    """The gradients of a stage's inputs; an unused input has zeros."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(t) if gradient is None else gradient for gradient, t in pairs)


def shown(stream: Output) -> str:
    """The shapes and dtypes of a stream, for an error message."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in stream)


OutputGradients: TypeAlias = tuple[Tensor | None, ...]
"""Gradients of a node's outputs; None for outputs without one."""
InputGradients: TypeAlias = tuple[Tensor | None, ...]
"""Gradients of a stage's inputs; None for an unused input."""


def split_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Iterable[Tensor],
) -> tuple[InputGradients, WeightHalf]:
    """Return the gradients of the inputs, None where unused, and the rest of the backward.

    `gradients`: of the outputs; None for a scalar loss.
    """
    edges = [get_gradient_edge(tensor) for tensor in outputs]
    learning = [weight for weight in weights if weight.requires_grad]
    graph = Graph(
        [edge.node for edge in edges],
        [get_gradient_edge(tensor).node for tensor in inputs],
        [get_gradient_edge(weight).node for weight in learning],
    )
    half = WeightHalf(edges, graph.groups(learning))
    for place, edge in enumerate(edges):
        if gradients is not None and not graph.reaches_input[edge.node]:
            half.given.setdefault(edge.node, []).append((edge, gradients[place]))

    def keep(node: Node) -> Any:
        def hook(found: OutputGradients) -> None:
            half.boundary_gradients[node] = found

        return node.register_prehook(hook)

    hooks = [keep(node) for node in graph.boundary if graph.reaches_input[node]]
    found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    return found, half


class WeightHalf:
    """The gradients of the weights, still to be computed."""

    def __init__(self, edges: Sequence[GradientEdge], groups: Sequence[Group]) -> None:
        # Nodes are owned by the nodes that lead to them. Edges keep the graph alive without
        # keeping the output tensors.
        self.edges, self.groups = edges, groups
        self.boundary_gradients: dict[Node, OutputGradients] = {}
        """Node of the boundary -> gradients of its outputs, kept by the first half."""
        self.given: dict[Node, list[tuple[GradientEdge, Tensor]]] = {}
        """Output gradients of the stage where the output's node leads to no input."""

    def run(self) -> None:
        """Add the gradients of the weights to their `grad`; call once."""
        for group in self.groups:
            starts = [
                (GradientEdge(node, number), gradient)
                for node in group.nodes
                for number, gradient in enumerate(self.boundary_gradients.get(node, ()))
                if gradient is not None
            ]
            starts += [start for node in group.nodes for start in self.given.get(node, ())]
            if starts:
                self.accumulate(group, *zip(*starts, strict=True))

    def accumulate(
        self, group: Group, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]
    ) -> None:
        """Add the gradients of the weights of a group."""
        # One node of a group may lead to another, through nodes of other groups. The gradient that
        # reaches the latter is complete in `boundary_gradients` already: the hook puts it in place.
        several = len(group.nodes) > 1
        hooks = [
            node.register_prehook(lambda _, kept=self.boundary_gradients[node]: kept)
            for node in group.nodes
            if several and node in self.boundary_gradients
        ]
        found = torch.autograd.grad(
            edges, group.weights, gradients, retain_graph=several, allow_unused=True
        )
        for hook in hooks:
            hook.remove()
        for weight, gradient in zip(group.weights, found, strict=True):
            if weight.grad is None:
                weight.grad = gradient
            elif gradient is not None:
                weight.grad += gradient


@dataclass
class Group:
    """Nodes with weights in common."""

    nodes: list[Node]
    weights: list[Tensor]


class Graph:
    """Reachability in autograd's graph: the inputs and weights that each node leads to."""

    def __init__(
        self, roots: Sequence[Node], inputs: Sequence[Node], weights: Sequence[Node]
    ) -> None:
        self.reaches_input = dict.fromkeys(inputs, True) | dict.fromkeys(weights, False)
        """Node -> True if it leads to an input of the stage."""
        self.weights_below = {node: frozenset[int]() for node in inputs}
        """Node -> indices of the weights it leads to through nodes that reach no input."""
        self.weights_below |= {node: frozenset((place,)) for place, node in enumerate(weights)}
        for root in roots:
            self.trace(root)
        self.boundary = [
            node
            for node, places in self.weights_below.items()
            if places and (self.reaches_input[node] or node in roots)
        ]
        """Nodes at which the second half starts: those that reach an input and have weights below,
        and roots that reach no input."""

    def trace(self, root: Node) -> None:
        """Add all nodes that a root leads to."""
        stack = [(root, False)]
        while stack:
            node, is_ready = stack.pop()
            if node in self.weights_below:
                continue
            after = [following for following, _ in node.next_functions if following is not None]
            if not is_ready:
                stack.append((node, True))
                stack += [(following, False) for following in after]
                continue
            self.reaches_input[node] = any(self.reaches_input[following] for following in after)
            others = [following for following in after if not self.reaches_input[following]]
            below = (self.weights_below[following] for following in others)
            self.weights_below[node] = frozenset[int]().union(*below)

    def groups(self, weights: Sequence[Tensor]) -> list[Group]:
        """The boundary; nodes with a weight in common are in one group."""
        group_of: dict[int, tuple[list[Node], set[int]]] = {}
        for node in self.boundary:
            nodes, places = [node], set(self.weights_below[node])
            for place in self.weights_below[node]:
                if place in group_of:
                    its_nodes, its_places = group_of[place]
                    nodes += [one for one in its_nodes if one not in nodes]
                    places |= its_places
            group_of |= dict.fromkeys(places, (nodes, places))
        found = {id(group): group for group in group_of.values()}.values()
        made = [Group(nodes, [weights[p] for p in sorted(places)]) for nodes, places in found]
        # Groups of several nodes first: they also run nodes of other groups, whose own runs free
        # these nodes.
        return sorted(made, key=lambda group: len(group.nodes), reverse=True)
