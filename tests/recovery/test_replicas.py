import pytest
import torch

from titan_dit.recovery.replicas import digest, way_out


def flipped(tensor, element, bit):
    other = tensor.clone()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    other.view(integers).view(-1)[element] ^= torch.tensor(1, dtype=integers) << bit
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_single_bit_changes_the_digest(dtype):
    tensor = torch.randn(5, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = range(8 * tensor.element_size())
    assert digest(tensor) == digest(tensor.clone())
    for element in range(65):
        assert all(digest(flipped(tensor, element, bit)) != digest(tensor) for bit in bits)


def test_the_order_of_elements_and_chunks_counts():
    tensor = torch.zeros(2**15 + 100)
    tensor[:2] = torch.tensor([1.0, 2.0])
    swapped = tensor.clone()
    swapped[:2] = torch.tensor([2.0, 1.0])
    assert digest(swapped) != digest(tensor)
    # The same place of another chunk.
    late = [flipped(torch.zeros_like(tensor), place, 3) for place in (7, 2**15 + 7, 2**15 + 99)]
    assert len({digest(tensor).item() for tensor in late}) == 3


def test_the_way_out_is_that_of_the_moment():
    drawn, anyhow = way_out(0, "generator"), way_out(0, "counter")
    assert drawn.startswith('at the start. Set [job] initial_weights = "counter", and take the')
    assert "Set" not in anyhow
    assert anyhow.startswith("at the start. If the model has none of its own, leave that machine")
    loaded, saving = way_out(7, "counter"), way_out(7, None)
    assert loaded.startswith("as loaded from the checkpoint of step 7")
    assert "Resume" not in loaded
    assert saving.startswith("at step 7. Resume from a checkpoint: the same command does")


def test_minus_zero_is_not_zero_and_nan_is_itself():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([torch.nan])) == digest(torch.tensor([torch.nan]))
    assert digest(torch.empty(0)) == 0
