"""The dry run against theory, and from the command line."""

from concurrent.futures import ProcessPoolExecutor

import commands
import forked
import pytest
import torch
from tiny import tiny_config
from tiny_gpt import gpt_config

from titan_dit.config import catalog, config_file
from titan_dit.config.config_file import CONFIG_DIR
from titan_dit.config.section import UserError
from titan_dit.dry_run import report
from titan_dit.dry_run.command import dry_run, smallest_world
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.dry_run.memory import MemoryLog, StorageKind
from titan_dit.dry_run.pipeline import microbatches_to_run
from titan_dit.plan import resolve

GIB = 2**30
B, H, LAYERS, TOKENS = 8, 128, 4, 256  # samples of a microbatch, width, layers, tokens
MODEL = {"hidden_size": H, "num_layers": LAYERS, "num_heads": 8, "latent_size": 32}


@pytest.fixture(scope="module", autouse=True)
def elsewhere():
    """Run in another process: the shape checks of the tests reject sharded tokens."""
    global fake_report
    with ProcessPoolExecutor(1, forked.context()) as pool:

        def fake_report(config, world, **which):
            return pool.submit(take_fake_step, *parts_of(config, world), **which).result()

        yield


def parts_of(config, world):
    """Arguments of a fake_rank from a config, with matching data."""
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    sections = config.training, config.optimizer, config.ema
    return resolve(config, world), objective, fields, *sections


def small(world=1, batch=B, **sections):
    """Dry-run a bf16 DiT whose blocks dominate embedding and head."""
    sections["training"] = {"global_batch_size": batch} | sections.get("training", {})
    sections.setdefault("precision", {"dtype": "bf16"})
    return fake_report(tiny_config(model=MODEL, **sections), world)


def sent(rank, axis, *operations):
    """Bytes of some operations on an axis."""
    return sum(rank.traffic.bytes[axis, operation] for operation in operations)


RUNTIME = "runtime torch's Schedule1F1B: within 2% of the own loop's step (simulated)"


def test_state_is_exact_and_activations_are_those_of_the_design():
    [rank] = small().ranks
    bytes_of, whole = rank.peak.bytes, small().num_parameters
    assert rank.parameters == whole
    assert bytes_of[StorageKind.PARAMETERS] == 4 * whole
    # Two moments, and a step count for every parameter.
    assert 8 * whole <= bytes_of[StorageKind.OPTIMIZER] < 8 * whole + 4 * 100
    assert bytes_of[StorageKind.EMA] == 2 * 4 * whole  # two decays
    # 20.05 h bf16 elements per token and layer, plus embedding and head.
    theory = 20.05 * H * 2 * B * TOKENS * LAYERS
    assert theory * 0.98 < bytes_of[StorageKind.ACTIVATIONS] < theory * 1.15


def test_weights_in_bf16_take_two_bytes_and_have_no_fp32_copy():
    precision = {"dtype": "bf16", "weights": "bf16"}
    [rank] = small(precision=precision, optimizer={"name": "adamw8bit"}).ranks
    bytes_of, whole = rank.peak.bytes, rank.parameters
    assert bytes_of[StorageKind.PARAMETERS] == 2 * whole
    assert 2 * whole < bytes_of[StorageKind.OPTIMIZER] < 2.5 * whole
    assert bytes_of[StorageKind.EMA] == 2 * 4 * whole
    # At the end of the step: gradients in bf16, and what a piece of them takes in fp32.
    ended = small(batch=1, precision=precision).ranks[0].peak
    assert ended.bytes[StorageKind.GRADIENTS] <= 2 * whole
    assert ended.bytes[StorageKind.TEMPORARY] <= 8 * whole + GIB / 64


def test_offloaded_activations_are_those_of_two_blocks():
    [whole], [rank] = (small(offload={"activations": on}).ranks for on in (False, True))
    kinds = StorageKind.ACTIVATIONS, StorageKind.HOST, StorageKind.TEMPORARY
    before, left, host, work = whole.peak.bytes[kinds[0]], *(rank.peak.bytes[k] for k in kinds)
    assert whole.peak.bytes[StorageKind.HOST] == 0
    block = 20.05 * H * 2 * B * TOKENS
    # Tensors below 256 KiB stay; buffers are powers of two.
    assert 0.9 * LAYERS * block < host < 2 * LAYERS * block
    assert left + work < before
    assert rank.peak.total < whole.peak.total - 1.5 * block


def test_offloaded_parameters_leave_the_device_with_their_state():
    [whole], [rank] = (small(batch=1, offload={"parameters": on}).ranks for on in (False, True))
    state = [StorageKind.PARAMETERS, StorageKind.OPTIMIZER, StorageKind.EMA]
    assert [rank.peak.bytes[kind] for kind in (*state, StorageKind.GRADIENTS)] == [0] * 4
    held = sum(whole.peak.bytes[kind] for kind in state)
    assert held <= rank.peak.bytes[StorageKind.HOST] < held + 12 * whole.parameters
    assert rank.peak.total < whole.peak.total - held


def test_the_memory_of_one_rank_is_that_of_a_step_of_all():
    config = tiny_config(
        model=MODEL,
        parallel={"pp": 2, "dp_shard": 2},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 16, "microbatch_size": 2},
    )
    every, [last] = fake_report(config, 4).ranks, fake_report(config, 4, ranks=(1,)).ranks
    assert (last.rank, last.peak) == (every[1].rank, every[1].peak)


def test_muon_has_one_momentum_and_frozen_parameters_have_no_state():
    muon = {"name": "muon", "groups": [{"pattern": "embed.*", "frozen": True}]}
    [rank] = small(optimizer=muon).ranks
    with torch.device("meta"):
        named = dict(tiny_config(model=MODEL).model.spec().build().named_parameters())
    own = sum(p.numel() for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2)
    others = sum(p.numel() for n, p in named.items() if not n.startswith("embed.")) - own
    state = rank.peak.bytes[StorageKind.OPTIMIZER]
    assert 4 * own + 8 * others <= state < 4 * own + 8 * others + 4 * 100


def test_float8_weights_have_the_memory_of_their_numbers_alone():
    float8 = {"dtype": "bf16", "float8": "tensorwise", "float8_layers": "all"}
    kept = {"reshard_after_forward": "never"}
    [plain], [rank] = (
        small(2, 2 * B, precision=own, parallel=kept).ranks for own in ({"dtype": "bf16"}, float8)
    )
    for kind in (StorageKind.PARAMETERS, StorageKind.OPTIMIZER, StorageKind.EMA):
        assert rank.peak.bytes[kind] == plain.peak.bytes[kind], kind
    # A byte instead of two for 12 h^2 weights of each block.
    saved = plain.peak.bytes[StorageKind.GATHERED] - rank.peak.bytes[StorageKind.GATHERED]
    assert saved == pytest.approx(LAYERS * 12 * H**2, rel=0.01)
    assert plain.notes == ()
    [note] = rank.notes
    assert note == f"float8  tensorwise in {4 * LAYERS} of {4 * LAYERS} block linears of this rank"


def test_the_report_says_that_no_layer_is_in_float8():
    found = small(2, 2 * B, precision={"dtype": "bf16", "float8": "tensorwise"})
    [line] = [line for line in report.lines(found) if line.startswith("float8")]
    assert "in 0 of" in line
    assert 'float8_layers = "all"' in line


def test_the_copy_of_a_tied_weight_has_memory_and_messages_but_no_state():
    tied = fake_report(gpt_config(parallel={"pp": 2}, training={"microbatch_size": 4}), 2)
    first, last = tied.ranks
    assert first.parameters + last.parameters == tied.num_parameters
    table, stream = 4 * 256 * 32, 4 * 4 * 16 * 32  # 256 rows; 4 samples of 16 tokens; fp32.
    assert first.peak.bytes[StorageKind.PARAMETERS] == 4 * first.parameters
    assert last.peak.bytes[StorageKind.PARAMETERS] == 4 * last.parameters + table
    for rank in tied.ranks:
        assert rank.peak.bytes[StorageKind.EMA] == 4 * rank.parameters
        assert rank.peak.bytes[StorageKind.OPTIMIZER] < 8 * rank.parameters + 4 * 100
        assert sent(rank, "pp", "send") == 2 * stream + table


def test_fsdp_gathers_twice_and_reduces_once():
    d = 4
    for reshard, gathers in (("always", 2), ("never", 1)):
        result = small(d, batch=d * B, parallel={"reshard_after_forward": reshard})
        [rank], whole = result.ranks, result.num_parameters
        # FSDP pads the rows of every parameter.
        assert rank.peak.bytes[StorageKind.PARAMETERS] == 4 * rank.parameters
        assert rank.parameters == pytest.approx(whole / d, rel=0.01)
        share = whole * (d - 1) / d
        assert sent(rank, "dp_shard", "all-gather") == pytest.approx(2 * gathers * share, rel=0.02)
        assert sent(rank, "dp_shard", "reduce-scatter") == pytest.approx(4 * share, rel=0.02)


def test_replicas_all_reduce_their_shards():
    result = small(4, batch=4 * B, parallel={"dp_replicate": 2})
    [rank] = result.ranks
    shard = 4 * result.num_parameters / 2
    assert sent(rank, "dp_replicate", "all-reduce") == pytest.approx(shard, rel=0.02)


def test_tensor_parallel_ranks_send_what_megatron_says():
    t, tokens = 4, B * TOKENS
    result = small(t, parallel={"tp": t})
    [rank] = result.ranks
    theory = 8 * (t - 1) / t * tokens * H * 2 * LAYERS
    # The rest: modulation vectors, and tokens of embedding and head.
    measured = sent(rank, "tp", "all-gather", "reduce-scatter")
    assert theory < measured < 1.25 * theory
    one = small().ranks[0].peak.bytes[StorageKind.ACTIVATIONS]
    assert rank.peak.bytes[StorageKind.ACTIVATIONS] < 0.4 * one


@pytest.mark.parametrize(("method", "elements"), [("ring", 6), ("ulysses", 8)])
def test_context_parallel_ranks_send_what_the_papers_say(method, elements):
    c = 4
    [rank] = small(c, parallel={"cp": c, "cp_method": method}).ranks
    tokens = B * TOKENS * H * LAYERS
    if method == "ring":
        # Six tensors; the two gradients are sums over ring steps, sent in fp32.
        theory = (c - 1) / c * tokens * (4 * 2 + 2 * 4)
        measured = sent(rank, "cp", "ring")
    else:
        theory = elements * (c - 1) / c**2 * tokens * 2
        measured = sent(rank, "cp", "all-to-all")
    assert measured == pytest.approx(theory)


def test_every_stage_has_its_turn_and_sends_its_stream():
    p, m = 2, 6
    result = small(p, batch=m * B, parallel={"pp": p}, training={"microbatch_size": B})
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert [rank.layers for rank in result.ranks] == [(range(2),), (range(2, 4),)]
    assert sum(rank.parameters for rank in result.ranks) == result.num_parameters
    assert sum(rank.flops for rank in result.ranks) == pytest.approx(
        result.flops_per_sample * m * B
    )
    # 1F1B: the first stage holds two microbatches, the last one.
    assert (result.num_microbatches, result.num_run) == (m, p + 1)
    first, last = (rank.peak.bytes[StorageKind.ACTIVATIONS] for rank in result.ranks)
    assert 1.6 < first / last < 2.2
    stream = 2 * (B * TOKENS * H + B * H)
    for rank in result.ranks:
        assert sent(rank, "pp", "send") == m * stream
        assert rank.idle == pytest.approx((p - 1) / (m + p - 1), rel=0.05)


def test_fewer_microbatches_tell_what_all_of_them_take():
    sections = {"parallel": {"pp": 2}, "training": {"microbatch_size": 1}}
    plan = resolve(tiny_config(model=MODEL, **sections), 2)
    # Two are in flight; with the gradients of an earlier one there are three.
    assert microbatches_to_run(plan, 100) == (1, 3)
    several = small(2, batch=6, **sections)
    # Without extrapolation the traffic is the measured one.
    exact = small(2, batch=3, **sections)
    for some, few in zip(several.ranks, exact.ranks, strict=True):
        assert sent(some, "pp", "send") == 2 * sent(few, "pp", "send")
        for kind in set(StorageKind) - {StorageKind.INPUTS}:
            assert some.peak.bytes[kind] == few.peak.bytes[kind], kind


@pytest.mark.parametrize(
    ("schedule", "run"),
    [
        pytest.param("gpipe", 8, marks=pytest.mark.long),
        pytest.param("interleaved_zero_bubble", 6, marks=pytest.mark.long),
        ("zbv_zero_bubble", 5),
        ("dualpipev", 5),
    ],
)
def test_every_schedule_is_rehearsed(schedule, run):
    pipeline = {"schedule": schedule}
    if schedule.startswith("interleaved"):
        pipeline["virtual_stages"] = 2
    result = small(
        2, batch=8, parallel={"pp": 2}, pipeline=pipeline, training={"microbatch_size": 1}
    )
    assert len(result.ranks) == 2
    assert result.num_run == run
    # Stage boundaries between ranks; the middle one of a V is inside a rank.
    boundaries = {"gpipe": 1, "interleaved_zero_bubble": 3}.get(schedule, 2)
    stream = 2 * (TOKENS * H + H)
    assert sum(sent(rank, "pp", "send") for rank in result.ranks) == 2 * 8 * boundaries * stream


def test_the_log_follows_storages():
    with MemoryLog() as log:
        log.begin()
        with log.phase("making", StorageKind.ACTIVATIONS):
            kept = torch.zeros(1000)
            gone = torch.zeros(3000)
            del gone
            view = kept[:10]
        with log.phase("growing", StorageKind.TEMPORARY):
            more = torch.zeros(500)
            more.untyped_storage().resize_(16000)
        assert log.live()[StorageKind.ACTIVATIONS] == 4000
        assert view.untyped_storage().nbytes() == 4000
    peak = log.peak()
    assert (peak.total, peak.phase) == (20000, "growing")
    assert peak.bytes[StorageKind.TEMPORARY] == 16000


TP4_PP4 = ("--parallel.dp_replicate", "1", "--parallel.tp", "4", "--parallel.pp", "4")


@pytest.mark.long
@pytest.mark.parametrize("world", [16, 1024])
def test_a_7b_is_rehearsed_on_a_laptop(world, tmp_path):
    flags = ("--dry-run", *TP4_PP4) if world == 16 else ("--dry-run", world, *TP4_PP4)
    done, used = commands.measured(
        commands.train_command(*flags, config="dit_7b"), tmp_path, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert all("  ETA " in line for line in done.stderr.splitlines())
    # CPU seconds, because wall time depends on the load of the machine.
    assert used.ru_utime < 60
    assert used.ru_maxrss < 2**20
    text = done.stdout
    for words in ("7,304,869,904 parameters", f"{world} ranks", "pp 4 x", "tp 4", "idle", RUNTIME):
        assert words in text
    for first_rank in range(0, world, world // 4):
        assert any(line.split()[:1] == [str(first_rank)] for line in text.splitlines())
    *_, verdict, simpler = text.splitlines()
    assert verdict.startswith("a device needs ")
    assert simpler.startswith(f"simpler {SIMPLER[world]} needs ")
    assert list(tmp_path.iterdir()) == []


SIMPLER = {16: "dp_shard 16", 1024: "dp_replicate 8 x dp_shard 128"}


@pytest.mark.long
def test_the_7b_on_1024_ranks_leaves_half_of_a_gpu_free():
    result = fake_report(config_file.load(["--config", "dit_7b"], catalog.variant), 1024)
    assert 20 * GIB < result.peak < 50 * GIB


@pytest.mark.parametrize(("world", "words"), [(24, "multiple of 16"), (48, "size=1024 does not")])
def test_worlds_that_do_not_fit_are_answered_as_a_launch_would_be(world, words):
    config = config_file.load(["--config", "dit_7b", *TP4_PP4], catalog.variant)
    with pytest.raises(UserError, match=words):
        dry_run(config, world)


# A recipe of every kind; ./run_tests.sh --long has all.
SHORT = "bert_large", "digits", "dit_7b", "dit_xl2_256", "gpt2_124m", "gpt_2304x24", "sit_xl2"
OTHERS = [path.stem for path in sorted(CONFIG_DIR.glob("*.toml")) if path.stem not in SHORT]
RECIPES = [(name, ()) for name in SHORT]
RECIPES += [("dit_7b", TP4_PP4), ("digits", ("--optimizer.fused", "false"))]
LARGE = [
    *((name, ()) for name in OTHERS),
    ("dit_7b", (*TP4_PP4[:2], "--parallel.tp", "8", "--parallel.pp", "2")),
    ("dit_7b", (*TP4_PP4[:2], "--parallel.tp", "2", "--parallel.pp", "8")),
    (
        "dit_3b",
        ("--parallel.cp", "1", "--parallel.pp", "8", "--activation_checkpoint.mode", "full"),
    ),
]
RECIPES += [pytest.param(*recipe, marks=pytest.mark.long) for recipe in LARGE]


@pytest.mark.parametrize(("name", "flags"), RECIPES)
def test_every_recipe_passes(name, flags):
    """A recipe with its own layout and the fewest layers that its stages need."""
    config = config_file.load(["--config", name, *flags], catalog.variant)
    pp = config.parallel.pp
    per_rank = config.pipeline.virtual_stages
    tables = config_file.to_tables(config)
    tables["model"] |= {"size": None, "num_layers": max(2, pp * per_rank)}
    tables["model"] = {k: v for k, v in tables["model"].items() if v is not None}
    config = config_file.build(tables, catalog.variant)
    world = smallest_world(config.parallel)
    if config.parallel.dp_shard == -1:
        world *= 2
    result = fake_report(config, world)
    assert len(result.ranks) == pp
    text = list(report.lines(result))
    assert text[0].startswith(f"dry run of {name}: {world} rank")
    assert all(rank.peak.total > 0 for rank in result.ranks)
    assert config.compile.enabled == any("without torch.compile" in line for line in text)
    for axis in ("pp", "tp"):
        size = getattr(config.parallel, axis)
        assert (f"{axis} {size}" in text[0]) == (size > 1)
    for first_rank in range(0, world, world // pp) if pp > 1 else ():
        assert any(line.split()[:1] == [str(first_rank)] for line in text)
    assert text[-1].startswith("a device needs ")
