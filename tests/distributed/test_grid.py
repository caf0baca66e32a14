"""Every axis, and mixes of two or three, give loss, gradients and predictions of one process."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from harness import on_ranks
from tiny import randomize, tiny_config, torch_rng, whole

from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.trainer import Trainer

# Eight ranks on two cores take their time.
pytestmark = pytest.mark.timeout(900)

FLOW, DDPM = {}, {"name": "ddpm", "min_snr_gamma": 5.0}
PP, TP, CP, DP = {"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
COPIES = {"dp_replicate": 2, "dp_shard": 1}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
PLAIN = {"tp": 2, "sequence_parallel": False}


def schedule(name, virtual_stages=1, **more):
    return {"schedule": name, "virtual_stages": virtual_stages, **more}


FOLDED = schedule("interleaved_1f1b", 2)
# [parallel], [pipeline], [objective], the mode of [activation_checkpoint] if any; all with microbatches of 2.
CASES = {
    2: [
        (DP, {}, DDPM),
        (COPIES, {}, FLOW),
        (TP, {}, FLOW),
        (PLAIN, {}, DDPM),
        (CP, {}, FLOW),
        (ULYSSES, {}, DDPM),
        (PP, schedule("1f1b", split=[2, 3]), DDPM),
        (PP, schedule("interleaved_zero_bubble", 2), FLOW),
        (PP, schedule("zbv_zero_bubble"), DDPM),
        (PP, schedule("dualpipev"), FLOW),
    ],
    4: [
        ({"pp": 4}, FOLDED, FLOW),
        ({"tp": 4}, {}, FLOW),
        (DP | CP, {}, DDPM),
        (TP | PP, schedule("dualpipev"), FLOW),
        (ULYSSES | PP, FOLDED, DDPM),
    ],
    8: [(PP | TP | CP, FOLDED, FLOW, "selective")],
}
# The whole grid, for ./run_tests.sh --long.
LONG = {
    2: [(PP, schedule("gpipe"), FLOW), (PP, FOLDED, FLOW)],
    4: [
        (HSDP, {}, DDPM),
        (DP | TP, {}, FLOW),
        (DP | PP, schedule("zbv_zero_bubble"), FLOW),
        (TP | CP, {}, DDPM),
        (COPIES | ULYSSES, {}, FLOW),
        ({"cp": 4}, {}, DDPM),
        ({"cp": 4, "cp_method": "ulysses"}, {}, FLOW),
        (COPIES | TP, {}, FLOW),
        (COPIES | CP, {}, FLOW),
        (COPIES | PP, schedule("interleaved_1f1b", 4), FLOW),
        (TP | ULYSSES, {}, FLOW),
        (PLAIN | PP, schedule("1f1b"), DDPM),
        (CP | PP, schedule("interleaved_zero_bubble", 2), FLOW),
    ],
    8: [
        (PP | TP | ULYSSES, schedule("zbv_zero_bubble"), DDPM, "attention"),
        (PP | DP | TP, schedule("dualpipev"), FLOW),
        (PP | DP | CP, schedule("1f1b"), DDPM, "full"),
        (DP | CP | TP, {}, DDPM, "attention"),
        (COPIES | ULYSSES | TP, {}, FLOW, "full"),
        (HSDP | TP, {}, FLOW, "selective"),
        (HSDP | CP, {}, FLOW),
        (HSDP | PP, schedule("interleaved_zero_bubble", 2), FLOW),
    ],
}
# Pairs that land with a GPT alone.
WITH_A_GPT = [{"dp_shard", "tp"}, {"dp_shard", "pp"}, {"tp", "cp"}]
# Where fp64 shows more; in the whole grid also in fp32.
IN_FP64 = [TP, CP, PP, TP | CP, CP | PP, HSDP, PP | TP | CP, DP | CP | TP]


def case_config(parallel, pipeline, objective, dtype="fp32", mode="none", layers=None):
    """As small as the layout allows: there are more ranks than cores."""
    data_ranks = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    return tiny_config(
        model={"layers": layers or layers_for(parallel, pipeline), "qk_norm": True},
        parallel=parallel,
        pipeline=pipeline,
        objective=objective,
        precision={"dtype": dtype},
        activation_checkpoint={"mode": mode},
        # Several microbatches on every rank, and as many as its schedule needs.
        training={
            "global_batch_size": 8,
            "microbatch_size": 1 if data_ranks > 1 else 2,
        },
    )


def layers_for(parallel, pipeline):
    """Eight stages need as many layers; five leave stages uneven."""
    return 8 if parallel.get("pp", 1) * pipeline.get("virtual_stages", 1) == 8 else 5


def measure(world, config):
    """Loss, gradients, their norm and a prediction."""
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batch = next(trainer.batches())
    prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
    # Three rows, which microbatches of two do not divide; the same ones on every rank.
    first = replace(batch, sample_numbers=torch.arange(3), **first_rows(trainer))
    few = trainer.objective.prepare(first, torch_rng(trainer, first))
    prediction = trainer.executor.predict(few.inputs, few.static)
    loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
    gradients = {name: whole(p.grad) for name, p in trainer.parameters.items()}
    norm = clip_norm(trainer.parameters.values(), 0).item()
    return loss, gradients, norm, prediction


def first_rows(trainer):
    """Fields and weights of the first three samples of the dataset."""
    return {"fields": trainer.source.read([0, 1, 2]), "weight": torch.ones(3)}


def reference(world):
    """One process, by objective, format and number of layers."""
    kinds = [(FLOW, "fp32", 5), (FLOW, "fp32", 8), (DDPM, "fp32", 5), (FLOW, "fp64", 5)]
    return {
        json.dumps(kind): measure(world, case_config({}, {}, *kind[:2], layers=kind[2]))
        for kind in [*kinds, (DDPM, "fp64", 5)]
    }


def compare(found, expected):
    """Relative errors: loss, norm, prediction, and the worst gradient with its name.

    Gradients relative to the largest of the tensor, with a floor: that of the key bias is 0.
    """
    loss, gradients, norm, prediction = found
    _, whole_gradients, whole_norm, whole_prediction = expected
    errors = {}
    for name, gradient in gradients.items():
        floor = max(whole_gradients[name].abs().max().item(), 1e-3 * whole_norm)
        errors[name] = (gradient - whole_gradients[name]).abs().max().item() / floor
    worst = max(errors, key=errors.get)
    return {
        "loss": abs(loss - expected[0]) / expected[0],
        "norm": abs(norm - whole_norm) / whole_norm,
        "prediction": (prediction - whole_prediction).abs().max().item()
        / whole_prediction.abs().max().item(),
        "gradient": errors[worst],
        "worst": worst,
        "names": sorted(errors),
    }


def dtypes_of(parallel, is_long, in_fp64=IN_FP64):
    """The formats to compute a layout in."""
    if parallel not in in_fp64:
        return ("fp32",)
    return ("fp32", "fp64") if is_long else ("fp64",)


def all_cases(world, references, cases, is_long=False):
    results = {}
    for parallel, pipeline, objective, *mode in cases:
        for dtype in dtypes_of(parallel, is_long):
            found = measure(world, case_config(parallel, pipeline, objective, dtype, *mode))
            expected = references[json.dumps([objective, dtype, layers_for(parallel, pipeline)])]
            results[json.dumps([parallel, pipeline, objective, dtype])] = compare(found, expected)
    return results


@pytest.fixture(scope="module")
def references():
    return on_ranks(1, reference)[0]


TOLERANCE = {"fp32": 1e-6, "fp64": 1e-9}


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_mesh_gives_what_one_process_gives(num_ranks, references):
    check(on_ranks(num_ranks, all_cases, references, CASES[num_ranks]), references)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", LONG)
def test_the_rest_of_the_grid_gives_what_one_process_gives(num_ranks, references):
    cases = LONG[num_ranks] + [case for case in CASES[num_ranks] if case[0] in IN_FP64]
    check(on_ranks(num_ranks, all_cases, references, cases, True), references)


def check(by_rank, references):
    whole_models = {len(reference[1]): set(reference[1]) for reference in references.values()}
    for case in by_rank[0]:
        seen = set().union(*(results[case]["names"] for results in by_rank))
        assert seen == whole_models[len(seen)], case
        for results in by_rank:
            found, tolerance = results[case], TOLERANCE[json.loads(case)[-1]]
            assert found["gradient"] <= tolerance, (case, found["worst"], found["gradient"])
            # A loss is reported in fp32.
            assert found["loss"] <= 1e-6, case
            assert found["norm"] <= 1e-6, case
            assert found["prediction"] <= 1e-5, case


def test_the_grid_has_every_axis_alone_every_pair_and_mixes_of_three():
    axes = {"pp", "dp_replicate", "dp_shard", "cp", "tp"}

    def meshes(*grids):
        cases = [case for grid in grids for some in grid.values() for case in some]
        return [frozenset(a for a in axes if parallel.get(a, 1) > 1) for parallel, *_ in cases]

    landing, whole_grid = meshes(CASES), meshes(CASES, LONG)
    for axis in axes:
        assert frozenset({axis}) in landing
    # dp_replicate with another axis is like dp_shard with it.
    for one, other in itertools.combinations(sorted(axes), 2):
        pair = frozenset({one, other})
        is_late = "dp_replicate" in pair or pair in WITH_A_GPT
        assert pair in (whole_grid if is_late else landing), pair
    assert sum(len(mesh) >= 3 for mesh in whole_grid) >= 5
    # With two ranks, the previous rank is the next one.
    fours = [parallel for parallel, *_ in CASES[4]]
    assert {"pp": 4} in fours
    assert {"tp": 4} in fours
    every = [case[0] for grid in (CASES, LONG) for some in grid.values() for case in some]
    assert all(parallel in every for parallel in IN_FP64)
