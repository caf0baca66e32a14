"""The plan of a config and a world size."""

from tiny import tiny_config

from titan_dit.plan import resolve


def microbatches(ranks, **sections):
    return resolve(tiny_config(**sections), ranks).num_microbatches


def test_a_pipeline_takes_one_sample_at_a_time_unless_told():
    assert microbatches(4, parallel={"pp": 2}) == 8
    assert microbatches(2) == 1
    assert microbatches(4, parallel={"pp": 2}, training={"microbatch_size": 4}) == 2
