"""Products and messages of counts against model FLOPs, FlopCounter and the dry run's traffic."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import forked
import pytest
import torch
from tiny import tiny_config
from tiny_bert import bert_config
from tiny_gpt import gpt_config
from tiny_joint import joint_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.dry_run.fake_step import FakeRank, fake_world, take_fake_step
from titan_dit.parallel.mesh import Mesh
from titan_dit.plan import resolve
from titan_dit.planner import counts as counting
from titan_dit.planner.counts import Rehearsals
from titan_dit.planner.hardware import device_of
from titan_dit.planner.work import Work

BF16 = {"precision": {"dtype": "bf16"}}


@pytest.fixture(scope="module", autouse=True)
def elsewhere():
    """Rehearse in another process: the shape checks of the tests reject sharded tokens."""
    global run
    with ProcessPoolExecutor(1, forked.context()) as pool:

        def run(function, *arguments):
            return pool.submit(function, *arguments).result()

        yield


KNOWN = {}
"""In the other process: `Rehearsals` by config."""


def counts(config, world=1, **changes):
    """Counts of a config on `world` ranks, with fields of its plan replaced."""
    rehearsals = KNOWN.setdefault(repr(config), Rehearsals(config))
    return rehearsals.counts(replace(resolve(config, world), **changes))


def dry_run(config, world):
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    sections = config.training, config.optimizer, config.ema
    return take_fake_step(resolve(config, world), objective, fields, *sections)


def whole(counts, layers, *passes):
    """The work of embed, `layers` blocks and head."""
    parts = [counts.embed, *[counts.block] * layers, counts.head]
    return sum((getattr(p, name) for p in parts for name in passes), start=Work())


def flops(work):
    """Model FLOPs: those of causal attention in full."""
    attention = sum(n * a.flops * (1 + a.is_causal) for a, n in work.attention.items())
    return attention + sum(n * product.flops for product, n in work.products.items())


MODELS = {
    "dit": tiny_config(**BF16),
    "gpt": gpt_config(**BF16),
    "gpt, math": gpt_config(precision={"dtype": "bf16", "attention": "math"}),
    "bert": bert_config(**BF16),
    "joint_dit": joint_config(**BF16),
    "wan": joint_config("wan", **BF16),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_all_parts_are_the_models_flops(name):
    config = MODELS[name]
    plan, found = resolve(config, 1), run(counts, config)
    work = whole(found, 3, "forward", "backward")
    with torch.device("meta"):
        model = plan.spec.build()
    expected = model.flops_per_sample(plan.spec.num_attended_tokens) * plan.microbatch_size
    assert flops(work) == pytest.approx(expected, rel=1e-12)
    parameters = found.embed.parameters + 3 * found.block.parameters + found.head.parameters
    assert parameters == sum(p.numel() for p in model.parameters())
    is_mixed = name in ("gpt, math", "wan")
    assert {item.dtype for item in work.products} == (DTYPES if is_mixed else {"bf16"})


DTYPES = {"bf16", "fp32"}
"""Attention by products runs in fp32, and so does the embedding of Wan's time."""


def counted_flops(config):
    """FLOPs of the products in a fake step of one process, by FlopCounterMode."""
    plan = replace(resolve(config, 1), initial_weights="generator")
    facts, fields = config.objective.example(config.model)
    sections = config.training, config.optimizer, config.ema
    with fake_world(0, 1):
        mesh, mode = Mesh(plan.sizes, "cpu"), FakeTensorMode(allow_non_fake_inputs=True)
        objective = config.objective.build(config.model, facts)
        rank = FakeRank(plan, objective, fields, mesh, mode, sections)
        with mode, FlopCounterMode(display=False) as counter:
            rank.step(plan.samples_per_rank, plan.microbatch_size, 1)
    found = counter.get_flop_counts()["Global"]
    return sum(n for operator, n in found.items() if "scaled_dot" not in str(operator))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_products_are_those_that_a_step_computes_and_computes_again(mode):
    config = gpt_config(**BF16, activation_checkpoint={"mode": mode})
    work = whole(run(counts, config), 3, "forward", "backward", "update")
    found = sum(n * product.flops for product, n in work.products.items())
    assert found == run(counted_flops, config)


def test_half_of_backward_are_weight_gradients():
    block = run(counts, tiny_config(**BF16)).block
    by_half = Counter()
    for product, n in block.backward.products.items():
        by_half[product.is_weight_gradient] += n * product.flops
    forward = sum(n * product.flops for product, n in block.forward.products.items())
    assert by_half == {True: forward, False: forward}


LONG = pytest.mark.long
SENDING = [
    ("gpt", "none", {"tp": 4}),
    ("gpt", "full", {"tp": 4, "sequence_parallel": False}),
    pytest.param("gpt", "full", {"cp": 4}, marks=LONG),
    ("gpt", "attention", {"cp": 4, "cp_method": "ulysses"}),
    ("gpt", "selective", {"cp": 2, "tp": 2}),
    pytest.param("dit", "selective", {"tp": 4}, marks=LONG),
    pytest.param("dit", "full", {"tp": 4, "sequence_parallel": False}, marks=LONG),
    pytest.param("dit", "attention", {"cp": 4, "cp_method": "ulysses"}, marks=LONG),
    pytest.param("dit", "none", {"cp": 2, "tp": 2}, marks=LONG),
    pytest.param("gpt", "selective", {"cp": 2, "tp": 2, "cp_method": "ulysses"}, marks=LONG),
    pytest.param("bert", "full", {"tp": 4}, marks=LONG),
]


@pytest.mark.parametrize(("name", "mode", "sizes"), SENDING)
def test_messages_are_those_of_a_dry_run(name, mode, sizes):
    """To the byte. Two data ranks: one would share its groups with tp or cp."""
    changes = {
        "parallel": {"dp_shard": 2, **sizes},
        "activation_checkpoint": {"mode": mode},
        **BF16,
    }
    make = {"dit": tiny_config, "gpt": gpt_config, "bert": bert_config}[name]
    config = make(model={"num_layers": 2}, training={"microbatch_size": 2}, **changes)
    world = 2 * sizes.get("tp", 1) * sizes.get("cp", 1)
    found, report = run(counts, config, world), run(dry_run, config, world)
    sent, passes = Counter(), whole(found, 2, "forward", "backward")
    work = passes.times(report.num_microbatches) + whole(found, 2, "update")
    for message, n in work.messages.items():
        sent[message.axis, message.operation] += n * message.bytes
    [rank] = report.ranks
    expected = {k: n for k, n in rank.traffic.bytes.items() if k[0] in ("tp", "cp")}
    assert dict(sent) == expected
    assert expected


def test_a_ring_computes_the_models_attention_and_hides_its_hops():
    config = gpt_config(parallel={"cp": 4}, **BF16)
    block = run(counts, config, 4).block
    [(forward, _)], [(backward, _)] = (
        block.forward.attention.items(),
        block.backward.attention.items(),
    )
    b, n, h = 8, 16, 32
    assert 4 * forward.flops == 4 * b * n * n * h / 2
    assert backward.flops == 2 * forward.flops
    assert (forward.ring, forward.queries, forward.keys) == (4, n / 4, n)
    assert forward.hop_bytes == 2 * 2 * b * n / 4 * h
    assert backward.hop_bytes == forward.hop_bytes * (1 + 2)  # Gradients are fp32.
    for kernel, work in ((forward, block.forward), (backward, block.backward)):
        [(message, _)] = work.messages.items()
        assert message == ("cp", "ring", 3 * kernel.hop_bytes)


def in_float8(recipe):
    """(fused bytes of a block without and with the casts' own reads, its work), all in float8."""
    config = tiny_config(precision={"dtype": "bf16", "float8": recipe, "float8_layers": "all"})
    found = []
    for nbytes in (0, counting.CAST_BYTES):
        counting.CAST_BYTES, own = nbytes, counting.CAST_BYTES
        try:
            found.append(whole(Rehearsals(config).counts(resolve(config, 1)), 3, *PASSES))
        finally:
            counting.CAST_BYTES = own
    return config, *found


PASSES = "forward", "backward"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_casts_read_each_float8_operand_twice_more(recipe):
    config, without, work = run(in_float8, recipe)
    plan, h = resolve(config, 1), config.model.hidden_size
    tokens = plan.microbatch_size * plan.spec.num_tokens
    f = round(config.model.mlp_ratio * h)
    # Inputs, output gradients and weights of qkv, out, up and down; each is in two products.
    inputs, gradients = 3 * h + f, (3 * h) + h + f + h
    weights = 3 * h * h + h * h + 2 * h * f
    casts = 3 * 2 * (tokens * (inputs + gradients) + weights)
    assert work.fused - without.fused == pytest.approx(4 * casts)
    # One operator after another, they are counted as they are.
    assert work.moved == without.moved


def test_products_in_bf16_are_not_cast():
    assert not any(map(counting.cast, run(counts, MODELS["dit"]).block.forward.products))


def on_device(device):
    """In float8 on a device: a block's linears of DiT-XL, and the formats of their products."""
    shape = {"hidden_size": 1152, "num_heads": 16, "latent_size": 64, "num_layers": 1}
    precision = {"dtype": "bf16", "float8": "tensorwise"}
    config = tiny_config(model=shape, precision=precision, training={"global_batch_size": 32})
    plan = replace(resolve(config, 1), device=device)
    rehearsals = Rehearsals(config)
    found = rehearsals.counts(plan).block.forward.products
    sides = {(p.k, p.n) for p in found if p.dtype == "float8"}
    return {name.split(".", 2)[2] for name in rehearsals.in_float8(plan)}, sides


def test_float8_layers_are_those_of_the_device_that_is_planned_for():
    assert run(on_device, device_of("h100").torch_name) == (set(), set())
    two = {"mlp.up", "mlp.down"}
    assert run(on_device, device_of("h200").torch_name) == (two, {(1152, 4608), (4608, 1152)})


SIZES = [("dit", {"tp": 2}, 5), ("dit", {}, 7), ("gpt", {"cp": 2}, 5)]


@pytest.mark.parametrize(("name", "sizes", "size"), SIZES)
def test_other_microbatch_sizes_follow_from_two(name, sizes, size):
    """Equal to a rehearsal of that size: every operator and every byte."""
    config = {"dit": tiny_config, "gpt": gpt_config}[name](parallel=sizes, **BF16)
    follows, rehearsed = run(both_ways, config, 2 if sizes else 1, size)
    for part in ("forward", "backward"):
        own, other = getattr(follows, part), getattr(rehearsed, part)
        pairs = zip(own.operators, other.operators, strict=True)
        for one, two in pairs:
            assert (one.name, one.work) == (two.name, two.work)
            for mine, its in zip(one.reads + one.writes, two.reads + two.writes, strict=True):
                assert mine[1:] == its[1:]
        assert [*own.changes] == [*other.changes]
    assert follows.carried == rehearsed.carried


def both_ways(config, world, size):
    """A block's trace by interpolation, and from a rehearsal of this size."""
    plan = replace(resolve(config, world), wanted_microbatch_size=size, global_batch_size=size)
    rehearsals = Rehearsals(config)
    rehearsals.rehearse(plan, (2, 3))
    follows = rehearsals.block(plan, (2, 3))
    rehearsals.rehearse(plan, (size, 2))
    return follows, rehearsals.block(plan, (size, 2))
