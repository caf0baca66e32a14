"""Weights of SiT (arXiv:2401.08740): a file of the original DiT, trained for another objective.

Names and shapes are the original DiT's (`original_dit`). The network sees the time, from 0 (noise)
to 1 (data), unscaled, and predicts data - noise. Released networks have twice as many output
channels as a latent has; the second half is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_dit.config.section import UserError, show
from titan_dit.diffusion.keys import RectifiedFlowKeys

FIXED: Mapping[str, Any] = {"direction": "to_data", "time_scale": 1.0}
"""Keys of [objective] that define SiT's time and velocity."""
OBJECTIVE: Mapping[str, Any] = {"name": "rectified_flow", "timesteps": "uniform", **FIXED}
"""[objective] of the released weights."""
ARGUMENTS: Mapping[str, Any] = {"path_type": "Linear", "prediction": "velocity"}
"""Arguments of its train.py, and the values that correspond to `OBJECTIVE`."""


def wrote(arguments: Mapping[str, Any]) -> bool:
    """True if the arguments in a file are those of SiT's train.py."""
    return "path_type" in arguments or str(arguments.get("model", "")).startswith("SiT-")


def is_named(path: str) -> bool:
    """True if the name of a file says that it is SiT's, such as SiT-XL-2-256.pt."""
    return re.search(r"(?<![a-z])sit(?![a-z])", Path(path).name, re.IGNORECASE) is not None


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse weights of another path or prediction."""
    for key, value in ARGUMENTS.items():
        if (given := arguments.get(key, value)) != value:
            flag = key.replace("_", "-")
            raise UserError(f"SiT's --{flag} {given}: titan_dit has {flag} {value} only.")


def fits(objective: Mapping[str, Any]) -> bool:
    """True if SiT's code uses a network of an [objective] as it was trained."""
    return not misfits(objective)


def misfits(objective: Mapping[str, Any]) -> list[str]:
    """Keys of an [objective] whose values differ from SiT's, as "key=value, not value"."""
    wanted = {"name": OBJECTIVE["name"], **FIXED}
    if objective["name"] != wanted["name"]:
        wanted = {"name": wanted["name"]}
    # A key that did not exist yet had its default.
    given = {key: objective.get(key, getattr(RectifiedFlowKeys, key)) for key in wanted}
    return [
        f"{key}={show(given[key])}, not {show(value)}"
        for key, value in wanted.items()
        if given[key] != value
    ]


def check_expressible(objective: Mapping[str, Any]) -> None:
    """Raise UserError for an objective that SiT's code would misinterpret; name its keys."""
    if found := misfits(objective):
        raise UserError(
            f"[objective] {'; '.join(found)}: SiT's time runs from noise (0) to data (1), and its "
            "network predicts the velocity data - noise. The weights cannot be converted; train "
            "with SiT's values."
        )
