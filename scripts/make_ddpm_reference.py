"""Write tests/fixtures/ddpm_reference.safetensors with the original DiT's own diffusion.

Run once, in a checkout of facebookresearch/DiT (commit ed81ce2):
`PYTHONPATH=. python .../scripts/make_ddpm_reference.py`. See tests/fixtures/README.md.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusion import create_diffusion  # type: ignore[import-not-found]
from safetensors.torch import save_file
from torch import Tensor

TARGET = (
    Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "ddpm_reference.safetensors"
)
SHAPE = (3, 4, 4, 4)


def stand_in(x: Tensor, t: Tensor, channels: int = 8) -> Tensor:
    """A fake network for standard normal data, as in tests/diffusion/test_original_diffusion.py."""
    s = (t.float() / 1000).view(-1, 1, 1, 1)
    a = (1 - torch.exp(-0.1 * s - 10 * s * s)).sqrt()
    eps = a * x + 0.1 * torch.sin(2 * x.roll(1, 1))
    return torch.cat((eps, torch.tanh(x + a)), 1)[:, :channels]


def draw(
    respacing: str, loop: str, z: Tensor, fresh: Tensor, eta: float | None = None, **kind: Any
) -> Tensor:
    """Samples of `loop` from the initial noise `z`, with `fresh[k]` as the noise of step k."""
    diffusion = create_diffusion(respacing, **kind)
    channels = 8 if kind.get("learn_sigma", True) else 4
    drawn = [fresh[k] for k in reversed(range(diffusion.num_timesteps))]
    more = {} if eta is None else {"eta": eta}
    with mock.patch.object(torch, "randn_like", side_effect=drawn):
        samples: Tensor = getattr(diffusion, loop)(
            partial(stand_in, channels=channels),
            SHAPE,
            noise=z,
            clip_denoised=False,
            device="cpu",
            **more,
        )
    return samples


def main() -> None:
    """Write samples and losses of every variant that the tests compare."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    z, fresh = torch.randn(SHAPE), torch.randn(25, *SHAPE)
    out = {"z": z, "fresh": fresh}
    ancestral, ddim, cosine = "p_sample_loop", "ddim_sample_loop", "squaredcos_cap_v2"
    out["ancestral_25"] = draw("25", ancestral, z, fresh)
    out["ancestral_7"] = draw("7", ancestral, z, fresh)
    out["ddim_20_eta_half"] = draw("ddim20", ddim, z, fresh, eta=0.5)
    out["ddim_25"] = draw("ddim25", ddim, z, fresh)
    out["cosine_ancestral_25"] = draw("25", ancestral, z, fresh, noise_schedule=cosine)
    out["x_ancestral_25"] = draw("25", ancestral, z, fresh, predict_xstart=True)
    out["fixed_ancestral_25"] = draw("25", ancestral, z, fresh, learn_sigma=False)
    x0, noise = torch.randn(6, 4, 4, 4) * 0.5, torch.randn(6, 4, 4, 4)
    x0[0, 0, 0] = torch.tensor([-1.0, 1.0, -0.9995, 0.9995])
    t = torch.tensor([0, 1, 17, 333, 700, 999])
    out |= {"x0": x0, "noise": noise, "t": t}
    kinds: dict[str, dict[str, Any]] = {
        "linear": {},
        "cosine": {"noise_schedule": cosine},
        "x": {"predict_xstart": True},
    }
    for name, kind in kinds.items():
        terms = create_diffusion("", **kind).training_losses(stand_in, x0, t, noise=noise)
        out |= {f"{name}_{part}": terms[part] for part in ("mse", "vb", "loss")}
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, TARGET)


if __name__ == "__main__":
    main()
