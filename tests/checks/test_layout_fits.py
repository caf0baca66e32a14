import itertools
import re
from dataclasses import replace

import pytest
import torch
from plans import check, planned
from tiny import tiny_config
from torch import nn

from titan_dit.checks.layout import check_batch, check_tensor, check_world
from titan_dit.checks.parts import check_modules
from titan_dit.config.section import UserError
from titan_dit.objectives.base import Objective
from titan_dit.parallel.tensor_plans import dit
from titan_dit.plan import resolve

# Hidden 32, 3 layers, 4 heads, 16 tokens, a batch of 16.
REFUSED = {
    "heads": ({"tp": 8}, {}, {}, r"tp=8 does not divide the model's heads of 4. Set tp = 4\."),
    "MLP width": (
        {"tp": 4},
        {"model": {"num_heads": 8, "mlp_ratio": 0.1875}},
        {},
        r"tp=4 does not divide the model's MLP width of 6. Set tp = 2. Sizes that divide all of "
        r"heads \(8\), query groups \(8\), MLP width \(6\): 1, 2\.$",
    ),
    "tokens": ({"cp": 3}, {}, {}, r"cp=3 does not divide the 16 tokens .* Set cp = 2\."),
    "sequence": (
        {"cp": 8, "tp": 4},
        {},
        {},
        r"sequence_parallel=true: tp=4 does not divide the 2 tokens of a rank",
    ),
    "ulysses": (
        {"cp": 4, "tp": 2},
        {"parallel": {"cp_method": "ulysses"}},
        {},
        r"cp=4 does not divide the 2 heads of a rank .* Set cp_method = .ring. or cp = 2\.",
    ),
    "stages": ({"pp": 4}, {}, {}, "4 stages, but the model has 3 layers"),
    "microbatches": (
        {"pp": 3},
        {"training": {"microbatch_size": 4}},
        {"schedule": "dualpipev"},
        "6 stages, but",
    ),
    "few microbatches": (
        {"pp": 2},
        {"training": {"microbatch_size": 8}, "model": {"num_layers": 8}},
        {"schedule": "dualpipev"},
        "needs at least 2 x pp = 4 microbatches, but microbatches=2",
    ),
    "virtual stages": (
        {"pp": 2},
        {"model": {"num_layers": 8}},
        {"schedule": "1f1b", "virtual_stages": 2},
        r"\[pipeline\] schedule=.1f1b. has one stage per rank",
    ),
    "resharded": (
        {"pp": 2},
        {"parallel": {"reshard_after_forward": "always"}},
        {},
        r"reshard_after_forward=.always. .* Set reshard_after_forward = .auto.",
    ),
    "batch": ({"dp_shard": 3}, {}, {}, "global_batch_size=16 does not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_its_values_and_a_fix(case):
    sizes, sections, pipeline, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as caught:
        check(sizes, pipeline=pipeline, **sections)
    assert re.match(r"\[(parallel|pipeline|training)\]", str(caught.value))


@pytest.mark.parametrize(
    ("sizes", "sections", "pipeline"),
    [
        ({"tp": 4}, {}, {}),
        ({"cp": 4, "tp": 4}, {}, {}),
        ({"cp": 2, "tp": 2}, {"parallel": {"cp_method": "ulysses"}}, {}),
        ({"cp": 16, "tp": 4}, {"parallel": {"sequence_parallel": False}}, {}),
        ({"pp": 3}, {}, {"schedule": "gpipe"}),
        ({"pp": 2}, {"model": {"num_layers": 7}}, {"schedule": "zbv_zero_bubble"}),
        (
            {"pp": 2},
            {"model": {"num_layers": 8}},
            {"schedule": "interleaved_1f1b", "virtual_stages": 4},
        ),
        ({"pp": 2, "dp_shard": 4}, {"compile": {"enabled": True}}, {}),
    ],
)
def test_what_fits_is_taken(sizes, sections, pipeline):
    assert check(sizes, pipeline=pipeline, **sections) is None


def test_a_schedule_of_ones_own_is_planned_by_its_dotted_name():
    pipeline = {"schedule": "titan_dit.pipeline.schedules.v_shaped:DUALPIPEV"}
    assert planned({"pp": 2}, pipeline=pipeline)[1].stage_ranks == [0, 1, 1, 0]
    with pytest.raises(UserError, match=r"schedule=.* is a function\. Name a Schedule, or"):
        check({"pp": 2}, pipeline={"schedule": "titan_dit.pipeline.schedules.v_shaped:dualpipev"})


def test_a_schedule_of_ones_own_is_proven_before_anything_is_built(tmp_path, monkeypatch):
    (tmp_path / "lossy.py").write_text(
        "from titan_dit.pipeline.schedules import looped\n"
        "from titan_dit.pipeline.schedules.schedule import Schedule\n"
        "LOSSY = Schedule(program=lambda r, p, m, v: looped.gpipe(r, p, m - r, v))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'\[pipeline\] schedule="lossy:LOSSY": '):
        check({"pp": 2}, pipeline={"schedule": "lossy:LOSSY"})


def taken(ranks, resuming=False, **settings):
    """The mesh sizes on `ranks` ranks; UserError if they do not fit."""
    plan = resolve(tiny_config(parallel=settings), ranks, resuming)
    check_world(plan)
    return plan.sizes


def refusal(ranks, **settings):
    with pytest.raises(UserError) as caught:
        taken(ranks, **settings)
    return str(caught.value)


def test_a_product_that_is_not_the_number_of_ranks_is_shown_factor_by_factor():
    assert refusal(8, dp_shard=2, tp=2) == (
        "[parallel] dp_shard=2 x tp=2 = 4 ranks, but 8 were started. "
        "Set dp_shard = 4 or launch 4 ranks."
    )
    assert "but 1 was started" in refusal(1, dp_shard=2)


def test_sizes_that_do_not_divide_the_ranks_are_shown():
    message = refusal(8, dp_replicate=3)
    assert message == (
        "[parallel] dp_replicate=3 does not divide the 8 ranks started. "
        "Launch a multiple of 3 ranks, or change the sizes."
    )


def test_the_nodes_that_are_left_are_named_by_a_number_that_fits(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert refusal(12, pp=2, tp=4, resuming=True).endswith("NNODES=2.")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert refusal(12, pp=2, tp=4, resuming=True).endswith("NNODES=8.")
    for one_node in ("3", "12"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", one_node)
        ranks = int(one_node)
        assert "NNODES" not in refusal(ranks, pp=2, tp=4, resuming=True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert "NNODES" not in refusal(12, pp=2, tp=4, resuming=True)


def test_a_size_of_zero_is_refused():
    message = "[parallel] dp_shard=0 is not a size. Set dp_shard = -1 or at least 1."
    assert refusal(4, dp_shard=0) == refusal(4, dp_shard=0, resuming=True) == message


def test_every_axis_counts_in_the_product():
    assert taken(2 * 3 * 5 * 2 * 4, pp=2, dp_replicate=3, cp=2, tp=4).dp_shard == 5
    message = refusal(9, pp=2, cp=2, tp=2)
    assert message.startswith("[parallel] pp=2 x cp=2 x tp=2 does not divide the 9 ranks started.")


# Every combination of small sizes and ranks: each error names a fix.
SIZES = list(itertools.product((1, 2, 3), (-1, 1, 2, 3, 4), range(1, 9)))


def test_every_fix_that_a_message_names_works():
    refused = 0
    for dp_replicate, dp_shard, ranks in SIZES:
        settings = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        try:
            sizes = taken(ranks, **settings)
        except UserError as error:
            message, refused = str(error), refused + 1
        else:
            assert sizes.data == ranks
            continue
        fixes = 0
        assert f"dp_replicate={dp_replicate}" in message or dp_replicate == 1
        if found := re.search(r"Set dp_shard = (\d+)", message):
            assert taken(ranks, **settings | {"dp_shard": int(found[1])}).data == ranks
            fixes += 1
        if found := re.search(r"[Ll]aunch (?:a multiple of )?(\d+) ranks", message):
            assert taken(int(found[1]), **settings).data == int(found[1])
            fixes += 1
        assert fixes, message
        assert str(ranks) in message
    assert 20 < refused < len(SIZES)


def batch_of(batch, micro=None, resuming=False, **sizes):
    """Check a batch on a mesh."""
    training = {"global_batch_size": batch, "microbatch_size": micro}
    return check_batch(planned(sizes, resuming, training=training)[1])


@pytest.mark.parametrize(
    ("batch", "micro", "ranks"), [(8, None, 1), (8, None, 4), (8, 2, 4), (8, 8, 1), (24, 3, 4)]
)
def test_a_batch_that_divides_is_taken(batch, micro, ranks):
    assert batch_of(batch, micro, dp_shard=ranks) is None
    with pytest.raises(UserError):
        batch_of(batch + 1, 2, dp_shard=ranks)


def test_a_batch_that_does_not_divide_is_shown_with_what_it_is_divided_by():
    with pytest.raises(UserError) as caught:
        batch_of(130, 8, dp_replicate=2, dp_shard=2)
    assert str(caught.value) == (
        "[training] global_batch_size=130 does not divide into microbatch_size=8 x "
        "4 data-parallel ranks. Set global_batch_size = 128 or 160."
    )


def test_every_batch_size_that_a_message_names_divides():
    refused = 0
    for batch, micro, replicas, shards in itertools.product(
        (1, 2, 7, 12, 33), (None, 1, 3, 8), (1, 2), (1, 3)
    ):
        sizes = {"dp_replicate": replicas, "dp_shard": shards}
        try:
            batch_of(batch, micro, **sizes)
        except UserError as error:
            refused += 1
            valid = re.search(r"Set global_batch_size = (.*)\.$", str(error))[1].split(" or ")
            for size in map(int, valid):
                assert size > 0
                batch_of(size, micro, **sizes)
        else:
            assert batch % ((micro or 1) * replicas * shards) == 0
    assert refused > 20


def test_every_number_of_ranks_is_followed_or_answered_with_some_that_would_do():
    refused = 0
    for tp, cp, pp, ranks in itertools.product((1, 2, 3), (1, 2), (1, 3), range(1, 13)):
        settings = {"tp": tp, "cp": cp, "pp": pp, "dp_shard": 2, "dp_replicate": 2}
        try:
            sizes = taken(ranks, resuming=True, **settings)
        except UserError as error:
            message, refused = str(error), refused + 1
            offered = re.search(r"Resume with (.*?) ranks", message)[1].split(" or ")
            for good in map(int, offered):
                assert good > 0
                assert taken(good, resuming=True, **settings).data * tp * cp * pp == good
            assert f"the {ranks} that" in message
        else:
            assert (sizes.tp, sizes.cp, sizes.pp) == (tp, cp, pp)
            assert sizes.data * tp * cp * pp == ranks
    assert refused > 20


def test_a_world_with_more_data_ranks_than_samples_cannot_hold_the_batch():
    assert batch_of(7, resuming=True, dp_shard=7, tp=2) is None
    with pytest.raises(UserError) as caught:
        batch_of(7, resuming=True, dp_shard=8, tp=2)
    assert str(caught.value) == (
        "[training] global_batch_size=7 is less than the 8 data-parallel ranks. Launch at most 14 "
        "ranks."
    )


INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("sizes", "micro", "pipeline", "expected"),
    [  # (microbatches, samples in each) of a batch of 16.
        ({"dp_shard": 3}, None, {}, (1, 6)),
        ({"dp_shard": 5}, None, {}, (1, 4)),
        ({"dp_shard": 5}, 3, {}, (2, 2)),  # 2 x 2 rows, not 2 x 3.
        ({"dp_shard": 3}, 16, {}, (1, 6)),
        ({"dp_shard": 3, "pp": 2}, None, {"schedule": "1f1b"}, (6, 1)),
        ({"dp_shard": 3, "pp": 2}, 4, {"schedule": "1f1b"}, (2, 3)),
        ({"dp_shard": 3, "pp": 4}, None, INTERLEAVED, (6, 1)),
        ({"dp_shard": 2, "pp": 3}, None, INTERLEAVED, (8, 1)),
        ({"dp_shard": 6, "pp": 4}, None, {"schedule": "dualpipev"}, (8, 1)),
        ({"dp_shard": 3, "pp": 2}, 3, {"schedule": "dualpipev"}, (4, 2)),
    ],
)
def test_a_batch_that_does_not_divide_is_held_in_equal_microbatches(
    sizes, micro, pipeline, expected
):
    sections = {
        "model": {"num_layers": 8},
        "training": {"microbatch_size": micro},
        "pipeline": pipeline,
    }
    assert check(sizes, resuming=True, **sections) is None
    _, plan = planned(sizes, resuming=True, **sections)
    assert (plan.num_microbatches, plan.microbatch_size) == expected
    assert plan.padded_samples_per_rank * plan.sizes.data >= 16
    if plan.sizes.data != 2:
        with pytest.raises(UserError):
            check(sizes, **sections)


def with_spec(plan, **changes):
    return replace(plan, spec=replace(plan.spec, **changes))


def test_tp_is_refused_where_nobody_says_how_to_cut():
    _, plan = planned({"tp": 2})
    check_tensor(plan)
    with pytest.raises(UserError) as caught:
        check_tensor(replace(plan, tensor_plan_function=None))
    assert str(caught.value) == (
        '[parallel] tp=2: the model "dit" has no tensor plan. Set tp = 1, or '
        'tensor_plan = "package.module:function" (docs/extending.md).'
    )
    check_tensor(replace(planned()[1], tensor_plan_function=None))


def test_a_plan_of_a_users_own_is_taken_for_tp():
    own = {"tensor_plan": "titan_dit.parallel.tensor_plans.dit:plan"}
    assert planned({"tp": 2}, parallel=own)[1].tensor_plan_function is dit.plan
    check({"tp": 2}, parallel=own)


class WithModules(Objective):
    """An objective with parameters."""

    def __init__(self, device="meta"):
        with torch.device(device):
            self.weigh = nn.ModuleDict({"weigh": nn.Linear(1, 1)})

    def modules(self):
        return self.weigh


@pytest.mark.parametrize(
    ("schedule", "pp", "refused"),
    [("zbv_zero_bubble", 2, True), ("dualpipev", 2, True), ("1f1b", 2, False), ("1f1b", 1, False)],
)
def test_a_split_backward_is_refused_where_the_objective_has_parameters(schedule, pp, refused):
    _, plan = planned({"pp": pp}, pipeline={"schedule": schedule})
    check_modules(plan, Objective())
    if not refused:
        return check_modules(plan, WithModules())
    with pytest.raises(UserError, match=rf'schedule="{schedule}" splits .* Set schedule = "inter'):
        check_modules(plan, WithModules())
    return None


def test_run_time_order_over_replicas_is_refused_where_the_objective_has_parameters():
    """Replicas run the loss in different sequences: their collectives would be mixed up."""
    run_time = {"schedule": "gpipe", "order": "run_time"}
    check_modules(planned({"pp": 2}, pipeline=run_time)[1], WithModules())
    _, plan = planned({"pp": 2, "dp_shard": 2}, pipeline=run_time)
    check_modules(plan, Objective())
    with pytest.raises(
        UserError, match=r'order="run_time" with 2 data-parallel .*order = "planned"'
    ):
        check_modules(plan, WithModules())


def test_modules_of_an_objective_that_have_values_already_are_refused():
    _, plan = planned({})
    with pytest.raises(UserError, match=r"weigh\.weight, weigh\.bias has values already"):
        check_modules(plan, WithModules("cpu"))
