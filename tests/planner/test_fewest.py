"""The fewest GPUs that hold a run."""

import pytest
from hand_made import easy
from made_up_counts import counts_of
from tiny import tiny_config

from titan_dit.planner import memory
from titan_dit.planner.choice import fewest, gpu_counts, smallest
from titan_dit.planner.search import CostModel

MODEL = CostModel(counts=counts_of)
LONG = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "latent_size": 1024}
"""Many tokens: most of the memory are activations."""


def test_counts_are_those_of_nodes_and_the_one_that_is_asked_for():
    device = easy(gpus_per_node=8)
    assert list(gpu_counts(device, 1, 24)) == [1, 2, 4, 8, 16, 24]
    assert list(gpu_counts(device, 9, 64)) == [16, 32, 64]
    assert list(gpu_counts(device, 1, 1)) == [1]


@pytest.fixture(scope="module")
def config():
    return tiny_config(
        model=LONG,
        data={"name": "latents", "path": "nowhere"},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 2},
    )


def test_where_activations_need_most_cp_is_tried(config):
    fixed = ("parallel.tp", "parallel.pp")
    roomy = easy(gpus_per_node=8, memory_gib=1000.0)
    whole = smallest(config, roomy, (*fixed, "parallel.cp"), MODEL, 2)
    assert whole.is_mostly_activations
    tight = easy(gpus_per_node=8, memory_gib=0.7 * whole.needed.total)
    assert fewest(config, tight, (*fixed, "parallel.cp"), MODEL, (1, 8)) is None
    found = fewest(config, tight, fixed, MODEL, (1, 8))
    assert found.candidate.cp > 1
    assert memory.fits(found.needed, tight)
