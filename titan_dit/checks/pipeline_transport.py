"""Checks of [pipeline] transport and network, which only an order decided at run time uses."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError, show
from titan_dit.launcher.torch_range import pip_install
from titan_dit.system.addresses import address_of, interfaces


def check_keys(pipeline: PipelineConfig) -> None:
    """Refuse both keys unless order="run_time", and `network` unless the transport is nixl."""
    keys = {"transport": pipeline.transport, "network": pipeline.network}
    defaults = {"transport": "auto", "network": ""}
    set_keys = {key: value for key, value in keys.items() if value != defaults[key]}
    if set_keys and pipeline.order != "run_time":
        shown = ", ".join(f"{key}={show(value)}" for key, value in set_keys.items())
        raise UserError(
            f"[pipeline] {shown}: order={show(pipeline.order)} sends by the process group. Set "
            f'order = "run_time", or leave out {" and ".join(set_keys)}.'
        )
    if pipeline.network and pipeline.transport not in ("auto", "nixl"):
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is for nixl, but transport="
            f'{show(pipeline.transport)}. Set transport = "nixl", or network = "".'
        )


def check_host(pipeline: PipelineConfig) -> None:
    """Refuse transport="nixl" without the package, and a network that this host does not have."""
    has_nixl, install = find_spec("nixl") is not None, pip_install("'titan_dit[rdma]'")
    if pipeline.transport == "nixl" and not has_nixl:
        raise UserError(
            '[pipeline] transport="nixl": the package nixl is not installed. Run '
            f'{install}, or set transport = "auto".'
        )
    if not pipeline.network:
        return
    if not has_nixl:
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is for nixl, which is not installed. "
            f'Run {install}, or set network = "".'
        )
    names = [name for _, name in socket.if_nameindex()]  # Also those without an IPv4 address.
    if pipeline.network not in names and address_of(pipeline.network) is None:
        known = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        raise UserError(
            f"[pipeline] network={show(pipeline.network)} is neither an interface nor an address "
            f"of this host, which has {known}. Set network to one of them."
        )
