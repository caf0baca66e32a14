"""[parallel] async_tp: torch's compiler finds every collective of a block beside a product."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tiny import inputs_of, tiny_config
from torch import fx
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from unchecked import unchecked

from titan_dit.dry_run.fake_step import fake_world
from titan_dit.models.layers import TokenLinear
from titan_dit.parallel import async_tp, tensor
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.parallel.tensor import TokenFirst
from titan_dit.parallel.tensor_plans.dit import plan


def fused(graph):
    """Fused operators that torch's pass makes of a graph; the graph itself stays."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    module = fx.GraphModule(graph, copy)
    view_to_reshape(module)
    # The pass itself needs no device.
    with (
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        symmetric_memory._test_mode(),
    ):
        micro_pipeline_tp_pass(module.graph)
    names = [str(node.target) for node in module.graph.nodes]
    return Counter(name.split(".")[1] for name in names if name.startswith("symm_mem"))


def fused_in_a_block(takes_biases_out, samples):
    """By pass of a compiled block: fused operators."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    found = {}

    def count(kind):
        def compiler(graph, _):
            found[kind] = fused(graph)
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    config = tiny_config(model={"num_layers": 1}).model
    torch._dynamo.reset()
    with fake_world(0, 2), unchecked():
        mesh = Mesh(AxisSizes(tp=2), "cpu")
        model = config.build(1)
        tensor.apply(model, mesh.axis("tp"), plan(True))
        if takes_biases_out:
            async_tp.take_biases_out(model, plan(True))
        model.blocks["0"].compile(fullgraph=True, backend=backend)
        inputs = {name: value[:samples] for name, value in inputs_of(config).items()}
        model(inputs, config.static(torch.device("cpu"))).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    return found


@pytest.mark.parametrize("samples", [1, 4])
def test_every_gather_and_reduction_of_a_block_is_fused_with_its_product(samples):
    both = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
    assert fused_in_a_block(True, samples) == {"forward": both, "backward": both}


def test_with_biases_in_the_products_forward_has_nothing_to_fuse():
    assert fused_in_a_block(False, 4)["forward"] == {}


class Own(RowwiseParallel):
    """A user's style."""


USERS = {
    "as here": (TokenFirst(RowwiseParallel(output_layouts=Shard(0))), True),
    "samples first in memory": (RowwiseParallel(output_layouts=Shard(1)), True),
    "DTensors": (RowwiseParallel(output_layouts=Shard(1), use_local_output=False), False),
    "sharded samples": (RowwiseParallel(output_layouts=Shard(0)), False),
    "sharded channels": (RowwiseParallel(output_layouts=Shard(-1)), False),
    "whole tokens": (RowwiseParallel(), False),
    "a subclass": (Own(output_layouts=Shard(1)), False),
    "by column": (ColwiseParallel(input_layouts=Shard(1)), True),
    "by column, DTensors": (ColwiseParallel(input_layouts=Shard(1), use_local_output=False), False),
    "by column, whole tokens": (ColwiseParallel(), False),
}


@pytest.mark.parametrize("case", USERS)
def test_the_biases_of_a_users_plan_are_taken_out_of_local_tokens_only(case):
    style, taken = USERS[case]
    config = tiny_config(model={"num_layers": 1}).model
    with fake_world(0, 2), unchecked():
        mesh = Mesh(AxisSizes(tp=2), "cpu").axis("tp")
        model = config.build(1)
        users = replace(plan(True), block=plan(True).block | {"mlp.down": style})
        tensor.apply(model, mesh, users)
        layer = model.blocks["0"].mlp.down
        async_tp.take_biases_out(model, users)
        assert (layer.product is not TokenLinear.product) == taken
        # This rank's half of what the layer is given: of the channels, or of the tokens.
        size = (
            (2, 2, config.hidden_size * 4) if "column" in case else (2, 4, config.hidden_size * 2)
        )
        if case == "by column, whole tokens":
            size = (2, 4, config.hidden_size * 4)
        layer(torch.randn(size)).sum().backward()
        assert layer.bias.grad is not None


def test_without_async_tp_products_keep_their_biases():
    model = tiny_config().model.build(1)
    async_tp.apply(model, plan(True), None)
    linears = [part for part in model.modules() if isinstance(part, TokenLinear)]
    assert all(part.product is TokenLinear.product for part in linears)
    assert not any(part._forward_hooks for part in linears)
