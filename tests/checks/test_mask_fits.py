"""Masks and query groups that no layout could run are refused."""

from dataclasses import replace

import pytest
from plans import planned

from titan_dit.checks.layout import check_context, check_tensor
from titan_dit.config.section import UserError


def with_spec(plan, **changes):
    return replace(plan, spec=replace(plan.spec, **changes))


def test_a_ring_is_refused_where_lengths_mask():
    _, plan = planned({"cp": 2}, parallel={"cp_method": "ring"})
    check_context(plan)
    with pytest.raises(UserError) as caught:
        check_context(with_spec(plan, mask="lengths"))
    assert str(caught.value) == (
        '[parallel] cp=2 with cp_method="ring" supports no mask by lengths, but the model "dit" '
        'has one. Set cp_method = "ulysses".'
    )
    ulysses = planned({"cp": 2}, parallel={"cp_method": "ulysses"})[1]
    for mask in ("causal", "lengths"):
        check_context(with_spec(planned()[1], mask=mask))
        check_context(with_spec(ulysses, mask=mask))


def test_a_causal_ring_needs_two_chunks_for_each_rank():
    _, plan = planned({"cp": 4}, parallel={"cp_method": "ring"})
    check_context(with_spec(plan, mask="causal"))
    check_context(with_spec(plan, num_tokens=20))
    with pytest.raises(UserError) as caught:
        check_context(with_spec(plan, mask="causal", num_tokens=20))
    assert str(caught.value) == (
        '[parallel] cp=4 with cp_method="ring" and a causal mask gives each rank two chunks of a '
        "sample, but 8 chunks do not divide its 20 tokens. Set "
        'cp_method = "ulysses", or a multiple of 8 tokens.'
    )


def test_query_groups_divide_by_tp_and_heads_by_groups():
    _, plan = planned({"tp": 2})
    check_tensor(with_spec(plan, num_key_value_heads=2))
    with pytest.raises(UserError, match=r"tp=2 does not divide the model's query groups of 1\. Se"):
        check_tensor(with_spec(plan, num_key_value_heads=1))
    with pytest.raises(UserError) as caught:
        check_tensor(with_spec(plan, num_key_value_heads=3))
    assert str(caught.value) == (
        "[model] num_key_value_heads=3 does not divide num_heads=4. Set num_key_value_heads = 2, "
        "or leave it out for one per head."
    )
