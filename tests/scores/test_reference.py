"""References of `evaluate`: moments of files, ADM's pictures with moments, and wrong arrays."""

import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from refusals import refused

from titan_dit.config.section import UserError
from titan_dit.scores import reference, score
from titan_dit.scores.features import Features
from titan_dit.scores.moments import Moments

SIZE, WIDTH, WHOLE = 8, 3, 5000


def network(name, width=WIDTH):
    """Features: the mean colour, and zeros up to `width`."""

    def extract(rows):
        colours = rows.float().mean((2, 3))
        return torch.nn.functional.pad(colours, (0, width - 3)), None

    return Features(name, "0" * 64, extract)


INCEPTION = network("inception")


def opened(path, features=INCEPTION, names=("fid",)):
    return reference.open_reference(str(path), SIZE, features, names, "--reference")


def described(count, seed):
    rng = torch.Generator().manual_seed(seed)
    rows = 100 + 30 * torch.randn(count, WIDTH, generator=rng).double()
    return score.statistics_of(rows, None)


def some_pictures(count=40):
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def save_as_adm(path, whole, **more):
    """Part of a dataset's pictures, and the moments of all."""
    moments = {"mu": whole.moments.mean.numpy(), "sigma": whole.moments.covariance.numpy()}
    np.savez(path, arr_0=some_pictures(), **moments, **more)
    return path


def test_moments_are_kept_as_files(tmp_path):
    file, made_by, real = tmp_path / "real.npz", network("own:features"), described(WHOLE, 0)
    with file.open("wb") as stream:
        reference.save_moments(stream, real, made_by, SIZE)
    found = opened(file, made_by)
    assert found.moments.count == WHOLE
    torch.testing.assert_close(found.moments.covariance, real.moments.covariance)
    with pytest.raises(UserError, match=r"but the features are other:features"):
        opened(file, network("other:features"))
    said = refused(lambda: reference.open_reference(str(file), 16, made_by, ["fid"], "--reference"))
    assert said.startswith(f"--reference {file} is of pictures of 8 x 8 pixels, but the drawn")
    with pytest.raises(UserError, match="holds moments only, but kid, prdc needs pictures"):
        opened(file, made_by, ["prdc", "kid"])
    # As ADM writes them: no count, no name; `size` is not of pictures there.
    np.savez(file, mu=np.zeros(WIDTH), sigma=np.eye(WIDTH), size=np.array([9, 9]))
    found = opened(file)
    torch.testing.assert_close(found.moments.covariance, torch.eye(WIDTH).double())
    with pytest.raises(UserError, match="does not say which features"):
        opened(file, made_by)


def test_moments_beside_a_references_pictures_are_those_of_fid(tmp_path):
    drawn, whole = described(300, 1), described(WHOLE, 2)
    file = save_as_adm(tmp_path / "adm.npz", whole)
    expected = score.frechet(drawn.moments, whole.moments)
    rows = torch.from_numpy(some_pictures())
    of_pictures = Moments.of(INCEPTION(rows)[0])
    assert score.frechet(drawn.moments, of_pictures) > expected * 2
    for names in (["fid"], ["fid", "prdc"]):
        real = reference.reference_statistics(INCEPTION, opened(file, names=names), names)
        found = score.score(score.statistics_of(INCEPTION(rows)[0], None), real, names, "inception")
        own = score.frechet(of_pictures, whole.moments)
        assert found["fid"] == pytest.approx(own, rel=1e-5), names
        assert found.get("recall", 1) == 1, "prdc: of the file's pictures against themselves"
    # Without Inception the moments are of other features: all comes from the pictures.
    for features, more in ((network("own:x"), {}), (INCEPTION, {"features": "own:x 123"})):
        other = save_as_adm(tmp_path / "other.npz", whole, **more)
        real = reference.reference_statistics(features, opened(other, features), ["fid"])
        torch.testing.assert_close(real.moments.mean, of_pictures.mean)


def test_a_reference_of_another_size_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((3, SIZE, SIZE + 1, 3), np.uint8))
    said = refused(lambda: opened(tmp_path / "a.npz"))
    assert "a.npz is of pictures of 9 x 8 pixels, but the drawn ones have 8 x 8. Give" in said


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


WRONG = {
    "width": ({"mu": np.zeros(4), "sigma": np.eye(4)}, r"mu is float64 [4] and sigma float64 [4, "),
    "not square": (
        {"sigma": np.zeros((3, 2))},
        "mu is float64 [3] and sigma float64 [3, 2]. Those of inception are",
    ),
    "no dimension": ({"mu": np.float64(3)}, "mu is float64 [] and sigma"),
    "text": ({"mu": np.array(["a", "b", "c"])}, "mu is <U1 [3]"),
    "nan": ({"mu": np.array([0, np.nan, 0])}, "mu or sigma is not finite"),
    "no covariance": ({"sigma": np.arange(9.0).reshape(3, 3)}, "sigma is not symmetric"),
    "objects": ({"mu": np.array([1, None, 3])}, "mu cannot be read (it holds Python objects"),
    "count": ({"count": np.array([3, 4])}, "count is int64 [2], not an integer of at least 2"),
    "few": ({"count": np.array(1)}, "count is 1, not an integer of at least 2"),
    "negative": ({"sigma": np.diag([3, 4, -1.0])}, "sigma has a negative eigenvalue"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("pictures", [False, True])
def test_wrong_moments_are_one_line(case, pictures, tmp_path):
    arrays, message = WRONG[case]
    given = {"mu": np.zeros(WIDTH), "sigma": np.eye(WIDTH)} | arrays
    given |= {"arr_0": some_pictures()} if pictures else {}
    file = save(tmp_path / "a.npz", **given)
    said = refused(lambda: opened(file))
    assert said.startswith(f"--reference {file}: {message}"), said
    np.savez_compressed(file, **given)
    with pytest.raises(UserError, match=r"^--reference "):
        opened(file)


def test_wrong_labels_and_damaged_files_are_one_line(tmp_path):
    rows = some_pictures(5)
    for labels in (np.eye(5), np.arange(4), np.arange(5.0), np.arange(5)[:, None]):
        file = save(tmp_path / "a.npz", arr_0=rows, arr_1=labels)
        said = refused(lambda file=file: opened(file))
        assert f"arr_1 is {labels.dtype} {list(labels.shape)}, not the class numbers of 5" in said
    file = save(tmp_path / "a.npz", arr_0=rows, arr_1=np.array([3, 1, 3, -1, 3]))
    assert opened(file).classes == {"1": 1, "3": 3}
    for write in (np.savez, np.savez_compressed):
        write(file, arr_0=rows)
        plain = opened(file).digest()
        write(file, arr_0=np.asfortranarray(rows))
        assert opened(file).digest() == plain
        assert torch.equal(opened(file).read(range(2, 4)), torch.from_numpy(rows[2:4]))
        write(file, arr_0=rows)
        data = bytearray(file.read_bytes())
        at = data.index(b"arr_0.npy") + 9
        data[at : at + 40] = b"\xff" * 40
        file.write_bytes(data)
        assert "arr_0 cannot be read (" in refused(lambda: opened(file))


def test_a_compressed_array_that_unpacks_to_too_much_is_not_read(tmp_path):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, arr_0=np.zeros((70, 1000, 1000, 3), np.uint8))
    said = refused(lambda: opened(file))
    assert f"{file}: arr_0 cannot be read (210,000,000 bytes from " in said
    assert "save it without compression: numpy.savez. If it is no" in said
    assert said.endswith("set TITAN_DIT_LIMITS=4).")


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_header_that_unpacks_to_much_is_not_unpacked(kind, tmp_path):
    file, size = tmp_path / "a.npz", 64 << 20
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("arr_0.npy", b"\x93NUMPY\2\0" + struct.pack("<I", size) + b" " * size)
    tracemalloc.start()
    said = refused(lambda: opened(file))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert f"{file}: arr_0 cannot be read (" in said
    assert peak < 4 << 20
