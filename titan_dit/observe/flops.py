"""Model FLOPs utilisation: the model's FLOPs per second over the device's peak."""

from __future__ import annotations

import torch

# Dense bf16 tensor-core peaks in TFLOP/s, from the vendors' data sheets; the longest match wins.
PEAK_BF16_TFLOPS = {
    "A100": 312,
    "A800": 312,
    "H20": 148,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "L40S": 362,
    "B200": 2250,
    "GB200": 2500,
}


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """The device's peak for "bf16", or None where it is not known (a CPU, fp32)."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [known for known in PEAK_BF16_TFLOPS if known in name]
    return PEAK_BF16_TFLOPS[max(matches, key=len)] if matches else None
