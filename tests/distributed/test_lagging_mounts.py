"""A rank whose mount lags behind that of rank 0, when a checkpoint is verified."""

from pathlib import Path

import pytest
import records
import torch
from harness import on_ranks

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.operation import CheckpointConfig
from titan_dit.ranks.process_group import Ranks


def verdicts(world, path, looks, behind=1):
    """What this rank hears of a checkpoint whose files a rank does not see, `looks` times."""
    is_whole, seen = checkpoint.is_whole, 0

    def late(*given):
        nonlocal seen
        seen += 1
        return is_whole(*given) and (world.rank != behind or seen > looks)

    checkpoint.is_whole, checkpoint.LAG_S = late, 1.0 if looks > 100 else 20.0
    try:
        return checkpoint.damaged_files(path, read_record(path), Ranks())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpoint.is_whole = is_whole


def two_verdicts(world, path):
    return [verdicts(world, path, looks, behind) for behind in (0, 1) for looks in (3, 10_000)]


@pytest.fixture
def saved(tmp_path):
    settings = CheckpointConfig(async_save=False)
    tensors = {"model": {"w": torch.ones(4)}}
    return Checkpoints(tmp_path, settings).save(7, tensors, records.of_run(7))


def test_a_file_that_only_one_rank_misses_is_not_damaged(saved):
    for found in on_ranks(2, two_verdicts, saved):
        assert found[::2] == [[], []]
        for rank, never in enumerate(found[1::2]):
            assert never.startswith("Disruption: [checkpoint]")
            assert f"another rank can read it, rank {rank} cannot" in never
    assert saved.is_dir()


def test_a_file_that_is_gone_for_all_is_damaged(saved):
    lost = sorted(read_record(saved)["files"])[-1]
    Path(saved / lost).unlink()
    assert on_ranks(2, verdicts, saved, 0) == [[lost]] * 2
