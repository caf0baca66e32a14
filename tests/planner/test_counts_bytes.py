"""Moved bytes, state and memory of counts against limits.py, docs/roofline.md and the dry run."""

import resource
import sys
from concurrent.futures import ProcessPoolExecutor

import forked
import pytest
from commands import ROOT
from test_counts import BF16, counts, dry_run, gpt_config, tiny_config, whole

from titan_dit.config import catalog, config_file
from titan_dit.dry_run.memory import StorageKind
from titan_dit.optim.muon import cost
from titan_dit.plan import resolve

sys.path.insert(0, str(ROOT / "benchmarks"))
import limits

H, TOKENS, B = 128, 256, 4
DIT = {"hidden_size": H, "num_heads": 8, "latent_size": 32, "num_layers": 3}
"""Its tokens are many beside its vectors of one sample."""


@pytest.fixture(scope="module", autouse=True)
def elsewhere():
    """Rehearse in another process: the shape checks of the tests reject sharded tokens."""
    global run
    with ProcessPoolExecutor(1, forked.context()) as pool:

        def run(function, *arguments):
            return pool.submit(function, *arguments).result()

        yield


def dit(**sections):
    return tiny_config(**{"model": DIT, "training": {"global_batch_size": B}, **BF16, **sections})


@pytest.mark.parametrize("ratio", [4.0, 8.0])
def test_blocks_move_what_was_counted_by_hand(ratio):
    """docs/roofline.md: eager 63 h + 6 f elements per token, fused 28 h + 5 f."""
    block = run(counts, dit(model={**DIT, "mlp_ratio": ratio})).block
    f, unit = ratio * H, 2 * B * TOKENS
    for key, field, within in (("eager", "moved", 0.005), ("compiled", "fused", 0.04)):
        forward, backward, _ = limits.ELEMENTWISE[key]
        for (of_h, of_f), work in ((forward, block.forward), (backward, block.backward)):
            expected = unit * (of_h * H + of_f * f)
            assert getattr(work, field) == pytest.approx(expected, rel=within)
            assert 0 < work.kernels < work.operators


def test_selective_recomputation_moves_what_it_computes_again():
    again, plain = (
        run(counts, dit(activation_checkpoint={"mode": mode})).block
        for mode in ("selective", "none")
    )
    # Eager, 3 h of the last gate more than needed: it has run when torch's checkpoint stops.
    for key, field, last in (("eager", "moved", 3), ("compiled", "fused", 0)):
        more = getattr(again.backward, field) - getattr(plain.backward, field)
        _, _, (of_h, of_f) = limits.ELEMENTWISE[key]
        assert more == pytest.approx(2 * B * TOKENS * (of_h + last + 4 * of_f) * H, rel=0.01)
        assert getattr(again.forward, field) == pytest.approx(
            getattr(plain.forward, field), rel=0.01
        )


@pytest.mark.parametrize("averages", [1, 2])
def test_an_update_moves_the_state_as_often_as_counted_by_hand(averages):
    config = dit(ema={"decays": [0.9, 0.99][:averages]})
    found = run(counts, config)
    work = limits.Work(config.model, 1, B, num_averages=averages)
    update = whole(found, 3, "update")
    # Beside vectors of a number per tensor.
    assert update.moved == pytest.approx(limits.state_bytes(work), rel=0.001)
    every = {"decays": [0.9, 0.99][:averages], "every": 4}
    rare = whole(run(counts, dit(ema=every)), 3, "update")
    parameters = sum(
        n * p.parameters for n, p in ((1, found.embed), (3, found.block), (1, found.head))
    )
    assert update.moved - rare.moved == pytest.approx(3 / 4 * 12 * averages * parameters, rel=0.001)


def test_muon_computes_newton_schulz_iterations():
    block = run(counts, dit(optimizer={"name": "muon"})).block
    found = sum(n * product.flops for product, n in block.update.products.items())
    matrices = [(3, H, H), (1, H, H), (1, 4 * H, H), (1, H, 4 * H), (1, 6 * H, H)]
    assert found == 5 * sum(cost(*shape) for shape in matrices)


def test_tied_weights_and_a_sharded_vocabulary():
    config = gpt_config(parallel={"tp": 2}, **BF16)
    found = run(counts, config, 2)
    assert found.tied == 256 / 2 * 32
    logits = [product for product in found.head.forward.products if product.n == 256 / 2]
    assert [(product.m, product.k) for product in logits] == [(8 * 16, 32)]
    sent = {message.operation for message in found.head.forward.messages}
    assert sent == {"all-reduce", "all-gather"}


def test_frozen_parameters_have_no_update():
    frozen = {"groups": [{"pattern": "embed.*", "frozen": True}]}
    found, plain = run(counts, dit(optimizer=frozen)), run(counts, dit())
    assert found.embed.trained == 0 < found.embed.parameters == plain.embed.parameters
    assert found.embed.update.moved == 6 * found.embed.parameters  # The cast of the weights.
    assert found.block.update == plain.block.update
    assert not any(found.embed.backward.products)


MEMORY = [
    ("dit", "none", "bf16"),
    ("dit", "full", "fp32"),
    ("gpt", "selective", "bf16"),
    ("gpt", "full", "bf16"),
]


@pytest.mark.parametrize(("name", "mode", "dtype"), MEMORY)
def test_what_parts_keep_and_use_adds_up_to_the_dry_runs_peak(name, mode, dtype):
    """One rank and microbatch, as the docstrings of `Part` say."""
    sections = {"activation_checkpoint": {"mode": mode}, "precision": {"dtype": dtype}}
    long = {"sequence_length": 256, "hidden_size": 64}
    config = dit(**sections) if name == "dit" else gpt_config(model=long, **sections)
    found, [rank] = run(counts, config), run(dry_run, config, 1).ranks
    plan = resolve(config, 1)
    size = plan.dtype.itemsize
    parts = [found.embed, *[found.block] * 3, found.head]
    kept, gradients, moments = 0.0, 0.0, []
    for part in parts:
        kept += part.kept
        moments.append(kept + part.forward_peak)
    for part in reversed(parts):
        moments.append(kept + part.backward_peak + part.backward_gradients + gradients)
        kept, gradients = kept - part.kept, gradients + size * part.trained
    held = rank.peak.bytes
    state = sum(held[kind] for kind in ("parameters", "optimizer", "EMA", "gathered"))
    inputs = found.static + found.inputs * plan.microbatch_size
    assert inputs == pytest.approx(held[StorageKind.INPUTS], rel=0.02)
    assert max(moments) + inputs + state == pytest.approx(rank.peak.total, rel=0.01)


def of_175b():
    config = config_file.load(["--config", "gpt_175b", "--parallel.tp", "8"], catalog.variant)
    return counts(config, 1024), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_gpt_of_175_billion_parameters_takes_no_memory():
    found, kib = run(of_175b)
    assert 96 * found.block.parameters * 8 == pytest.approx(174e9, rel=0.01)
    assert kib < 2**20
