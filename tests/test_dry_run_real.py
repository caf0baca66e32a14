"""The dry run against real steps: bytes of torch's allocator, and storages by kind."""

import gc
import json
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import forked
import pytest
from harness import on_ranks
from tiny import built, tiny_config
from tiny_gpt import gpt_config
from tiny_joint import TABLES
from torch.profiler import ProfilerActivity, profile

from titan_dit.dry_run.fake_step import FakeRank, await_sends, fake_world, take_fake_step
from titan_dit.parallel.mesh import Mesh
from titan_dit.plan import resolve

COUNT = 6
"""Microbatches of a pipeline, more than the dry run takes."""


def parts_of(config, world):
    """Arguments of a fake or a real rank."""
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    sections = config.training, config.optimizer, config.ema
    return resolve(config, world), objective, fields, *sections


@dataclass(frozen=True)
class Real:
    """A step on real tensors."""

    allocated: int
    """Bytes at the peak, as torch's allocator has counted them, without those from before."""
    bytes: dict
    """By kind, at the peak of all storages."""
    live: int
    """Bytes after the step."""
    state: int
    """Those of weights, optimizer and EMA."""


def real_step(config, world, folder):
    """Take two steps with all microbatches on this rank."""
    plan, objective, fields, *sections = parts_of(config, world)
    mesh = Mesh(plan.sizes, "cpu")
    await_sends(mesh.p2p)
    trace = folder / f"{mesh.whole.get_rank()}.json"
    gc.collect()  # What an earlier step of this process holds in cycles.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rank = FakeRank(plan, objective, fields, mesh, nullcontext(), sections)
        count = plan.num_microbatches
        rank.run(plan.samples_per_rank, plan.microbatch_size, 1, count, count)
    profiled.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    tables = rank.parameters, *rank.ema.averages.values(), *rank.optimizer.state.values()
    tensors = (tensor for table in tables for tensor in table.values())
    events.sort(key=lambda event: event["ts"])
    first = events[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return Real(
        allocated=max(event["args"]["Total Allocated"] for event in events) - before,
        bytes=dict(rank.memory.peak().bytes),
        live=sum(record.size for record in rank.memory.records.values()),
        state=sum(getattr(tensor, "to_local", lambda t=tensor: t)().nbytes for tensor in tensors),
    )


def alone(config, folder):
    """A real step of one rank: its collectives have nothing to do."""
    with fake_world(0, 1):
        return real_step(config, 1, folder)


def of_pipeline(world, folder):
    return real_step(pipeline(), 2, folder)


def pipeline():
    """A GPT whose logits, sent streams and gradients are each 2% of a rank's memory or more."""
    return gpt_config(
        model={"hidden_size": 64, "num_layers": 2, "sequence_length": 128, "vocab_size": 1000},
        parallel={"pp": 2},
        training={"global_batch_size": 2 * COUNT, "microbatch_size": 2},
    )


def fake(config, world):
    return take_fake_step(*parts_of(config, world))


@pytest.fixture(scope="module")
def elsewhere():
    """Another process: the shape checks of the tests reject sharded tokens."""
    with ProcessPoolExecutor(1, forked.context()) as pool:
        yield lambda *given: pool.submit(*given).result()


def test_fake_storages_are_those_of_a_real_step(elsewhere, tmp_path):
    config = tiny_config(
        model={"hidden_size": 128, "num_layers": 4, "num_heads": 8, "latent_size": 32},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 2, "microbatch_size": 1},
    )
    real = elsewhere(alone, config, tmp_path)
    [rank] = elsewhere(fake, config, 1).ranks
    for kind, size in rank.peak.bytes.items():
        assert size == pytest.approx(real.bytes[kind], rel=0.01, abs=2**12), kind
    assert rank.peak.total == pytest.approx(real.allocated, rel=0.01)
    # Live after the step: the state, and parameters that FSDP keeps gathered.
    assert real.live >= real.state


def test_a_clip_of_the_largest_bucket_takes_what_its_dry_run_says(elsewhere, tmp_path):
    model = {
        "name": "wan",
        **{"hidden_size": 96, "num_layers": 3, "num_heads": 4, "intermediate_size": 256},
        **{"in_channels": 4, "latent_frames": 5, "latent_size": [16, 24]},
        **{"text_tokens": 32, "text_dim": 64},
    }
    config = built(
        {**TABLES, "data": {"name": "latents", "path": "nowhere"}, "model": model},
        {
            "precision": {"dtype": "bf16"},
            "training": {"global_batch_size": 2, "microbatch_size": 1},
        },
    )
    real = elsewhere(alone, config, tmp_path)
    [rank] = elsewhere(fake, config, 1).ranks
    assert rank.peak.total == pytest.approx(real.allocated, rel=0.05)


def test_a_pipeline_allocates_on_gloo_what_its_dry_run_says(elsewhere, tmp_path):
    report = elsewhere(fake, pipeline(), 2)
    assert report.num_run < report.num_microbatches == COUNT
    for rank, real in zip(report.ranks, on_ranks(2, of_pipeline, tmp_path), strict=True):
        assert rank.peak.total == pytest.approx(real.allocated, rel=1e-3)
        assert sum(real.bytes.values()) == pytest.approx(real.allocated, rel=1e-3)
