"""A BERT gives the loss, gradients, norm and logits of one process on every mesh."""

import json

import pytest
from harness import on_ranks
from test_grid import COPIES, CP, DP, HSDP, PLAIN, PP, TP, ULYSSES, compare, dtypes_of, schedule
from text_grid import check, key_of, measure
from tiny_bert import bert_config

pytestmark = pytest.mark.timeout(900)

# Norms after or before, and whether the order of spans is a second task, on padded samples,
# then with dropout if norms are after.
POST, PRE = ["post", False], ["pre", False]
POST_PAIRS, PRE_PAIRS = ["post", True], ["pre", True]
KINDS = POST, PRE, POST_PAIRS, PRE_PAIRS
FOLDED = schedule("interleaved_1f1b", 2)
CASES = {
    2: [
        (TP, {}, POST_PAIRS),
        (PLAIN, {}, PRE_PAIRS),
        (CP, {}, POST),
        (ULYSSES, {}, POST_PAIRS),
        (PP, schedule("zbv_zero_bubble"), PRE_PAIRS),
        (DP, {}, PRE),
    ],
}
# The whole grid, for ./run_tests.sh --long.
LONG = {
    2: [
        (DP, {}, POST_PAIRS),
        (COPIES, {}, PRE_PAIRS),
        (TP, {}, PRE),
        (ULYSSES, {}, PRE_PAIRS),
        (PP, schedule("1f1b"), POST),
        (PP, FOLDED, PRE_PAIRS),
        (PP, schedule("interleaved_zero_bubble", 2), POST_PAIRS),
        (PP, schedule("dualpipev"), POST_PAIRS),
    ],
    4: [
        ({"pp": 4}, FOLDED, POST_PAIRS),
        ({"tp": 4}, {}, POST_PAIRS),
        (HSDP, {}, POST_PAIRS),
        (DP | TP, {}, PRE),
        (PP | ULYSSES, FOLDED, POST_PAIRS),
        (DP | PP, schedule("zbv_zero_bubble"), POST_PAIRS),
        (DP | ULYSSES, {}, PRE_PAIRS),
        (TP | PP, schedule("dualpipev"), POST_PAIRS),
        (TP | CP, {}, POST),
        (TP | ULYSSES, {}, POST_PAIRS),
    ],
    8: [
        (PP | DP | TP, schedule("interleaved_zero_bubble", 2), POST_PAIRS),
        (PP | TP | ULYSSES, FOLDED, PRE_PAIRS, "selective"),
        (HSDP | TP, {}, POST_PAIRS, "attention"),
    ],
}
IN_FP64 = [TP, {"tp": 4}, ULYSSES, PP, HSDP, TP | PP, DP | TP, TP | CP, PP | ULYSSES]


def case_config(parallel, pipeline, kind, dtype="fp32", mode="none", layers=5):
    """Eight stages need as many layers; five leave stages uneven."""
    eight = parallel.get("pp", 1) * pipeline.get("virtual_stages", 1) == 8
    data_ranks = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    norm_place, sentence_order = kind
    return bert_config(
        sentence_order=sentence_order,
        model={
            "layers": 8 if eight else layers,
            "norm_place": norm_place,
            "dropout": 0.1 if kind == POST_PAIRS else 0.0,
        },
        parallel=parallel,
        pipeline=pipeline,
        precision={"dtype": dtype},
        activation_checkpoint={"mode": mode},
        training={"microbatch_size": 1 if data_ranks > 1 else 2},
    )


def reference(world, kinds):
    found = {}
    for kind, dtype, layers in kinds:
        config = case_config({}, {}, kind, dtype, layers=layers)
        found[key_of(kind, dtype, layers)] = measure(world, config)
    return found


def all_cases(world, references, cases, is_long=False):
    results = {}
    for parallel, pipeline, kind, *mode in cases:
        for dtype in dtypes_of(parallel, is_long, IN_FP64):
            config = case_config(parallel, pipeline, kind, dtype, *mode)
            expected = references[key_of(kind, dtype, config.model.shape[1])]
            key = json.dumps([parallel, pipeline, kind, dtype])
            results[key] = compare(measure(world, config), expected)
    return results


@pytest.fixture(scope="module")
def references():
    kinds = [(kind, dtype, 5) for kind in KINDS for dtype in ("fp32", "fp64")]
    return on_ranks(1, reference, [*kinds, (POST_PAIRS, "fp32", 8)])[0]


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_mesh_gives_what_one_process_gives(num_ranks, references):
    check(on_ranks(num_ranks, all_cases, references, CASES[num_ranks]), references)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", LONG)
def test_the_rest_of_the_grid_gives_what_one_process_gives(num_ranks, references):
    cases = LONG[num_ranks] + [case for case in CASES.get(num_ranks, []) if case[0] in IN_FP64]
    check(on_ranks(num_ranks, all_cases, references, cases, True), references)


def test_the_grid_has_twenty_meshes():
    cases = [case for grid in (CASES, LONG) for some in grid.values() for case in some]
    assert len({json.dumps(case[:2]) for case in cases}) >= 20
    assert all(any(case[2] == kind for case in cases) for kind in KINDS)
