"""Ranks whose configs differ are refused, with the first difference."""

import pytest
from tiny import tiny_config

from titan_dit.config.section import UserError
from titan_dit.opening import check_same_config, shared_keys


def gather_with(other):
    """An all-gather over this rank and one whose config is `other`."""
    import hashlib
    import json

    tables = shared_keys(other)
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
    return lambda value: [value, digest if isinstance(value, str) else tables]


def test_another_value_is_named_with_both_ranks():
    mine, other = tiny_config(), tiny_config(checkpoint={"every": 7}, metrics={"every": 9})
    with pytest.raises(UserError) as found:
        check_same_config(mine, gather_with(other))
    text = str(found.value)
    assert "every=" in text
    assert "on rank 0, but" in text
    assert "on rank 1 (1 more keys differ). Launch the same command" in text


def test_equal_configs_and_another_network_interface_pass():
    check_same_config(tiny_config(), gather_with(tiny_config()))
    check_same_config(tiny_config(), gather_with(tiny_config(pipeline={"network": "ib1"})))
