"""The tokens that a rank of a context-parallel group holds."""

import torch

from titan_dit.parallel.context import slice_tokens


def test_slices_join_to_the_whole_and_what_has_no_tokens_stays_whole():
    whole = {
        "tokens": torch.randn(2, 12, 3),
        "positions": torch.randn(12, 2),
        "timestep": torch.randn(2),
    }
    dims = {"tokens": 1, "positions": 0}
    slices = [slice_tokens(whole, dims, rank, 3) for rank in range(3)]
    for name, dim in dims.items():
        assert torch.equal(torch.cat([part[name] for part in slices], dim), whole[name])
        assert all(part[name].is_contiguous() for part in slices)
        # The whole can be freed.
        sizes = {part[name].untyped_storage().nbytes() for part in slices}
        assert sizes == {whole[name].untyped_storage().nbytes() // 3}
    assert all(part["timestep"] is whole["timestep"] for part in slices)
    assert slice_tokens({}, {}, 0, 3) == {}
