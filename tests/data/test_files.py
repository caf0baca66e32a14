import pickle

import numpy as np
import pytest
import torch
from folders_of_files import save
from safetensors.torch import save_file

from titan_dit.data import files
from titan_dit.data.files import BadFileError, read_label, read_latent

LATENT = torch.arange(32.0).view(2, 4, 4) - 3


def reason(path, shape=None):
    with pytest.raises(BadFileError) as caught:
        read_latent(path, shape)
    assert str(path) not in str(caught.value)  # The caller adds the path.
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batched", [False, True])
def test_a_latent_is_read_from_every_kind_of_file(tmp_path, suffix, dtype, batched):
    if suffix == ".npy" and dtype == torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    path = tmp_path / f"0{suffix}"
    save(path, LATENT.to(dtype)[None] if batched else LATENT.to(dtype))
    read = read_latent(path, (2, 4, 4))
    assert torch.equal(read.float(), LATENT)
    assert read.dtype == (torch.float16 if dtype == torch.float16 else torch.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(LATENT.numpy()),
        LATENT.numpy().astype(">f4"),
        LATENT.numpy().astype(">f2"),
    ],
)
def test_an_array_in_another_order_of_axes_or_bytes_is_read(tmp_path, array):
    np.save(tmp_path / "0.npy", array)
    assert torch.equal(read_latent(tmp_path / "0.npy").float(), LATENT)


def test_a_newer_npy_header_is_read(tmp_path):
    with (tmp_path / "0.npy").open("wb") as file:
        np.lib.format.write_array(file, LATENT.numpy(), version=(2, 0))
    assert torch.equal(read_latent(tmp_path / "0.npy"), LATENT)


def test_the_tensor_of_a_table_is_the_one_called_latent_or_the_only_one(tmp_path):
    torch.save({"x": LATENT}, tmp_path / "0.pt")
    torch.save({"latent": LATENT, "noise": LATENT + 1}, tmp_path / "1.pt")
    save_file({"x": LATENT}, tmp_path / "2.safetensors")
    save_file({"latent": LATENT, "noise": LATENT + 1}, tmp_path / "3.safetensors")
    for name in ("0.pt", "1.pt", "2.safetensors", "3.safetensors"):
        assert torch.equal(read_latent(tmp_path / name), LATENT)
    torch.save({"a": LATENT, "b": LATENT}, tmp_path / "4.pt")
    save_file({"a": LATENT, "b": LATENT + 1}, tmp_path / "5.safetensors")
    for name in ("4.pt", "5.safetensors"):
        assert reason(tmp_path / name) == 'holds 2 entries (a, b), none of them "latent"'


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_a_damaged_file_is_no_latent(tmp_path, suffix):
    path = tmp_path / f"0{suffix}"
    save(path, LATENT)
    data = path.read_bytes()
    for bad in (data[:-1], data[: len(data) // 2], data[:9], b"\xff" * 200, b"some text\n" * 9):
        path.write_bytes(bad)
        assert "damaged" in reason(path)
    path.write_bytes(b"")
    assert reason(path) == "empty file"


@pytest.mark.parametrize(
    "header", ["{'descr': '<f4', (", "{'descr': \n'<f4'\n\t 'x'", "1 1", "\x00", "{" * 60]
)
def test_a_header_that_is_no_python_is_a_damaged_file(tmp_path, header):
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n"
    (tmp_path / "0.npy").write_bytes(data + bytes(128))
    assert "damaged" in reason(tmp_path / "0.npy")


@pytest.mark.parametrize("shape", [(-2, -3), (0, -1), (True, 6), (2**62, 2**62, 0)])
def test_a_shape_that_no_array_has_is_a_damaged_file(tmp_path, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}"
    data = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n"
    (tmp_path / "0.npy").write_bytes(data + bytes(0 if 0 in shape else 24))
    assert "damaged" in reason(tmp_path / "0.npy")


def test_suffixes_in_capitals_are_the_same(tmp_path):
    for suffix in (".npy", ".pt", ".safetensors"):
        save(tmp_path / f"0{suffix}", LATENT)
        (tmp_path / f"0{suffix}").rename(tmp_path / f"0{suffix.upper()}")
        assert torch.equal(read_latent(tmp_path / f"0{suffix.upper()}"), LATENT)


def test_tensors_without_values_of_their_own_are_refused_and_lazy_ones_are_resolved(tmp_path):
    for i, tensor in enumerate((LATENT.to("meta"), LATENT.to_sparse())):
        torch.save(tensor, tmp_path / f"{i}.pt")
        assert "not dense" in reason(tmp_path / f"{i}.pt")
    torch.save(LATENT._neg_view(), tmp_path / "2.pt")
    assert torch.equal(read_latent(tmp_path / "2.pt"), -LATENT)


class Slow:
    """A file with short reads that ends after `length` bytes."""

    def __init__(self, file, length):
        self.file, self.left = file, length

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def fileno(self):
        return self.file.fileno()

    def readinto(self, view):
        num = self.file.readinto(view[: min(7, self.left)])
        self.left -= num
        return num


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_reads_that_give_less_than_asked_go_on_until_the_file_ends(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"0{suffix}"
    save(path, LATENT)
    opened, length = files.open_regular, path.stat().st_size
    monkeypatch.setattr(files, "open_regular", lambda path: Slow(opened(path), length))
    assert torch.equal(read_latent(path), LATENT)
    length -= 20
    assert f"only {length} of its {length + 20} bytes" in reason(path).replace(",", "")


BAD = {
    "nan": (torch.full((2, 4, 4), float("nan")), "NaN or infinity"),
    "infinity": (torch.full((2, 4, 4), float("-inf")), "NaN or infinity"),
    "one row NaN": (torch.where(LATENT == 5, float("nan"), LATENT), "NaN or infinity"),
    "flat": (LATENT.flatten(), "shape [32], not [c, h, w]"),
    "two in one": (torch.stack([LATENT, LATENT]), "shape [2, 2, 4, 4], not [c, h, w]"),
    "another shape": (LATENT[:, :2].contiguous(), "shape [2, 2, 4], not [2, 4, 4] like the other"),
    "whole numbers": (LATENT.long(), "holds torch.int64, not floating-point numbers"),
    "complex": (LATENT.to(torch.complex64), "not floating-point numbers"),
}


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_latent_is_said_in_words(tmp_path, case, suffix):
    tensor, words = BAD[case]
    save(tmp_path / f"0{suffix}", tensor)
    assert words in reason(tmp_path / f"0{suffix}", (2, 4, 4))


class Planted:
    """Touches a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return exec, (f"open({str(self.target)!r}, 'w').close()",)


def test_a_file_that_would_run_code_is_refused_and_does_not_run_it(tmp_path):
    ran = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Planted(ran)))
    assert ran.exists()  # Unsafe loading does execute it.
    ran.unlink()
    torch.save(Planted(ran), tmp_path / "0.pt")
    torch.save({"latent": LATENT, "more": Planted(ran)}, tmp_path / "1.pt")
    torch.save(Planted(ran), tmp_path / "2.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "3.pt").write_bytes(pickle.dumps(Planted(ran)))
    np.save(tmp_path / "4.npy", np.array([Planted(ran)], dtype=object), allow_pickle=True)
    for name in ("0.pt", "1.pt", "2.pt", "3.pt", "4.npy"):
        assert "loading could run code" in reason(tmp_path / name)
        assert not ran.exists(), name


def test_a_pickle_of_anything_but_tensors_is_refused(tmp_path):
    torch.save([LATENT, LATENT], tmp_path / "0.pt")
    assert reason(tmp_path / "0.pt") == "holds a list, not a tensor"
    torch.save({}, tmp_path / "1.pt")
    assert "holds 0 entries" in reason(tmp_path / "1.pt")


def test_a_label_is_one_whole_number_of_zero_or_above(tmp_path):
    for good in (np.array([7]), np.array(7, dtype=np.int32), np.array([[7.0]])):
        np.save(tmp_path / "0.npy", good)
        assert read_label(tmp_path / "0.npy") == 7
    for bad in (np.array([-1]), np.array([1, 2]), np.array([0.5]), np.array([float("nan")])):
        np.save(tmp_path / "0.npy", bad)
        with pytest.raises(BadFileError, match=r"not one label|not a class number"):
            read_label(tmp_path / "0.npy")
    for bad in (np.array([10**12]), np.array([1e30]), np.array([float("inf")]), np.array([2**31])):
        np.save(tmp_path / "0.npy", bad)
        with pytest.raises(BadFileError, match=r"not one label|not a class number"):
            read_label(tmp_path / "0.npy")
