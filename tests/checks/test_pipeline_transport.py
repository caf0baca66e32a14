"""[pipeline] transport and network: where they have an effect, and what this host has."""

import pytest
import torch
from plans import check, planned

from titan_dit.checks import pipeline, validate
from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError

RUN_TIME = {"order": "run_time"}


@pytest.mark.parametrize("order", ["planned", "mine.csv"])
@pytest.mark.parametrize("keys", [{"transport": "shared_memory"}, {"network": "ib0"}])
def test_a_planned_order_takes_neither_transport_nor_network(order, keys):
    (key,) = keys
    with pytest.raises(UserError, match=rf"\[pipeline\] {key}=.*order=.*leave out {key}\."):
        pipeline.check_transport(PipelineConfig(order=order, **keys))
    pipeline.check_transport(PipelineConfig(order=order))


def test_the_checks_of_a_run_include_them():
    with pytest.raises(UserError, match='transport="nixl": order="planned" sends by'):
        check(pipeline={"transport": "nixl"})


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_only_nixl_takes_a_network(transport):
    keys = PipelineConfig(transport=transport, network="lo", **RUN_TIME)
    with pytest.raises(UserError, match=f'network="lo" is for nixl, but transport="{transport}"'):
        pipeline.check_transport(keys)


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_a_missing_nixl_is_named_with_its_extra(transport, monkeypatch):
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    keys = PipelineConfig(transport=transport, network="lo", **RUN_TIME)
    pipeline.check_transport(keys)
    with pytest.raises(UserError, match=r"not installed. Run pip install 'titan_dit\[rdma\]'"):
        pipeline.check_transport_of_host(keys)
    pipeline.check_transport_of_host(PipelineConfig(**RUN_TIME))


def test_a_network_must_be_one_of_this_host(monkeypatch):
    monkeypatch.setattr(pipeline, "find_spec", lambda name: object())
    for network in ("lo", "127.0.0.1", ""):
        pipeline.check_transport_of_host(PipelineConfig(network=network, **RUN_TIME))
    for network in ("ib9", "192.0.2.1"):
        with pytest.raises(UserError, match=rf'"{network}" is neither .* lo \(127.0.0.1\)'):
            pipeline.check_transport_of_host(PipelineConfig(network=network, **RUN_TIME))


def test_a_run_asks_the_host_before_the_build(monkeypatch):
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    config, plan = planned({"pp": 2}, pipeline={"transport": "nixl", **RUN_TIME})
    with pytest.raises(UserError, match="the package nixl is not installed"):
        validate(config, plan, torch.device("cpu"))
