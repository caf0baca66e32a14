"""Fused kernels of operators that were written down by hand."""

import pytest

from titan_dit.planner.rehearsal import Access, Operator, fused, moved
from titan_dit.planner.work import Product

WIDE = Product(1, 8, 8, 8, "bf16")


def op(reads, writes, work=None, name="mul", last_dim=True):
    """An operator on storages of 100 bytes; those below 0 have one byte."""

    def accesses(storages):
        return tuple(Access(s, 0, 100 if s >= 0 else 1) for s in storages)

    return Operator(name, accesses(reads), accesses(writes), work, last_dim)


def one_pass(*operators, later=()):
    return fused({"update": operators}, set(later))["update"]


def test_a_chain_reads_its_input_and_writes_its_output():
    chain = op([0], [1]), op([1], [2]), op([2], [3])
    assert sum(map(moved, chain)) == 600
    assert one_pass(*chain) == (200, 1)
    assert one_pass(*chain, later=[1]) == (300, 1)


def test_users_of_one_tensor_read_it_once():
    assert one_pass(op([0], [1]), op([0], [2])) == (300, 1)


def test_a_product_divides_kernels():
    assert one_pass(op([0], [1]), op([1], [2], WIDE), op([2], [3])) == (400, 3)
    # Its input and its output cannot be in one kernel, even if they share a tensor.
    assert one_pass(op([0], [1]), op([1], [2], WIDE), op([2, 0], [3])) == (500, 3)


def test_operators_around_an_unrelated_product_are_one_kernel():
    assert one_pass(op([0], [1]), op([5], [6], WIDE), op([1], [2])) == (200, 2)


def test_a_sum_over_tokens_ends_its_kernel():
    total = op([1], [-2], name="sum", last_dim=False)
    assert one_pass(op([0], [1]), total) == (101, 1)
    assert one_pass(op([0], [1]), total, op([-2, 1], [3])) == (402, 2)
    by_row = total._replace(last_dim=True)
    assert one_pass(op([0], [1]), by_row, op([-2, 1], [3])) == (200, 1)


def test_in_place_operators_keep_their_order():
    # What reads the old value must run before.
    assert one_pass(op([0], [1]), op([0, 2], [0], name="add_"), op([1, 0], [3])) == (400, 1)


def test_backward_computes_again_what_only_it_reads():
    forward = op([0], [1]), op([1], [2]), op([2], [3], WIDE)
    # 1 is elementwise of 0, which backward reads anyway.
    backward = (op([4, 1, 0], [5]),)
    assert fused({"forward": forward, "backward": backward}, {5}) == {
        "forward": (200, 2),
        "backward": (300, 1),
    }


@pytest.mark.parametrize("apart", ["fused_adamw_", "embedding_dense_backward"])
def test_some_kernels_are_never_fused(apart):
    assert one_pass(op([0], [1]), op([1], [2], name=apart)) == (400, 2)
