"""Context parallelism on real ranks: the loss and the gradients of one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from tiny import assert_same_gradients, graphs_alone, randomize, tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from titan_dit.config.layout import CompileConfig
from titan_dit.data.base import Batch
from titan_dit.parallel import context, ring_attention
from titan_dit.parallel.compile import compile_blocks
from titan_dit.rng import SampleRNG

MESHES = {2: [(1, 2)], 4: [(1, 4), (2, 2)]}
METHODS = ("ring", "ulysses")
CONFIG = tiny_config(model={"qk_norm": True})
OBJECTIVE = CONFIG.objective.build(CONFIG.model, CONFIG.objective.example(CONFIG.model)[0])
TOKEN_DIMS = {"tokens": 1, "velocity": 1, "positions": 0}


def prepared():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(8, *CONFIG.model.token_shape, generator=generator)
    batch = Batch(
        fields={"latent": CONFIG.model.detokenize(tokens), "label": torch.arange(8)},
        sample_numbers=torch.arange(8),
        weight=torch.ones(8),
        total_weight=8.0,
    )
    return OBJECTIVE.prepare(batch, SampleRNG(0, batch.sample_numbers))


def build():
    model = CONFIG.objective.model_spec(CONFIG.model).build()
    randomize(dict(model.named_parameters()))
    return model


def backward(model, parts):
    """Loss of the microbatches `parts`; gradients accumulate on the parameters."""
    total = 0.0
    for inputs, static, targets, total_tokens in parts:
        predictions = {"prediction": model(inputs, static)}
        loss = OBJECTIVE.loss(predictions, targets).sum() / total_tokens
        loss.backward()
        total += loss.item()
    return total


def take(whole, rows, rank, size):
    """This rank's token slice of some samples."""
    tensors = [
        {k: v[rows] for k, v in whole.inputs.items()},
        whole.static,
        {k: v[rows] for k, v in whole.targets.items()},
    ]
    dims = [{k: d for k, d in TOKEN_DIMS.items() if k in part} for part in tensors]
    sliced = (context.slice_tokens(x, d, rank, size) for x, d in zip(tensors, dims, strict=True))
    return *sliced, whole.total_tokens


def in_one_process():
    model, whole = build(), prepared()
    loss = backward(model, [(whole.inputs, whole.static, whole.targets, whole.total_tokens)])
    return loss, {name: p.grad for name, p in model.named_parameters()}


def in_slices(world, mesh, method, microbatches=1, change=None):
    """Loss and gradients over a (data, cp) mesh, summed over all ranks."""
    model, whole = build(), prepared()
    context.apply(model, mesh["cp"], method)
    if change:
        change(model)
    (data, cp), (data_rank, cp_rank) = mesh.shape, mesh.get_coordinate()
    rows = torch.arange(8).chunk(data)[data_rank].chunk(microbatches)
    loss = torch.tensor(backward(model, [take(whole, part, cp_rank, cp) for part in rows]))
    found = {name: p.grad for name, p in model.named_parameters()}
    for value in (loss, *found.values()):
        dist.all_reduce(value)
    return loss.item(), found


def recompute(model):
    """Full activation checkpointing: the collectives of forward run again in backward."""
    for block in model.blocks.values():
        original = block.forward
        block.forward = lambda *args, f=original: checkpoint(f, *args, use_reentrant=False)


def counted(world, run):
    """Result of run(), and the bytes and messages that this rank has sent to others."""
    original, sent = ring_attention._start, []

    def start(x, receive, send, group):
        others = sum(rows for rank, rows in enumerate(send) if rank != world.rank)
        sent.append(x.nbytes // x.shape[0] * others)
        return original(x, receive, send, group)

    ring_attention._start = start
    result = run()
    ring_attention._start = original
    return *result, (sum(sent), len(sent))


def all_cases(world):
    results = {}
    for shape in MESHES[world.size]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "cp"))
        for method, microbatches in itertools.product(METHODS, (1, 2)):
            for change in (None, recompute) if world.size == 2 else (None,):
                case = shape, method, microbatches, change is not None
                run = partial(in_slices, world, mesh, method, microbatches, change)
                results[case] = counted(world, run) if shape[0] == 1 else (*run(), None)
    return results


@pytest.fixture(scope="module")
def reference():
    return in_one_process()


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return on_ranks(request.param, all_cases)


def test_tokens_in_slices_give_the_loss_and_gradients_of_one_process(results, reference):
    expected_loss, expected = reference
    for found_on_rank in results:
        assert len(found_on_rank) == len(MESHES[len(results)]) * (8 if len(results) == 2 else 4)
        for case, (loss, found, _) in found_on_rank.items():
            assert loss == pytest.approx(expected_loss, rel=1e-6), case
            assert_same_gradients(found, expected)


def test_each_rank_sends_what_theory_says(results):
    c, layers, elements = len(results), CONFIG.model.num_layers, 8 * 16 * CONFIG.model.hidden_size
    theory = {
        # Keys and values forward, again backward, and their gradients.
        "ring": (4 * 6 * (c - 1) * elements * layers // c, 3 * (c - 1) * layers),
        "ulysses": (4 * 8 * (c - 1) * elements * layers // c**2, 4 * layers),
    }
    for found_on_rank in results:
        for method, (num_bytes, messages) in theory.items():
            for microbatches in (1, 2):
                _, _, sent = found_on_rank[(1, c), method, microbatches, False]
                assert sent == (num_bytes, messages * microbatches)


def compiled(world):
    from torch._dynamo.utils import counters

    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("data", "cp"))
    results = {}
    for method in METHODS:
        torch._dynamo.reset()
        counters.clear()
        compile = partial(compile_blocks, config=CompileConfig(enabled=True))
        run = partial(in_slices, world, mesh, method, change=compile)
        # The ring's messages are counted inside its operators, Ulysses' would be in the graph.
        with graphs_alone():
            found = counted(world, run) if method == "ring" else (*run(), None)
        results[method] = *found, counters["stats"]["unique_graphs"]
    return results


def test_compiled_blocks_are_one_graph_with_the_collectives_in_it(reference):
    expected_loss, expected = reference
    for results in on_ranks(2, compiled):
        # Not two thirds of it: the compiler must not keep the keys of all ranks for backward.
        assert results["ring"][2][1] == 3 * CONFIG.model.num_layers
        for method, (loss, found, _, graphs) in results.items():
            assert graphs == 1, method
            assert loss == pytest.approx(expected_loss, rel=1e-6), method
            assert_same_gradients(found, expected)


def only_own_tokens(model):
    """Attention within the slice: zero gates would hide this."""
    for block in model.blocks.values():
        block.attn.attend = torch.nn.functional.scaled_dot_product_attention


def positions_of_the_first_slice(model):
    """Tokens are sliced, positions are those of the first slice."""
    original = model.embed.forward

    def forward(inputs, static):
        first = model.config.static(torch.device("cpu"))["positions"][: len(static["positions"])]
        return original(inputs, {"positions": first})

    model.embed.forward = forward


def forgotten_gradients(model):
    """The gradients of other ranks' keys are dropped instead of sent back."""
    from titan_dit.parallel import ring_attention as ring

    original = ring.travel_backward

    def backward(d_out, q, k, v, out, lse, peers, kernel, *how):
        dq, _ = original(d_out, q, k, v, out, lse, peers, kernel, *how)
        _, *own = kernel.backward(d_out, q, k, v, out, lse, q.shape[-1] ** -0.5, False)
        return dq, torch.stack(own)

    ring.travel_backward = backward


BUGS = (only_own_tokens, positions_of_the_first_slice, forgotten_gradients)


def planted(world):
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("data", "cp"))
    return {bug.__name__: in_slices(world, mesh, "ring", change=bug) for bug in BUGS}


def test_the_comparison_catches_planted_bugs(reference):
    expected_loss, expected = reference
    results = on_ranks(2, planted)[0]
    assert results.keys() == {bug.__name__ for bug in BUGS}
    for name, (loss, found) in results.items():
        # The loss alone would not detect the last one.
        hidden = name == "forgotten_gradients"
        assert (loss == pytest.approx(expected_loss, rel=1e-6)) == hidden, name
        with pytest.raises(AssertionError):
            assert_same_gradients(found, expected)
