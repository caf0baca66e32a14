"""Write titan_dit/data/digits from scikit-learn's copy. Run once: `python scripts/make_digits.py`.

Needs scikit-learn, which titan_dit itself does not.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from titan_dit.data.latents import write_shards

TARGET = Path(__file__).resolve().parent.parent / "titan_dit" / "data" / "digits"


def main() -> None:
    """Write the shards: pixels 0..16 as pixel / 8 - 1, exact in float16."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    pixels, labels = load_digits(return_X_y=True)
    (TARGET / "manifest.json").unlink(missing_ok=True)  # write_shards never overwrites.
    write_shards(
        TARGET,
        torch.from_numpy(pixels / 8 - 1).half().view(-1, 1, 8, 8),
        torch.from_numpy(labels).long(),
        num_classes=10,
        value_range=(-1.0, 1.0),
        source=(
            "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine "
            "Learning Repository (doi:10.24432/C50P49), test set, as scikit-learn ships it"
        ),
        about={"license": "CC BY 4.0", "changes": "pixel / 8 - 1, stored as float16"},
    )


if __name__ == "__main__":
    main()
