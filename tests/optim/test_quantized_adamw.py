"""AdamW with quantised moments, against torchao's."""

import functools
import gc
import math

import pytest
import torch
from live_bytes import Live
from torch import nn
from torchao import optim as torchao

from titan_dit.config.section import UserError
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWConfig,
    AdamWFp8Config,
)

THEIRS = {
    AdamW8bitConfig: torchao.AdamW8bit,
    AdamW4bitConfig: torchao.AdamW4bit,
    AdamWFp8Config: torchao.AdamWFp8,
}
GO, STOP = torch.tensor(False), torch.tensor(True)
SETTINGS = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def parameters():
    """A matrix and a bias."""
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.weight": nn.Parameter(torch.randn(24, 2048, generator=generator)),
        "blocks.0.bias": nn.Parameter(torch.randn(24, generator=generator)),
    }


def with_gradients(named, step):
    generator = torch.Generator().manual_seed(step)
    for p in named.values():
        # Rows of very different sizes, as gradients have.
        size = torch.logspace(-4, 1, len(p)).view(-1, *[1] * (p.ndim - 1))
        p.grad = torch.randn(p.shape, generator=generator) * size


def stepped(optimizer, named, steps):
    for step in steps:
        with_gradients(named, step)
        apply_gradients(optimizer, SETTINGS["lr"], GO)


@pytest.mark.parametrize("config", THEIRS)
def test_steps_are_torchaos(config):
    named = parameters()
    optimizer = build_optimizer(named, config(**SETTINGS), None)
    stepped(optimizer, named, range(5))
    reference = parameters()
    # Their blocks are the largest; ours are as many elements here.
    theirs = THEIRS[config](reference.values(), **SETTINGS)
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            with_gradients(reference, step)
            theirs.step()
    off = torch.cat([(p - reference[n]).abs().flatten() for n, p in named.items()])
    # Of float8, second moments that torchao rounds to 0 keep a code here.
    assert (off > 1e-6).float().mean() <= (1e-3 if config is AdamWFp8Config else 0)
    weight, bias = named.values()
    state = theirs.state[reference["blocks.0.weight"]]
    for key in ("exp_avg", "exp_avg_sq"):
        # A sum that is ordered otherwise may round to the next code.
        same = optimizer.shards[weight][key].reshape(-1).view(torch.uint8)
        assert (same == state[key].codes.reshape(-1).view(torch.uint8)).float().mean() > 0.999
        assert optimizer.shards[bias][key].dtype == torch.float32


@pytest.mark.parametrize("config", THEIRS)
def test_a_bad_step_changes_no_bit(config):
    named = parameters()
    optimizer = build_optimizer(named, config(**SETTINGS), None)
    stepped(optimizer, named, range(2))
    before = [t.clone() for s in optimizer.shards.values() for t in s.values()]
    weights = [p.detach().clone() for p in named.values()]
    for p in named.values():
        p.grad = torch.full_like(p, math.nan)
    apply_gradients(optimizer, 1e-3, STOP)
    after = [t for s in optimizer.shards.values() for t in s.values()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8))
    for old, p in zip(weights, named.values(), strict=True):
        assert torch.equal(old, p)
    assert [int(s["step"]) for s in optimizer.shards.values()] == [2, 2]


@pytest.mark.parametrize("config", THEIRS)
def test_moments_take_the_memory_that_is_said(config):
    named = parameters()
    settings = config(**SETTINGS)
    optimizer = build_optimizer(named, settings, None)
    said = sum(4 * settings.num_moments(n, p.shape) * p.numel() for n, p in named.items())
    held = sum(t.nbytes for s in optimizer.shards.values() for k, t in s.items() if k != "step")
    assert held == said
    [line] = settings.lines({name: p.shape for name, p in named.items()})
    assert line.startswith(f"{config.name}  moments of 1 matrices")


@pytest.mark.parametrize(("config", "most"), [(AdamW8bitConfig, 2.1), (AdamW4bitConfig, 1.1)])
def test_live_bytes_a_parameter_are_few(config, most):
    """After a step, of a block's matrices and biases: all storages that it has left behind."""
    shapes = {"out": (512, 1024), "up": (512, 2048), "down": (128, 8192), "bias": (2048,)}
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    with_gradients(named, 0)
    with Live() as live:
        optimizer = build_optimizer(named, config(**SETTINGS), None)
        apply_gradients(optimizer, SETTINGS["lr"], GO)
        gc.collect()
        held = live.num_bytes
    elements = sum(p.numel() for p in named.values())
    assert (most - 0.15) * elements < held <= most * elements


def moments(weight):
    """Codes of one byte, and scales, of both moments of a weight in blocks [n, block]."""
    for _ in range(2):
        yield torch.zeros(weight.shape, dtype=torch.uint8)
        yield torch.zeros(len(weight), 1)


def test_widths_have_a_graph_each_for_any_rows_and_group(monkeypatch):
    """Torch gives up compiling after `recompile_limit` graphs, and raises with `fullgraph`."""
    from titan_dit.optim import fused
    from titan_dit.optim import quantized_adamw as module

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch.compiler.reset()
    step = fused.compiled.__wrapped__(module.step_in_place)
    widths = [4096, 3840, 3072, 2560, 2304, 2048, 1920, 1536, 1152, 1024, 768, 640, 512, 384]
    widths += [800, 1088, 1248, 2000, 4400]
    config = AdamW8bitConfig(**SETTINGS)
    blocks = set()
    for number, width in enumerate(widths):
        for rows, decay in ((16 + number, 0.1), (64, 0.0)):
            block = config.block((rows, width))
            weight = torch.randn(rows * width // block, block)
            expected = weight.clone()
            for run, tensor in ((step, weight), (module.step_in_place, expected)):
                run(
                    [tensor, torch.ones_like(tensor), *moments(tensor)],
                    torch.tensor(1.0),
                    GO,
                    [torch.tensor(value) for value in (1e-3, 1e-8, decay)],
                    codes=[
                        module.codes_of("8", is_signed, GO.device) for is_signed in (True, False)
                    ],
                    betas=(0.9, 0.95),
                )
            torch.testing.assert_close(weight, expected)
            blocks.add(block)
    assert len(blocks) > 8
    assert len(graphs) == len(blocks)


def test_pieces_are_updated_as_the_whole(monkeypatch):
    found = []
    for piece in (2**22, 3 * 256):
        monkeypatch.setattr("titan_dit.optim.quantized_adamw.PIECE", piece)
        named = parameters()
        optimizer = build_optimizer(named, AdamW8bitConfig(**SETTINGS), None)
        stepped(optimizer, named, range(2))
        found.append(named["blocks.0.weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((4096, 4096), 256),
        ((1152, 4608), 192),
        ((3840, 3840), 32),
        ((3840, 10240), 256),
        ((1152, 16), 0),
        ((4096,), 0),
        ((60, 64), 0),
        ((8, 1000), 0),  # 25 is odd.
        ((8, 2000), 50),
    ],
)
def test_blocks_fit_every_tensor_parallel_size(shape, block):
    assert AdamW8bitConfig().block(shape) == block
    for tp in range(1, 9):
        if block and shape[-1] % tp == 0:
            assert shape[-1] // tp % block == 0


def test_columns_that_cut_a_block_are_refused():
    named = {"w": nn.Parameter(torch.zeros(8, 4096))}
    optimizer = build_optimizer(named, AdamW8bitConfig(), None)
    group = optimizer.param_groups[0]
    with pytest.raises(UserError, match=r"blocks of 256 .* 128 columns .* tp, up to 8"):
        optimizer.new_states([torch.zeros(8, 128)], group)


@pytest.mark.compiler
@pytest.mark.parametrize("config", THEIRS)
def test_the_compiled_step_is_the_eager_one(config, monkeypatch):
    from titan_dit.optim import fused
    from titan_dit.optim import quantized_adamw as module

    found = []
    for step in (module.step_in_place, fused.compiled(module.step_in_place)):
        monkeypatch.setattr(module, "step_in_place", step)
        named = parameters()
        stepped(build_optimizer(named, config(**SETTINGS), None), named, range(3))
        found.append(named["blocks.0.weight"])
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", [AdamWConfig, *THEIRS])
@pytest.mark.parametrize("size", [1e-3, 1e-4])
def test_small_gradients_of_a_block_take_no_large_steps(config, size):
    """A second moment that is rounded to 0 would divide by eps."""
    p = nn.Parameter(torch.zeros(8, 2048))
    optimizer = build_optimizer({"w": p}, config(lr=1.0), None)
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for step in range(40):
        p.grad = torch.randn(p.shape, generator=generator)
        p.grad[:, 1:64] *= size * (step < 20)
        before = p.detach().clone()
        apply_gradients(optimizer, 1.0, GO)
        largest = max(largest, (p.detach() - before)[:, 1:64].abs().max().item())
    assert largest < 1.5


def test_it_learns_as_adamw_does():
    losses = {}
    for config in (AdamWConfig, *THEIRS):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        target = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        named = dict(model.named_parameters())
        optimizer = build_optimizer(named, config(lr=2e-3), None)
        for _ in range(200):
            x = torch.randn(64, 64)
            loss = (model(x) - target(x)).square().mean()
            loss.backward()
            apply_gradients(optimizer, 2e-3, GO)
        losses[config.name] = loss.item()
    assert losses["adamw"] < 0.02
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["adamw"], rel=0.1), name
