"""Copies in host memory: the bytes of the shards, in few allocations, each a power of two."""

import gc
import math
import random

import pytest
import records
import torch

from titan_dit.checkpoint import staging
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.checkpoint.staging import (
    ALIGNMENT,
    LARGEST_GAP,
    Staging,
    leaves,
    packed,
    power_of_two,
)
from titan_dit.config import catalog, config_file
from titan_dit.config.operation import CheckpointConfig


def rounded(sizes):
    """Bytes of one pinned allocation for each size."""
    return sum(map(power_of_two, sizes))


def shard_sizes(recipe, ranks):
    """Bytes of a rank's fp32 weights, two moments, their step and an average, of a recipe."""
    config = config_file.load(["--config", recipe], catalog.variant)
    with torch.device("meta"):
        parameters = [*config.model.build(1).parameters()]
    shards = [p[: math.ceil(p.shape[0] / ranks)] for p in parameters]
    return [size for shard in shards for size in (*[4 * shard.numel()] * 4, 4)]


@pytest.mark.parametrize(
    ("recipe", "ranks", "before"),
    [("dit_xl2", 1, 1.32), ("dit_xl2", 8, 1.32), ("dit_7b", 8, 1.17), ("dit_s2", 1, 1.48)],
)
def test_buffers_take_little_more_than_the_bytes_of_the_shards(recipe, ranks, before):
    sizes = shard_sizes(recipe, ranks)
    chunks = packed(sizes)
    taken = [chunk.num_bytes for chunk in chunks]
    assert rounded(sizes) / sum(sizes) == pytest.approx(before, abs=0.005)
    assert sum(taken) < 1.01 * sum(sizes)
    assert rounded(taken) == sum(taken)
    assert len(chunks) <= 6 < 650 < len(sizes)


def random_sizes(draw):
    """Shards of few sizes, as those of equal layers are, some empty."""
    kinds = [int(2 ** draw.uniform(0, 30)) * draw.choice([0, 1, 1, 1]) for _ in range(6)]
    return draw.choices(kinds, k=draw.randint(1, 200))


def test_every_shard_has_a_place_of_its_own_and_packing_takes_no_more_than_an_allocation_each():
    draw = random.Random(0)
    for _ in range(200):
        sizes = random_sizes(draw)
        chunks = packed(sizes)
        placed = [number for chunk in chunks for number in chunk.offsets]
        assert sorted(placed) == list(range(len(sizes)))
        for chunk in chunks:
            assert chunk.num_bytes == power_of_two(chunk.num_bytes)
            end = 0
            for number, offset in chunk.offsets.items():
                assert offset % ALIGNMENT == 0
                assert offset >= end
                end = offset + sizes[number]
            assert end <= chunk.num_bytes
        rooms = [math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes]
        most = rounded(rooms) * (1 + 2 * LARGEST_GAP)
        assert sum(chunk.num_bytes for chunk in chunks) <= most


def test_few_large_shards_take_the_fullest_chunks():
    assert [chunk.num_bytes for chunk in packed([3 << 20] * 5)] == [16 << 20]
    assert [chunk.num_bytes for chunk in packed([5 << 20, 3 << 20, 512])] == [8 << 20, 512]
    assert [chunk.num_bytes for chunk in packed([])] == []


def shards():
    """Shards of several dtypes and shapes, some not contiguous."""
    return {
        "bf16": torch.arange(33, dtype=torch.bfloat16),
        "nested": {"step": torch.tensor(3.0), "empty": torch.empty(0, 5)},
        "transposed": torch.arange(12.0, dtype=torch.float64).view(3, 4).t(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "every second": torch.arange(1000)[::2],
    }


def test_copies_are_whole_tensors_with_storages_of_their_own():
    copies = [*leaves(Staging().copy(shards()))]
    gc.collect()
    for copy, shard in zip(copies, leaves(shards()), strict=True):
        assert copy.dtype == shard.dtype
        assert torch.equal(copy, shard)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copy.data_ptr() % 64 == 0


def test_names_are_those_of_the_tensors_that_are_copied():
    kept = Staging()
    first = kept.copy({"a": torch.zeros(3), "b": torch.ones(3)})
    second = kept.copy({"b": torch.ones(3), "c": {"d": torch.zeros(3)}})
    assert list(first) == ["a", "b"]
    assert torch.equal(second["b"], torch.ones(3))
    assert torch.equal(second["c"]["d"], torch.zeros(3))


def test_without_memory_for_another_layout_the_old_one_can_be_copied(monkeypatch):
    kept, small = Staging(), {"a": torch.ones(8)}
    kept.copy(small)
    large = {str(number): torch.ones(3000) for number in range(6)}
    assert len(packed([tensor.nbytes for tensor in large.values()])) > 1
    allocate, sizes = staging.allocate, []

    def fails_in_the_end(num_bytes, **keys):
        sizes.append(num_bytes)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("no pinned memory")
        return allocate(num_bytes, **keys)

    with monkeypatch.context() as patched:
        patched.setattr(staging, "allocate", fails_in_the_end)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            kept.copy(large)
        assert torch.equal(kept.copy({"a": torch.full((8,), 2.0)})["a"], torch.full((8,), 2.0))
        assert len(sizes) == 2
    assert [torch.equal(copy, torch.ones(3000)) for copy in leaves(kept.copy(large))] == [True] * 6


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_in_the_background_writes_the_same_bytes_and_copies_nothing(tmp_path, monkeypatch):
    files, cloned = [], []
    clone = torch.Tensor.clone

    def counted(tensor, **keys):
        cloned.append(tensor.shape)
        return clone(tensor, **keys)

    tensors = {"model": {"w": torch.randn(300, 20), "b": torch.randn(7)}, "step": torch.tensor(1.0)}
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    for in_background in (True, False):
        saves = Checkpoints(
            tmp_path / str(in_background), CheckpointConfig(async_save=in_background)
        )
        path = saves.save(1, tensors, records.of_run(1))
        saves.finish()
        files.append(read_record(path)["files"])
    assert cloned == []
    data = "__0_0.distcp"
    assert files[0][data] == files[1][data]
    assert files[0].keys() == files[1].keys() == {data, ".metadata", "tensors.json"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_a_gpu_are_pinned_in_as_many_allocations_as_chunks():
    tensors = {str(size): torch.full((size,), float(size), device="cuda") for size in range(1, 300)}
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()
    copies = Staging().copy(tensors)
    after = torch.cuda.host_memory_stats()
    assert all(copy.is_pinned() for copy in leaves(copies))
    assert all(torch.equal(copies[name], tensor.cpu()) for name, tensor in tensors.items())
    num_chunks = len(packed([tensor.nbytes for tensor in tensors.values()]))
    assert after["num_host_alloc"] - before["num_host_alloc"] <= num_chunks
