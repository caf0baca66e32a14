"""Pack a folder in one call, and damage a folder in every way that packing reports."""

import torch
from folders_of_files import latents_of, save

from titan_dit.data.packing import pack


def packed(source, output, workers=1, **how):
    """Pack; return the dropped files, None if already packed."""
    return pack.pack(pack.make_job(source, output, **how), output, workers, lambda *_: None)


def spoil(root):
    """Write one file per kind of fault; return the expected reasons."""
    nan = latents_of(1)[0]
    nan[1, 2, 3] = float("nan")
    save(root / "0000" / "1.npy", nan)
    save(root / "0000" / "2.npy", torch.zeros(4, 8, 9))
    (root / "0001" / "0.npy").write_bytes(b"")
    (root / "0001" / "3.npy").write_bytes((root / "0001" / "2.npy").read_bytes()[:-8])
    save(root / "0002" / "0.npy", torch.full((4, 8, 8), 1e5))
    save(root / "0002" / "1.npy", torch.zeros(4, 8, 8, dtype=torch.int64))
    return {
        "0000/1.npy": "holds NaN or infinity",
        "0000/2.npy": "shape [4, 8, 9], not [4, 8, 8] like the other files",
        "0001/0.npy": "empty file",
        "0001/3.npy": "not a readable .npy file: damaged, or cut off",
        "0002/0.npy": "not finite in float16: above 65504. Pack with --dtype float32",
        "0002/1.npy": "holds torch.int64, not floating-point numbers",
    }
