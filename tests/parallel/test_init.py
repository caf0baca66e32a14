import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from titan_dit.dry_run.fake_step import fake_world
from titan_dit.models import initializers
from titan_dit.parallel import init

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Sizes that dp = 3 does not divide, and a buffer without any dim."""

    def __init__(self):
        super().__init__()
        self.columns, self.rows = nn.Linear(5, 8), nn.Linear(10, 7)
        self.alone = nn.Parameter(torch.empty(3))
        self.register_buffer("scalar", torch.empty(()))


def meta():
    with torch.device("meta"):
        return Layers()


TABLE = {
    "columns.weight": initializers.xavier_uniform,
    "columns.bias": initializers.normal(1.0),
    "rows.weight": initializers.normal(0.5),
    "rows.bias": initializers.ones,
    "alone": lambda shape, generator: torch.rand(shape, generator=generator),
    "scalar": initializers.normal(2.0),
}


def whole(drawn_by="counter"):
    model = meta()
    init.initialize(model, TABLE, 3, CPU, drawn_by)
    return model.state_dict()


def shard(name, module, mesh):
    """`columns` over its outputs, `rows` over its inputs, as tensor parallelism does."""
    dims = {"columns": {"weight": 0, "bias": 0}, "rows": {"weight": 1}}.get(name, {})
    for key, dim in dims.items():
        tensor = distribute_tensor(getattr(module, key), mesh, [Shard(dim)], src_data_rank=None)
        setattr(module, key, nn.Parameter(tensor))


@pytest.mark.parametrize("chunk", [1, 8, 2**15])
def test_a_rank_draws_the_elements_of_its_shard(chunk, monkeypatch):
    monkeypatch.setattr(init, "chunk_size", lambda device: chunk)
    expected = whole()
    for rank in range(6):
        with fake_world(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            model = meta()
            distribute_module(model, mesh["tp"], shard)
            fully_shard(model, mesh=mesh["dp"])
            init.initialize(model, TABLE, 3, CPU, "counter")
            for name, tensor in model.state_dict().items():
                wanted = expected[name]
                if name != "scalar":
                    given = tensor.device_mesh, tensor.placements
                    wanted = distribute_tensor(wanted, *given, src_data_rank=None).to_local()
                    tensor = tensor.to_local()
                assert torch.equal(tensor, wanted), (rank, name)


def test_chunks_do_not_change_the_values(monkeypatch):
    expected = whole()
    monkeypatch.setattr(init, "chunk_size", lambda device: 4)
    assert all(torch.equal(found, expected[name]) for name, found in whole().items())


def test_an_initializer_of_ones_own_draws_by_a_generator_of_the_cpu():
    generator = torch.Generator().manual_seed(init.tensor_seed(3, "alone"))
    assert torch.equal(whole()["alone"], torch.rand(3, generator=generator))


def test_the_generator_of_older_runs_draws_whole_tensors():
    found = whole("generator")
    generator = torch.Generator().manual_seed(init.tensor_seed(3, "rows.weight"))
    assert torch.equal(found["rows.weight"], torch.randn(7, 10, generator=generator) * 0.5)
    assert not torch.equal(found["rows.weight"], whole()["rows.weight"])
