import re
from typing import get_args, get_type_hints

import pytest
from tiny import tiny_config

from titan_dit.config import PipelineConfig
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.pipeline.checks import (
    check_layout,
    microbatch_size,
    num_microbatches,
    rows_per_rank,
)
from titan_dit.schedules.layout import SCHEDULES
from titan_dit.section import UserError

# Hidden 32, 3 layers, 4 heads, 16 tokens, a batch of 16.
REFUSED = {
    "heads": ({"tp": 8}, {}, {}, r"tp=8 does not divide the model's heads of 4. Set tp = 4\."),
    "tokens": ({"cp": 3}, {}, {}, r"cp=3 does not divide the 16 tokens .* Set cp = 2\."),
    "sequence": (
        {"cp": 8, "tp": 4},
        {},
        {},
        r"sequence_parallel=true: 2 tokens of a rank do not divide by tp=4",
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
        {"training": {"microbatch_size": 8}, "model": {"layers": 8}},
        {"schedule": "dualpipev"},
        "needs at least 2 x pp = 4 microbatches, but microbatches=2",
    ),
    "virtual stages": (
        {"pp": 2},
        {"model": {"layers": 8}},
        {"schedule": "1f1b", "virtual_stages": 2},
        r"\[pipeline\] schedule=.1f1b. holds one stage per rank",
    ),
    "compiled": (
        {"pp": 2},
        {"compile": {"enabled": True}, "model": {"layers": 8}},
        {"schedule": "zbv_zero_bubble"},
        r"splits the backward pass, which torch cannot do with compiled blocks",
    ),
    "graphs of several passes": (
        {},
        {"compile": {"enabled": True, "cuda_graphs": True}, "training": {"microbatch_size": 4}},
        {},
        r"a step has 4. Set cuda_graphs = false, or \[training\] microbatch_size = 16",
    ),
    "resharded": (
        {"pp": 2},
        {"parallel": {"reshard_after_forward": "always"}},
        {},
        r"reshard_after_forward=.always. .* Set .auto.",
    ),
    "batch": ({"dp_shard": 3}, {}, {}, "global_batch_size=16 does not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_its_values_and_a_fix(case):
    sizes, sections, pipeline, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as caught:
        check_layout(tiny_config(pipeline=pipeline, **sections), AxisSizes(**sizes))
    assert re.match(r"\[(parallel|pipeline|training|compile)\]", str(caught.value))


@pytest.mark.parametrize(
    ("sizes", "sections", "pipeline"),
    [
        ({"tp": 4}, {}, {}),
        ({"cp": 4, "tp": 4}, {}, {}),
        ({"cp": 2, "tp": 2}, {"parallel": {"cp_method": "ulysses"}}, {}),
        ({"cp": 16, "tp": 4}, {"parallel": {"sequence_parallel": False}}, {}),
        ({"pp": 3}, {}, {"schedule": "gpipe"}),
        ({"pp": 2}, {"model": {"layers": 7}}, {"schedule": "zbv_zero_bubble"}),
        (
            {"pp": 2},
            {"model": {"layers": 8}},
            {"schedule": "interleaved_1f1b", "virtual_stages": 4},
        ),
        ({"pp": 2, "dp_shard": 4}, {"compile": {"enabled": True}}, {}),
    ],
)
def test_what_fits_is_taken(sizes, sections, pipeline):
    assert check_layout(tiny_config(pipeline=pipeline, **sections), AxisSizes(**sizes)) is None


def test_a_pipeline_takes_one_sample_at_a_time_unless_told():
    assert num_microbatches(tiny_config(), AxisSizes(pp=2, dp_shard=2)) == 8
    assert num_microbatches(tiny_config(), AxisSizes(dp_shard=2)) == 1
    config = tiny_config(training={"microbatch_size": 4})
    assert num_microbatches(config, AxisSizes(pp=2, dp_shard=2)) == 2


def test_the_config_offers_the_schedules_there_are():
    """config.py may not import them."""
    assert get_args(get_type_hints(PipelineConfig)["schedule"]) == SCHEDULES


def test_recomputation_that_a_schedule_cannot_have_is_refused_here_too():
    """Before anything is built, and so in a dry run as well."""
    config = tiny_config(
        model={"layers": 8}, remat={"mode": "selective"}, pipeline={"schedule": "zbv_zero_bubble"}
    )
    with pytest.raises(UserError, match=r"\[remat\] mode=.selective."):
        check_layout(config, AxisSizes(pp=2))


INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("sizes", "micro", "pipeline", "expected"),
    [  # Of a batch of 16: (microbatches, samples of each).
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
    sizes = AxisSizes(**sizes)
    config = tiny_config(
        model={"layers": 8}, training={"microbatch_size": micro}, pipeline=pipeline
    )
    assert check_layout(config, sizes, following=True) is None
    assert (num_microbatches(config, sizes), microbatch_size(config, sizes)) == expected
    assert rows_per_rank(config, sizes) * sizes.data >= 16
    if sizes.data != 2:
        with pytest.raises(UserError):
            check_layout(config, sizes)
