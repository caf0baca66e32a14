"""[lora]: gradients of adapters in every layout are those of one process, and those of theory."""

from functools import partial

import pytest
import torch
from harness import on_ranks
from test_grid import CP, DP, HSDP, PLAIN, PP, TP, ULYSSES, blocks_of_kinds, schedule
from tiny import (
    assert_same_gradients,
    gradients,
    graphs_alone,
    randomize,
    state,
    tiny_config,
    torch_rng,
    whole,
)
from tiny_joint import joint_config

from titan_dit.config.parameter_groups import matches
from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import MemoryLog, StorageKind
from titan_dit.models import lora
from titan_dit.models.lora_dropout import NUMBER, layer_number
from titan_dit.models.quantized import weight_codes
from titan_dit.parallel.init import put
from titan_dit.trained_model import load
from titan_dit.trainer import Trainer

BASES = ["int8", "float8", "nf4"]
CPU = torch.device("cpu")
FP32 = {"dtype": "fp32"}
WIDE = {
    "rank": 3,
    "alpha": 4.5,
    "targets": ["blocks.*", "embed.timestep.up", "head.out"],
    "trained": ["embed.label.*", "head.modulation.bias"],
}
NARROW = {"rank": 2}
# Of networks with blocks of several kinds.
FLUX2 = {"network": "flux2", "rank": 2, "targets": ["blocks.*.attn.*", "blocks.*.mlp.*"]}
Z_IMAGE = {"network": "z_image", "rank": 2, "targets": ["blocks.*"]}
# Of one with cross-attention.
WAN = {"network": "wan", "rank": 2, "targets": ["blocks.*"]}
DROPOUT = {"dropout": 0.25}
DROPPED = [table | DROPOUT for table in (WIDE, NARROW, FLUX2, Z_IMAGE, WAN)]
WIDE_DROP, NARROW_DROP, FLUX2_DROP, Z_IMAGE_DROP, WAN_DROP = DROPPED
# Over quantised weights, the second one with trained biases of the quantised layers.
INT8 = {"rank": 2, "base": "int8"}
NF4 = {"rank": 2, "base": "nf4", "trained": ["blocks.*.bias"]}
FLOAT8 = WAN | {"base": "float8"}
FLUX2_NF4 = FLUX2 | {"base": "nf4"}
TABLES = [WIDE, NARROW, FLUX2, Z_IMAGE, WAN, INT8, NF4, FLOAT8, FLUX2_NF4]
ZERO_BUBBLE = schedule("interleaved_zero_bubble", 2)
REMAT = {"activation_checkpoint": {"mode": "full"}}
SELECTIVE = {"activation_checkpoint": {"mode": "selective"}}
# [lora], [parallel], [pipeline], whether compiled, and other sections.
CASES = [
    (WIDE, DP, {}, False),
    (WIDE, TP, {}, False),
    (WIDE, PLAIN, {}, False),
    (WIDE, CP, {}, False),
    (WIDE, PP, {}, False),
    (NARROW, PP, ZERO_BUBBLE, False),
    (FLUX2_DROP, TP, {}, False),
    (FLUX2, PP, {}, False),
    (Z_IMAGE_DROP, TP, {}, False),
    (Z_IMAGE_DROP, CP, {}, False),
    (WAN_DROP, TP, {}, False),
    (WAN_DROP, CP, {}, False),
    (WIDE_DROP, DP, {}, False),
    (WIDE_DROP, TP, {}, False),
    (WIDE_DROP, PLAIN, {}, False),
    (NARROW_DROP, TP, {}, True, SELECTIVE),
    # Several microbatches are under way when a block is recomputed.
    (NARROW_DROP, PP, schedule("gpipe"), False, REMAT),
    (NF4, TP, {}, False),
    (NF4, DP, {}, False),
    (INT8, PP, ZERO_BUBBLE, False),
    (FLOAT8, TP, {}, False),
    (FLUX2_NF4, CP, {}, False),
]
# For ./run_tests.sh --long, on two ranks; NARROW_DROP compiles the same layers in CASES.
LONG_ON_TWO = [(NARROW, TP, {}, True), (NARROW, DP, {}, True)]
LONG = [
    (WIDE, TP | PP, ZERO_BUBBLE, False),
    (NARROW, TP | CP, {}, True),
    (WIDE, HSDP, {}, False),
    (WIDE, DP | TP, {}, False),
    (NARROW, DP | PP, schedule("zbv_zero_bubble"), False),
    (FLUX2, DP | TP, {}, False),
    (Z_IMAGE, TP | PP, {}, False),
    (WAN, DP | PLAIN, {}, False),
    (WAN, TP | PP, {}, True),
    (WAN, DP | ULYSSES, {}, False),
    (WIDE_DROP, TP | PP, ZERO_BUBBLE, False),
    (NARROW_DROP, TP | CP, {}, True),
    (FLUX2_DROP, CP | PP, {}, False),
    (Z_IMAGE_DROP, TP | CP, {}, False),
    (WAN_DROP, TP | CP, {}, True, SELECTIVE),
    (WAN_DROP, DP | PP, {}, False),
    (NF4, DP | TP, {}, False),
    (NF4, DP | PLAIN, {}, True),
    (INT8, TP | PP, ZERO_BUBBLE, False),
    (INT8, HSDP, {}, True),
    (FLOAT8, TP | CP, {}, True),
    (FLUX2_NF4, DP | TP, {}, False),
    (FLUX2_NF4, TP | PP, {}, False),
]


def trainer_of(world, table, parallel=None, pipeline=None, compiled=False, layers=4, **sections):
    checkpoint = {"every": 2, "async_save": False, "init": "base"}
    network = table.get("network", "dit")
    build = tiny_config if network == "dit" else partial(joint_config, network)
    config = build(
        model={"num_layers": layers} if network == "dit" else blocks_of_kinds(network, layers),
        lora={key: value for key, value in table.items() if key != "network"},
        parallel=parallel or {},
        pipeline=pipeline or {},
        compile={"enabled": compiled},
        training={
            "global_batch_size": 8 if layers > 3 else 4,
            "microbatch_size": 1 if (parallel or {}).keys() & HSDP else 2,
        },
        **{"checkpoint": checkpoint, "precision": {"dtype": "fp64"}} | sections,
    )
    return Trainer(config, world)


def layers_for(parallel):
    """A pipeline of two ranks has up to four stages; otherwise one block of each kind will do."""
    return 4 if "pp" in parallel else 3


def measured(world, table, parallel, pipeline, compiled, sections=None, layers=None):
    layers = {"layers": layers or layers_for(parallel)}
    with graphs_alone():
        trainer = trainer_of(world, table, parallel, pipeline, compiled, **layers, **sections or {})
        fill(trainer)
        trained = {name for name, p in trainer.parameters.items() if p.requires_grad}
        held = [p for p in trainer.parameters.values() if p.dtype == torch.uint8]
        assert bool(held) == ("base" in table)
        batch = next(trainer.batches())
        prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
        loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
        found = {n: whole(p.grad) for n, p in trainer.parameters.items() if p.grad is not None}
        assert found.keys() == trained
        return loss, found


def fill(trainer):
    """Random weights; of a quantised base the bytes of random ones."""
    codes = weight_codes(trainer.config.lora.base, CPU)
    numbers = {n: p for n, p in trainer.parameters.items() if p.is_floating_point()}
    randomize(numbers)
    for name in trainer.parameters.keys() - numbers.keys():
        held = trainer.parameters[name]
        drawn = {name: torch.empty(codes.shape_of(held.shape))}
        randomize(drawn)
        with torch.no_grad():
            put(held, codes.encode(drawn[name], codes.block(drawn[name].shape[1])))


def decoded(trainer):
    """The weights by name, those of a quantised base decoded."""
    codes = weight_codes(trainer.config.lora.base, CPU)
    weights = {name: p.detach() for name, p in trainer.parameters.items()}
    return {n: p if p.is_floating_point() else codes.decode(p) for n, p in weights.items()}


def train(trainer, steps):
    trainer.resume()
    trainer.open_run_directory()
    batches = trainer.batches()
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(next(batches))
    trainer.save()
    trainer.checkpoints.finish()
    return trainer


def base_run(world, folder):
    """A run whose first average differs from its weights."""
    trainer = run_of(world, folder, {}, {"init": ""})
    randomize(trainer.parameters)
    train(trainer, 1)


def run_of(world, folder, table, checkpoint, parallel=None):
    checkpoint = {"every": 2, "async_save": False} | checkpoint
    return trainer_of(
        world, table, parallel, checkpoint=checkpoint, job={"dir": str(folder)}, precision=FP32
    )


def adapted(world, folder, parallel):
    """Two steps with adapters; the tensors, those after a resume, and predictions of the EMA."""
    given = WIDE, {"init": str(folder / "base")}, parallel
    name = "tp" if parallel else "alone"
    trainer = train(run_of(world, folder / name, *given), 2)
    again = run_of(world, folder / name, *given)
    again.resume()
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    with trainer.ema.swapped_in():
        prediction = trainer.executor.predict(prepared.inputs, prepared.static)
    return state(trainer), state(again), prediction, prepared.inputs, prepared.static


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    on_ranks(1, base_run, folder / "base")
    [alone] = on_ranks(1, adapted, folder, None)
    return folder, alone, on_ranks(2, adapted, folder, TP)


def test_only_adapters_move_and_a_resumed_run_has_the_same_bits(runs):
    folder, alone, ranks = runs
    base = load(folder / "base")
    weights = {f"model.{name}": p for name, p in base.network.named_parameters()}
    for before, after, *_ in (alone, *ranks):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        moved = {name for name, w in weights.items() if not torch.equal(before[name].float(), w)}
        assert moved == {n for n in weights if matches(n[6:], WIDE["trained"])}
        kept = [name for name in before if name.startswith(("optimizer.", "ema."))]
        for name in kept:
            assert "lora_" in name or "embed.label." in name or "head.modulation.bias" in name
        assert all(before[name].any() for name in before if name.endswith(lora.B))
    for name, tensor in alone[0].items():
        torch.testing.assert_close(ranks[0][0][name], tensor, rtol=1e-6, atol=1e-6)


def test_a_loaded_run_has_the_adapters_merged(runs):
    folder, (_, _, prediction, inputs, static), _ = runs
    for name in ("alone", "tp"):
        run = load(folder / name)
        assert not any(lora.is_adapter(n) for n, _ in run.network.named_parameters())
        assert run.weights == "ema 0.9"
        found = run.network(inputs, static)
        torch.testing.assert_close(found, prediction, rtol=1e-4, atol=1e-5)


def test_a_new_run_starts_at_the_merged_weights(runs, tmp_path):
    folder, *_ = runs
    [found] = on_ranks(1, started, tmp_path / "new", folder / "tp")
    merged = dict(load(folder / "tp").network.named_parameters())
    assert found.keys() == merged.keys()
    assert all(torch.equal(found[name].float(), p) for name, p in merged.items())


def refused(world, folder, table, source):
    changes = {"init": "", "resume": str(source), "allow_changes": True}
    trainer = run_of(world, folder, table, changes)
    with pytest.raises(UserError) as raised:
        trainer.resume()
    return str(raised.value)


def begin_quantized(world, folder, base, parallel):
    """The bytes of a base as loaded, and the most that loading held beside the run, in bytes."""
    table = {"rank": 2, "base": base, "trained": ["blocks.*.bias"]}
    trainer = run_of(world, folder, table, {"init": str(folder.parent / "base")}, parallel)
    log = MemoryLog()
    with log:
        for tensors in (trainer.parameters, *trainer.ema.averages.values()):
            log.mark(tensors.values(), StorageKind.PARAMETERS)
        held = sum(log.live().values())
        log.begin()
        trainer.resume()
    return trainer, log.peak().total - held


def bytes_of(trainer):
    """The quantised weights, whole, by name."""
    named = trainer.parameters.items()
    return {name: whole(p) for name, p in named if p.dtype == torch.uint8}


def quantized_alone(world, folder):
    """Two steps over every base; before and after: its bytes, then the run's state."""
    found = {}
    for base in BASES:
        trainer, held = begin_quantized(world, folder / base, base, None)
        before = bytes_of(trainer)
        train(trainer, 2)
        assert all(torch.equal(t, before[name]) for name, t in bytes_of(trainer).items())
        found[base] = before, held, state(trainer), gradients_of(trainer)
    return found


def gradients_of(trainer):
    """Loss and gradients of the next batch, of the trained parameters that this rank holds."""
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
    found = {n: whole(p.grad) for n, p in trainer.parameters.items() if p.grad is not None}
    return loss, found


def quantized_on_ranks(world, folder):
    """By base: what a layout loads from full weights, and resumes from one rank's checkpoint."""
    found = {}
    for base, parallel in zip(BASES, (TP, DP, PP), strict=True):
        begun, held = begin_quantized(world, folder / f"{base}-again", base, parallel)
        before = bytes_of(begun)
        table = {"rank": 2, "base": base, "trained": ["blocks.*.bias"]}
        init = {"init": str(folder / "base")}
        resumed = run_of(world, folder / base, table, init, parallel)
        resumed.resume()
        found[base] = before, held, state(resumed), gradients_of(resumed)
    return found


@pytest.fixture(scope="module")
def quantized_runs(runs):
    folder, *_ = runs
    [alone] = on_ranks(1, quantized_alone, folder)
    return folder, alone, on_ranks(2, quantized_on_ranks, folder)


@pytest.mark.parametrize("base", BASES)
def test_a_quantized_base_is_encoded_alike_on_every_layout(quantized_runs, base):
    folder, alone, ranks = quantized_runs
    codes, weights = weight_codes(base, CPU), dict(load(folder / "base").network.named_parameters())
    expected = alone[base][0]
    assert len(expected) == 16
    for name, held in expected.items():
        size = codes.block(weights[name].shape[1])
        assert torch.equal(held, codes.encode(weights[name].detach(), size))
    found = ranks[0][base][0] | ranks[1][base][0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], held) for name, held in expected.items())


@pytest.mark.parametrize("base", BASES)
def test_loading_a_quantized_base_never_holds_the_weights(quantized_runs, base):
    _, alone, ranks = quantized_runs
    codes = weight_codes(base, CPU)
    sizes = [codes.shape_of(held.shape).numel() for held in alone[base][0].values()]
    for found in (alone, *ranks):
        held = found[base][1]
        # One weight in fp32 and what encoding it takes; all of them in bf16 are more.
        assert 4 * max(sizes) <= held < 2 * sum(sizes), held


@pytest.mark.parametrize("base", BASES)
def test_a_quantized_run_resumes_on_another_layout_with_the_same_bits(quantized_runs, base):
    _, alone, ranks = quantized_runs
    _, _, saved, (loss, gradients) = alone[base]
    found, grads = {}, {}
    for each in ranks:
        found |= each[base][2]
        grads |= each[base][3][1]
        assert each[base][3][0] == pytest.approx(loss, rel=1e-6)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert_same_gradients(grads, gradients, 1e-6)


@pytest.mark.parametrize("base", BASES)
def test_a_loaded_quantized_run_has_its_base_decoded_and_the_adapters_merged(quantized_runs, base):
    folder, alone, _ = quantized_runs
    network = load(folder / base, weights="model").network
    saved, codes = alone[base][2], weight_codes(base, CPU)
    for name, held in alone[base][0].items():
        a, b = (saved[f"model.{name.removesuffix('weight')}{part}"] for part in (lora.A, lora.B))
        expected = codes.decode(held).double() + b.double() @ a.double()
        torch.testing.assert_close(
            network.get_parameter(name).double(), expected, rtol=1e-6, atol=0
        )


def test_a_base_in_another_format_is_refused(quantized_runs, tmp_path):
    folder, *_ = quantized_runs
    given = {"rank": 2, "base": "float8", "trained": ["blocks.*.bias"]}
    [message] = on_ranks(1, refused, tmp_path / "new", given, folder / "int8")
    assert '[lora] base="float8", but the frozen weights of' in message
    assert 'are "int8". Set base = "int8", or start a new run' in message


def test_adapters_are_never_left_out_silently(runs, tmp_path):
    folder, *_ = runs
    [message] = on_ranks(1, refused, tmp_path / "new", {}, folder / "tp")
    assert "has adapters that [lora] does not: blocks.0." in message
    assert "--checkpoint.init" in message
    [message] = on_ranks(1, refused, tmp_path / "new", NARROW, folder / "base")
    assert "does not have all adapters of [lora]: blocks.0." in message
    assert "--checkpoint.init" in message


def started(world, folder, source):
    trainer = run_of(world, folder, {}, {"init": str(source)})
    trainer.resume()
    return {name: whole(p) for name, p in trainer.parameters.items()}


def all_cases(world, cases):
    return [measured(world, *case) for case in cases]


def by_theory(world, table, layers):
    """Loss and gradients of the adapters, from those of whole weights W + alpha / rank B A."""
    bare = {key: value for key, value in table.items() if key == "network"}
    adapted, plain = (trainer_of(world, given, layers=layers) for given in (table, bare))
    fill(adapted)
    weights = decoded(adapted)
    pairs = list(lora.pairs(weights))
    scale = table.get("alpha", table["rank"]) / table["rank"]
    with torch.no_grad():
        for name, parameter in plain.parameters.items():
            parameter.copy_(weights[name])
        for name, a, b in pairs:
            plain.parameters[name].add_(scale * weights[b] @ weights[a])
    loss, whole_gradients = gradients(plain)
    trained = {n for n in whole_gradients if matches(n, table.get("trained", ()))}
    found = {name: whole_gradients[name] for name in trained}
    for name, a, b in pairs:
        found[a] = scale * weights[b].T @ whole_gradients[name]
        found[b] = scale * whole_gradients[name] @ weights[a].T
    return loss, found


def references(world, keys):
    """Those of one process by `key_of`; then those by theory of each table, without a pipeline."""
    found = {}
    for number, layers in keys:
        table = (TABLES + DROPPED)[number]
        found[number, layers] = measured(world, table, {}, {}, False, layers=layers)
    return found, [by_theory(world, table, layers_for({})) for table in TABLES]


def key_of(table, parallel):
    """(number in TABLES + DROPPED, number of layers)."""
    return (TABLES + DROPPED).index(table), layers_for(parallel)


@pytest.fixture(scope="module")
def expected(request):
    cases = CASES + (LONG_ON_TWO + LONG if request.config.getoption("--long") else [])
    keys = {key_of(*case[:2]) for case in cases} | {key_of(table, {}) for table in TABLES}
    [found] = on_ranks(1, references, sorted(keys))
    return found


def test_gradients_of_one_process_are_those_of_theory(expected):
    alone, theory = expected
    for table, (by_hand, wanted) in zip(TABLES, theory, strict=True):
        loss, found = alone[key_of(table, {})]
        assert loss == pytest.approx(by_hand, rel=1e-12)
        assert_same_gradients(found, wanted, 1e-12)


def switched_off(world):
    """Losses of a training step and of an evaluation, with dropout and without."""
    found = []
    for table in (WIDE_DROP, WIDE):
        trainer = trainer_of(world, table)
        randomize(trainer.parameters)
        batch = next(trainer.batches())
        rng = torch_rng(trainer, batch)
        step = trainer.executor.step(trainer.built.prepare(batch, rng)).item()
        evaluated = trainer.executor.evaluate(trainer.objective.prepare(batch, rng))
        found.append((step, evaluated))
        part = trainer.executor.model
        numbers = {n: int(b) for n, b in part.named_buffers() if n.endswith(NUMBER)}
        assert numbers == {n: layer_number(n.removesuffix(f".{NUMBER}")) for n in numbers}
        assert bool(numbers) == (table is WIDE_DROP)
    # Weights in bf16 beside codes, and beside the layers that a network keeps in fp32.
    for table, dtype in ((INT8 | DROPOUT, "bf16"), (WAN, "fp32")):
        precision = {"weights": "bf16", "dtype": dtype}
        trainer = trainer_of(world, table, precision=precision)
        kinds = {p.dtype for p in trainer.parameters.values()}
        assert kinds == {torch.bfloat16, torch.uint8 if table != WAN else torch.float32}
        batch = next(trainer.batches())
        prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
        assert trainer.executor.step(prepared).isfinite()
    return found


def test_evaluations_have_no_dropout_and_layers_have_numbers_of_their_own():
    [((dropped, one), (plain, other))] = on_ranks(1, switched_off)
    assert torch.equal(one, other)
    assert dropped != pytest.approx(plain, rel=1e-3)


def check(num_ranks, cases, expected):
    by_rank = on_ranks(num_ranks, all_cases, cases)
    for number, (table, parallel, _, compiled, *_) in enumerate(cases):
        loss, wanted = expected[0][key_of(table, parallel)]
        found = {}
        for ranks in by_rank:
            assert ranks[number][0] == pytest.approx(loss, rel=1e-6), parallel
            found |= ranks[number][1]
        # The graphs of torch 2.11 round to fp32, with and without adapters.
        rounds = compiled and torch.__version__ < "2.12"
        assert_same_gradients(found, wanted, 1e-6 if rounds else 1e-10)


def test_every_layout_has_the_gradients_of_one_process(expected):
    check(2, CASES, expected)


@pytest.mark.long
def test_mixed_layouts_have_the_gradients_of_one_process(expected):
    check(2, LONG_ON_TWO, expected)
    check(4, LONG, expected)
