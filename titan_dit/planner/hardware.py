"""Devices, nodes and links as data: hardware/*.toml, or a file of the user's own.

Bandwidths are per direction, in GB/s (1e9 bytes); `copy_gb_per_s` counts bytes read plus written.
Peaks are those of data sheets. What of them is reached is in `Efficiency`, from a calibration;
of the link to the host and of its memory, which no calibration fits, `host_gb_per_s` and
`host_memory_gb_per_s` are what is reached.
A file has the keys of `Device`; [sources] says where each number is from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from titan_dit.config import did_you_mean, toml_text
from titan_dit.config.section import (
    Bound,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
    conform,
    hints_of,
    show,
)
from titan_dit.system.files import write_whole

FOLDER = Path(__file__).parent / "hardware"
EXAMPLE = "h100"
"""The device whose values stand in messages about a missing key."""
FORMATS = ("fp64", "fp32", "fp16", "bf16", "float8")
Share = Annotated[float, Bound(above=0, most=1)]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that software reaches, 0 to 1. A calibration fits them."""

    products: Share
    """Large matrix products / peak FLOP/s."""
    attention: Share
    """Fused attention (forward, head dim 128, long sequences) / peak FLOP/s."""
    moved: Share
    """Elementwise kernels / copy rate."""
    inner: Share
    """Collectives inside a node / bandwidth of the link."""
    node: Share
    """Collectives across nodes / bandwidth of the link."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Device memory besides torch's tensors. A calibration of memory fits it."""

    context_mib: NonNegativeFloat
    """CUDA context, kernels and libraries."""
    communicator_mib: NonNegativeFloat
    """Buffers of one NCCL communicator."""
    allocator: Annotated[float, Bound(least=1, below=float("inf"))]
    """Reserved over allocated bytes, at least 1: rounding and fragments of the allocator."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, its node and its links."""

    name: str
    memory_gib: PositiveFloat
    """Memory that torch reports, see `dry_run.report.DEVICES_GIB`."""
    peak_tflops: Mapping[str, float]
    """Dense peak by format: "fp64", "fp32", "fp16", "bf16", "float8"."""
    copy_gb_per_s: PositiveFloat
    gpus_per_node: PositiveInt
    inner_gb_per_s: Mapping[int, float]
    """Bandwidth of a rank inside a node, by the size of its group; see `inner`."""
    inner_latency_us: NonNegativeFloat
    """Latency of one hop inside a node."""
    nics_per_node: NonNegativeInt
    """NICs of a node; 0 if there is only one node."""
    nic_gb_per_s: NonNegativeFloat
    """Bandwidth of one NIC."""
    node_latency_us: NonNegativeFloat
    """Latency of one hop between nodes."""
    launch_us: NonNegativeFloat
    """Host time of one kernel."""
    host_gb_per_s: NonNegativeFloat = 0.0
    """Bandwidth of copies between a GPU and its host's pinned memory, in each direction; 0: not
    known, and [offload] has no price."""
    host_memory_gb_per_s: NonNegativeFloat = 0.0
    """Measured memory bandwidth of a node's CPUs, bytes read plus written. A full node's ranks
    share it evenly. 0: not known, and [offload] parameters has no price."""
    efficiency: Efficiency
    overhead: Overhead
    error: Fraction
    """Relative error to expect of a step's time. For a calibrated device it is the median
    leave-one-out error; else the error seen on devices of which only the data sheet was known."""
    torch_name: str = ""
    """The name that torch reports. [precision] float8_layers = "auto" depends on it."""
    head_step: PositiveInt = 32
    """Fused attention computes head dims that are multiples of it. FlashAttention-2: 72 as 96;
    cuDNN on Hopper: 72 as 128."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key, or table.key -> where its number is from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions that a calibration was measured with: torch, titan_dit, the driver."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Rows of a calibration: case -> its measured and its fitted time."""

    def inner(self, ranks: int) -> float:
        """GB/s of a rank inside a node in a group of `ranks`: the entry of the next smaller size.

        Infinite with one GPU a node: nothing is sent inside it.
        """
        if not self.inner_gb_per_s:
            return math.inf
        known = [size for size in self.inner_gb_per_s if size <= ranks]
        return self.inner_gb_per_s[max(known, default=min(self.inner_gb_per_s))]

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a format; UserError if the device lacks it."""
        if dtype not in self.peak_tflops:
            key = "float8" if dtype == "float8" else "dtype"
            others = [known for known in self.peak_tflops if known != "float8"]
            fix = '"off"' if dtype == "float8" else " or ".join(map(show, others))
            raise UserError(
                f"[precision] {key}: device {self.name} has no {dtype}, only "
                f"{', '.join(self.peak_tflops)}. Set [precision] {key} = {fix}, or plan for "
                "another device."
            )
        return 1e12 * self.peak_tflops[dtype]

    @functools.cached_property
    def _hash(self) -> int:
        peaks, inner = sorted(self.peak_tflops.values()), sorted(self.inner_gb_per_s.values())
        return hash((self.copy_gb_per_s, self.efficiency, self.launch_us, *peaks, *inner))

    def __hash__(self) -> int:
        """Hash of the rates, computed once: times are cached by device, mappings have no hash."""
        return self._hash


def names() -> tuple[str, ...]:
    """The devices of the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def device_of(name: str) -> Device:
    """A device by its name, or by the path of a file. Raises UserError."""
    if name in names():
        return read(FOLDER / f"{name}.toml")
    if Path(name).is_file():
        return read(Path(name))
    if name.endswith(".toml") or "/" in name:
        raise UserError(
            f"--device {name}: no such file. Known devices: {', '.join(names())}; "
            "--calibrate writes a file of your own."
        )
    longer = [known for known in names() if known.startswith(name.lower())]
    near = f" Did you mean {' or '.join(longer)}?" if longer else ""
    raise UserError(
        f"--device {name}: unknown device.{near or did_you_mean.for_value(name, names())} "
        f"Known: {', '.join(names())}, or the path of a .toml file."
    )


def read(path: Path) -> Device:
    """Read a device's file; UserError names the file, the key and what to write."""
    tables = toml_text.parse(path)
    device: Device = build(tables, Device, str(path), "")
    check_device(device, str(path))
    return device


def build(table: Mapping[str, Any], kind: Any, file: str, prefix: str) -> Any:
    """The dataclass `kind` from a table of a file; `prefix`: "[table] " in messages.

    Raises UserError for an unknown or missing key.
    """
    hints = hints_of(kind)
    for key in table:
        if key not in hints:
            hint = did_you_mean.nearest(key, hints)
            raise UserError(f"{file}: {prefix}{key}: unknown key.{hint}")
    for f in dataclasses.fields(kind):
        has_default = f.default is not f.default_factory  # Both are MISSING without one.
        if f.name not in table and not has_default:
            raise UserError(f"{file}: {missing(f.name, prefix)}")
    return kind(
        **{key: value_of(value, hints[key], file, prefix, key) for key, value in table.items()}
    )


def value_of(value: object, hint: Any, file: str, prefix: str, key: str) -> Any:
    """A value of a file, checked and converted to its field's type.

    Raises UserError for another type.
    """
    is_table = dataclasses.is_dataclass(hint) or get_origin(hint) is Mapping
    if not is_table:
        return conform(value, hint, f"{file}: {prefix}{key}")
    if not isinstance(value, dict):
        raise UserError(f"{file}: {key}={show(value)} must be a table: write [{key}].")
    if dataclasses.is_dataclass(hint):
        return build(value, hint, file, f"[{key}] ")
    return {
        entry_key(name, hint, file, key): conform(item, item_hint(hint), f"{file}: [{key}] {name}")
        for name, item in value.items()
    }


def entry_key(name: str, hint: Any, file: str, table: str) -> Any:
    """The key of a mapping: a group size in [inner_gb_per_s], else text.

    Raises UserError for other text there.
    """
    if get_args(hint)[0] is not int:
        return name
    if not name.isdecimal():
        raise UserError(
            f"{file}: [{table}] {name} is not the number of ranks of a group. Write it as 8."
        )
    return int(name)


def item_hint(hint: Any) -> Any:
    """The type of a mapping's values; numbers are bandwidths or peaks, above 0."""
    kind = get_args(hint)[1]
    return PositiveFloat if kind is float else kind


def missing(key: str, prefix: str) -> str:
    """Error text for a missing key, with the example device's value."""
    example: Any = toml_text.parse(FOLDER / f"{EXAMPLE}.toml")
    if prefix:
        example = example[prefix.strip("[] ")]
    value = example[key]
    if isinstance(value, dict):
        return f"[{key}] is missing. Write the table; {EXAMPLE} has {show(value)}."
    return f"{prefix}{key} is missing. Write {key} = {show(value)}, as {EXAMPLE} has it."


def check_device(device: Device, file: str) -> None:
    """Raise UserError, with the name of a file, about values that are out of range or lack a link.

    Values that were not read from a file, such as those of a fit, are checked, too.
    """
    for key, value, hint in numbers(device):
        conform(value, hint, f"{file}: {key}")
    for name in device.peak_tflops:
        if name not in FORMATS:
            hint = did_you_mean.nearest(name, FORMATS)
            raise UserError(f"{file}: [peak_tflops] {name}: unknown format.{hint}")
    if not device.peak_tflops:
        raise UserError(f"{file}: [peak_tflops] is empty. Write bf16 = 989.0, the dense peak.")
    sizes, gpus = device.inner_gb_per_s, device.gpus_per_node
    if gpus > 1 and 2 not in sizes:
        raise UserError(
            f"{file}: [inner_gb_per_s] has no link for 2 ranks. Write 2 = 450.0, the GB/s of a "
            "rank per direction; a larger group takes the next smaller size."
        )
    if wrong := [size for size in sizes if not 2 <= size <= gpus]:
        raise UserError(
            f"{file}: [inner_gb_per_s] {wrong[0]}: a group inside a node has 2 to "
            f"gpus_per_node={gpus} ranks. Leave it out."
        )
    if device.nics_per_node and not device.nic_gb_per_s:
        raise UserError(
            f"{file}: nics_per_node={device.nics_per_node} needs nic_gb_per_s above 0. Write "
            "nic_gb_per_s = 50.0, the GB/s of one NIC per direction, or nics_per_node = 0."
        )


def numbers(device: Device) -> Iterator[tuple[str, float, Any]]:
    """(key, value, type) of every number of a device, its tables' as "table.key"."""
    for name, hint in hints_of(Device).items():
        value = getattr(device, name)
        if dataclasses.is_dataclass(hint):
            for key, of_key in hints_of(hint).items():  # type: ignore[arg-type]
                yield f"{name}.{key}", getattr(value, key), of_key
        elif isinstance(value, Mapping):
            if item_hint(hint) is PositiveFloat:
                yield from ((f"{name}.{key}", item, PositiveFloat) for key, item in value.items())
        elif not isinstance(value, str):
            yield name, value, hint


def write(device: Device, path: Path) -> None:
    """Write a device as TOML, which `read` reads back to an equal one. Raises UserError."""
    check_device(device, str(path))
    plain, tables = [], []
    for name, value in dataclasses.asdict(device).items():
        if isinstance(value, dict):
            if value:
                entries = (f"{toml_key(key)} = {show(item)}" for key, item in value.items())
                tables += ["", f"[{name}]", *entries]
        else:
            plain.append(f"{name} = {show(value)}")
    write_whole(path, "\n".join([*plain, *tables, ""]))


def toml_key(key: object) -> str:
    """A key of a table, in quotes unless it is a plain word."""
    text = str(key)
    return text if text.replace("_", "").isalnum() and text.isascii() else show(text)
