"""Muon, and groups with frozen parameters, train a DiT in every layout as one process does."""

from fnmatch import fnmatchcase

import pytest
import torch
from harness import on_ranks
from test_grid import COPIES, CP, DP, HSDP, PP, TP, ULYSSES, schedule
from tiny import randomize, tiny_config, whole

from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(900)

MUON = {"name": "muon", "lr": 1e-3, "ns_dtype": "fp32"}
FROZEN = ("embed.*", "blocks.1.*", "blocks.2.attn.qkv.weight")
GROUPED = MUON | {
    "groups": [{"pattern": pattern, "frozen": True} for pattern in FROZEN]
    + [{"pattern": "head.*", "lr_factor": 0.5, "weight_decay": 0.0}]
}
LION = {"name": "examples.lion:LionConfig", "weight_decay": 0.1}
PRODIGY = {"name": "examples.prodigy:ProdigyConfig", "d0": 1e-4, "weight_decay": 0.1}
ADAFACTOR = {"name": "examples.adafactor:AdafactorConfig", "lr": 1e-2, "weight_decay": 0.1}
QUANTIZED = {
    bits: {"name": f"small_blocks:{bits}", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    for bits in ("Small8bit", "Small4bit", "SmallFp8")
}
EIGHT, FOUR, FP8 = QUANTIZED.values()
ZERO_BUBBLE = schedule("zbv_zero_bubble")
IN_BF16 = {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-6}
"""AdamW over weights in bf16."""
KINDS = [MUON, GROUPED, LION, PRODIGY, ADAFACTOR, EIGHT, FOUR, FP8, IN_BF16]
CASES = {
    2: [
        (DP, {}, MUON),
        (TP, {}, GROUPED),
        (PP, ZERO_BUBBLE, GROUPED),
        (TP, {}, EIGHT),
        (DP, {}, FOUR),
        (PP, ZERO_BUBBLE, PRODIGY),
        (TP, {}, IN_BF16),
        (PP, ZERO_BUBBLE, IN_BF16),
    ],
    4: [
        (HSDP, {}, GROUPED),
        (DP | TP, {}, EIGHT),
        (DP | TP, {}, ADAFACTOR),
        (DP | TP, {}, IN_BF16),
    ],
}
# For ./run_tests.sh --long: layouts of GROUPED, then other optimizers.
LONG = {
    2: [(COPIES, {}), (CP, {}), (ULYSSES, {}), (PP, schedule("1f1b"))],
    4: [(DP | CP, {}), (TP | CP, {}), (DP | PP, ZERO_BUBBLE), (TP | PP, ZERO_BUBBLE)],
    8: [(PP | DP | TP, schedule("interleaved_1f1b", 2)), (HSDP | TP, {}), (DP | CP | TP, {})],
}
OTHERS = {
    2: [
        (PP, ZERO_BUBBLE, ADAFACTOR),
        (CP, {}, MUON),
        (TP, {}, FP8),
        (CP, {}, EIGHT),
        (PP, ZERO_BUBBLE, FOUR),
    ],
    4: [
        (DP | TP, {}, PRODIGY),
        (DP | TP, {}, MUON),
        (DP | TP, {}, LION),
        (DP | TP, {}, FOUR),
        (HSDP, {}, EIGHT),
    ],
    8: [(PP | DP | TP, schedule("interleaved_1f1b", 2), EIGHT), (HSDP | TP, {}, FP8)],
}
STEPS = 2


def trained(world, parallel, pipeline, optimizer):
    """Weights before and after some steps, averages and optimizer's states; all whole."""
    config = tiny_config(
        model={"num_layers": 4},
        parallel=parallel,
        pipeline=pipeline,
        optimizer=optimizer,
        ema={"decays": [0.9]},
        precision={"weights": "bf16"} if optimizer == IN_BF16 else {},
        training={"global_batch_size": 8, "microbatch_size": 1 if parallel.keys() & HSDP else 2},
        # A split backward does not recompute blocks.
        activation_checkpoint={
            "mode": "full" if "tp" in parallel and "pp" not in parallel else "none"
        },
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    trainer.ema.restart()
    batches = trainer.batches()
    before = {name: whole(p) for name, p in trainer.parameters.items()}
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(next(batches))
    tensors = trainer.tensors()
    found = {name: whole(p) for name, p in tensors["model"].items()}
    average = {name: whole(p) for name, p in tensors["ema"]["0.9"].items()}
    return before, found, average, states_of(trainer)


def states_of(trainer):
    """The optimizer's tensors, whole, by parameter and key."""
    named = trainer.tensors()["optimizer"].items()
    found = {name: {key: whole(value) for key, value in state.items()} for name, state in named}
    in_bf16 = {n: p for n, p in trainer.parameters.items() if p.dtype == torch.bfloat16}
    for name, parameter in in_bf16.items():
        found[name]["weight"] = whole(parameter)
    return found


def all_cases(world, cases):
    return [trained(world, *case) for case in cases]


def moved(world, folder, optimizer):
    """States, whole: saved over dp_shard 2, loaded over tp 2, and before that."""
    found = []
    for parallel in (DP, TP):
        precision = {"weights": "bf16"} if optimizer == IN_BF16 else {}
        config = tiny_config(
            parallel=parallel, optimizer=optimizer, precision=precision, job={"dir": folder}
        )
        trainer = Trainer(config, world)
        if parallel is DP:
            randomize(trainer.parameters)  # Gates of 0 would leave most momenta at 0.
            trainer.open_run_directory()
            batches = trainer.batches()
            for trainer.step in (1, 2):
                trainer.train_step(next(batches))
            trainer.save()
            trainer.checkpoints.finish()
        else:
            found.append(states_of(trainer))
            trainer.resume()
        found.append(states_of(trainer))
    return found


def all_and_moved(world, cases, folder):
    kinds = {"momentum_buffer": MUON, "exp_avg_scale": FOUR, "exp_avg": IN_BF16}
    kinds = kinds if world.size == 2 else {}
    found = {key: moved(world, f"{folder}/{key}", kind) for key, kind in kinds.items()}
    return all_cases(world, cases), found


@pytest.fixture(scope="module")
def references():
    return on_ranks(1, all_cases, [({}, {}, kind) for kind in KINDS])[0]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """By number of ranks, what every rank found in CASES, and what was loaded in another layout."""
    folder = str(tmp_path_factory.mktemp("moved"))
    return {size: on_ranks(size, all_and_moved, cases, folder) for size, cases in CASES.items()}


@pytest.mark.parametrize("num_ranks", CASES)
def test_steps_are_those_of_one_process(num_ranks, references, launched):
    check_steps([found for found, _ in launched[num_ranks]], CASES[num_ranks], references)


def test_replicas_have_the_same_weights_and_states_to_the_bit(launched):
    """Each rank has gathered those of its own replica."""
    number = [parallel for parallel, *_ in CASES[4]].index(HSDP)
    (_, weights, _, states), *others = [found[number] for found, _ in launched[4]]
    assert len(others) == 3
    assert any("momentum_buffer" in state for state in states.values())
    for _, other_weights, _, other_states in others:
        for name, values in weights.items():
            assert torch.equal(other_weights[name], values), name
        for name, state in states.items():
            for key, values in state.items():
                assert torch.equal(other_states[name][key], values), (name, key)


# Muon takes the blocks' matrices; codes take those of embed, too.
@pytest.mark.parametrize(
    ("key", "count"), [("momentum_buffer", 15), ("exp_avg_scale", 19), ("exp_avg", 41)]
)
def test_states_are_saved_over_dp_shard_and_loaded_over_tp_to_the_bit(launched, key, count):
    for _, found in launched[2]:
        saved, before, loaded = found[key]
        assert saved.keys() == loaded.keys()
        momenta = [name for name, state in saved.items() if key in state]
        assert len(momenta) == count
        for name, state in saved.items():
            for part, values in state.items():
                assert part == "weight" or not before[name][part].any()
                assert torch.equal(loaded[name][part], values), (name, part)
        assert all(saved[name][key].any() for name in momenta)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", LONG)
def test_steps_of_muon_and_groups_are_those_of_one_process_in_every_layout(num_ranks, references):
    cases = [(*layout, GROUPED) for layout in layouts(num_ranks)] + OTHERS.get(num_ranks, [])
    check_steps(on_ranks(num_ranks, all_cases, cases), cases, references)


def layouts(num_ranks):
    """([parallel], [pipeline]) of all cases, each once."""
    found = LONG.get(num_ranks, []) + [case[:2] for case in CASES.get(num_ranks, [])]
    return [layout for i, layout in enumerate(found) if layout not in found[:i]]


def check_steps(by_rank, cases, references):
    """That weights are within 1e-5 of one process, and frozen ones have not moved.

    With quantised moments a rounding may give an element the next code: of 10,000 elements at most
    five may be 2e-6 off, in none by more than a tenth of the steps.
    """
    for number, (parallel, _, optimizer) in enumerate(cases):
        _, expected, _, expected_states = references[KINDS.index(optimizer)]
        seen, frozen = {}, set(frozen_of(expected) if optimizer is GROUPED else ())
        for ranks in by_rank:
            before, found, _, states = ranks[number]
            assert not frozen & set(states)
            for name in frozen & set(found):
                assert torch.equal(found[name], before[name]), f"{parallel} {name}"
            if optimizer is IN_BF16:
                assert {w.dtype for w in found.values()} == {torch.bfloat16}
                found = {name: w.float() for name, w in found.items()}
            if optimizer is PRODIGY:
                name = next(iter(states))
                numerator = expected_states[name]["numerator"]
                assert numerator != 0
                # Sums over all ranks of a number for each replica.
                other = states[name]["numerator"]
                torch.testing.assert_close(other, numerator, rtol=1e-3, atol=0)
            seen |= found
        if optimizer is IN_BF16:
            expected = {name: w.float() for name, w in expected.items()}
        assert seen.keys() == expected.keys()
        # The true gradient of the keys' bias is 0, and AdamW makes steps of its rounding.
        off = {n: (w - expected[n]).abs() for n, w in seen.items() if "attn.qkv.bias" not in n}
        if optimizer is IN_BF16:
            check_neighbours(off, expected)
            continue
        is_quantized = optimizer in QUANTIZED.values()
        for name, values in off.items():
            assert values.max() <= (3e-5 if is_quantized else 1e-5), f"{parallel} {name}"
        if is_quantized:
            total = torch.cat([values.flatten() for values in off.values()])
            assert (total > 2e-6).double().mean() < 5e-4, f"{parallel} {optimizer}"


def check_neighbours(off, expected):
    """That few bf16 weights are another number than in one process, and then the next one.

    A sum that is ordered otherwise may round a gradient to another bf16 number, and that a weight.
    """
    for name, values in off.items():
        spacing = 2.0**-7 * expected[name].abs().clamp(min=1e-3)
        assert (values <= 1.01 * spacing).all(), name
    total = torch.cat([values.flatten() for values in off.values()])
    assert (total > 0).double().mean() < 2e-3


def frozen_of(names):
    """The names that GROUPED freezes."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in FROZEN)]


def test_frozen_parameters_stay_and_have_no_state(references):
    before, found, average, states = references[1]
    frozen = frozen_of(found)
    assert len(frozen) > 10
    for name, values in found.items():
        is_frozen = name in frozen
        assert torch.equal(values, before[name]) == is_frozen, name
        assert (name in states) != is_frozen, name
        assert (name in average) != is_frozen, name


def digits(world, cases):
    """The mean loss of the first and the last ten steps."""
    found = []
    for parallel, pipeline in cases:
        size = {"microbatch_size": 4} if "pp" in parallel else {}
        config = tiny_config(
            model={"num_layers": 4},
            parallel=parallel,
            pipeline=pipeline,
            optimizer={"name": "muon", "lr": 3e-3},
            training={"steps": 60, "global_batch_size": 32} | size,
        )
        trainer = Trainer(config, world)
        losses, batches = [], trainer.batches()
        for trainer.step in range(1, 61):
            loss, _, _ = trainer.train_step(next(batches))
            losses.append(trainer.mesh.sum_loss(loss).item())
        found.append((sum(losses[:10]) / 10, sum(losses[-10:]) / 10))
    return found


@pytest.mark.long
def test_muon_trains_digits_in_every_layout():
    [[alone]] = on_ranks(1, digits, [({}, {})])
    assert alone[1] < 0.6 * alone[0]
    for num_ranks in LONG:
        cases = layouts(num_ranks)
        for losses, case in zip(on_ranks(num_ranks, digits, cases)[0], cases, strict=True):
            assert losses == pytest.approx(alone, rel=0.02), case


SMALL_STATES = [
    ({"name": "adamw"}, {}),
    ({"name": "adamw"}, {"weights": "bf16"}),
    ({"name": "adamw8bit"}, {"weights": "bf16"}),
    ({"name": "adamw4bit"}, {"weights": "bf16"}),
    ({"name": "adamw_fp8"}, {"weights": "bf16"}),
]


def losses_of_digits(world, kinds):
    """The mean loss of the last fifty of 400 steps, by kind."""
    found = []
    for optimizer, precision in kinds:
        config = tiny_config(
            model={"num_layers": 4, "hidden_size": 64},
            optimizer={"lr": 2e-3, "weight_decay": 0.0} | optimizer,
            precision=precision,
            training={"steps": 400, "global_batch_size": 32},
        )
        trainer = Trainer(config, world)
        losses, batches = [], trainer.batches()
        for trainer.step in range(1, 401):
            loss, _, _ = trainer.train_step(next(batches))
            losses.append(loss)
        found.append(torch.stack(losses[-50:]).mean().item())
    return found


@pytest.mark.long
def test_small_states_and_weights_learn_digits_as_fp32_does():
    [[whole, *small]] = on_ranks(1, losses_of_digits, SMALL_STATES)
    print(whole, *small)
    for loss, kind in zip(small, SMALL_STATES[1:], strict=True):
        assert loss == pytest.approx(whole, rel=0.01), kind
