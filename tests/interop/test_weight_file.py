import argparse
import contextlib
import os
import pickle
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from titan_dit.config.section import UserError
from titan_dit.interop import tensor_file
from titan_dit.interop.imported import new_output
from titan_dit.interop.tensor_file import read_weight_file, write_tensors

A = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
B = {"a.weight": torch.zeros(2, 3), "b": torch.zeros(2)}


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


def refused(path):
    with pytest.raises(UserError) as caught:
        read_weight_file(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, suffix, monkeypatch):
    file = tmp_path / f"a{suffix}"
    file.symlink_to("/proc/self/mem")  # A file whose first bytes are an error of the disk.
    said = refused(file)
    assert said.endswith("Input/output error. Restore it.") or "not a readable" in said
    file.unlink()
    write_tensors(file, A)
    weights = read_weight_file(file)
    broken = OSError(5, "Input/output error")
    monkeypatch.setattr(tensor_file, "safe_open", MagicMock(side_effect=broken))
    monkeypatch.setattr(torch.Tensor, "clone", MagicMock(side_effect=broken))
    with pytest.raises(UserError) as caught, new_output(tmp_path / "out"):
        weights.ema[next(iter(A))]
    assert str(caught.value) == f"{file} cannot be read: Input/output error. Restore it."


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_what_is_written_is_read(tmp_path, suffix):
    path = tmp_path / "new" / f"weights{suffix}"
    write_tensors(path, A, {"num_heads": "3"})
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    weights = read_weight_file(path)
    assert same(weights.ema, A)
    assert weights.model is weights.ema
    assert weights.adam is None
    assert weights.metadata.get("num_heads") == ("3" if suffix == ".safetensors" else None)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_training_checkpoint_of_the_original_holds_both(tmp_path):
    """A checkpoint of the original's train.py, including its argparse.Namespace."""
    arguments = argparse.Namespace(model="DiT-XL/2", global_seed=0)
    torch.save({"ema": A, "model": B, "opt": {"state": {}}, "args": arguments}, tmp_path / "a.pt")
    weights = read_weight_file(tmp_path / "a.pt")
    assert same(weights.ema, A)
    assert same(weights.model, B)


@pytest.mark.parametrize(("key", "other"), [("ema", "model"), ("model", "ema")])
def test_one_state_dict_stands_for_both(tmp_path, key, other):
    torch.save({key: A}, tmp_path / "a.pt")
    weights = read_weight_file(tmp_path / "a.pt")
    assert same(getattr(weights, key), A)
    assert getattr(weights, other) is getattr(weights, key)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_into_the_names_is_taken_off(tmp_path, wrapper):
    torch.save({wrapper + name: tensor for name, tensor in A.items()}, tmp_path / "a.pt")
    assert same(read_weight_file(tmp_path / "a.pt").model, A)
    torch.save({"a._orig_mod.weight": A["a.weight"], "b": A["b"]}, tmp_path / "blocks.pt")
    assert same(read_weight_file(tmp_path / "blocks.pt").model, A)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a.pt", A)
    before = (tmp_path / "a.pt").read_bytes()

    def full(tensors, file):
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"^--out .*a\.pt cannot be written: No space left on"):
        write_tensors(tmp_path / "a.pt", B)
    assert (tmp_path / "a.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_prefixes_in_a_safetensors_file_name_the_state_dicts(tmp_path):
    tensors = {f"model.{k}": v for k, v in B.items()} | {f"ema.{k}": v for k, v in A.items()}
    save_file(tensors | {"io.x": torch.ones(1)}, tmp_path / "a.safetensors")
    weights = read_weight_file(tmp_path / "a.safetensors")
    assert same(weights.ema, A)
    assert same(weights.model, B)


class Evil:
    """Create a file when unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
def test_a_file_that_would_execute_code_is_refused_and_does_not(tmp_path, save):
    target = tmp_path / "executed"
    save({"model": A, "extra": Evil(target)}, tmp_path / "evil.pt")
    message = refused(tmp_path / "evil.pt")
    assert "can execute code, so it was not loaded" in message
    assert "weights_only" not in message  # torch's message recommends disabling it.
    assert not target.exists()
    pickle.loads(pickle.dumps(Evil(target)))
    assert target.exists()  # Unsafe loading does execute it.


def test_damaged_and_foreign_files_are_named(tmp_path):
    torch.save(A, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in {"cut.pt": whole[:-200], "empty.pt": b"", "text.pt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)
    for name, content in {"cut.safetensors": b"\x10" * 20, "empty.safetensors": b""}.items():
        (tmp_path / name).write_bytes(content)
        assert "not a readable safetensors file" in refused(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds a list" in refused(tmp_path / "list.pt")
    torch.save({"a": 3}, tmp_path / "values.pt")
    assert "a is no dense tensor" in refused(tmp_path / "values.pt")
    torch.save({"a": torch.ones(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    assert "a is no dense tensor" in refused(tmp_path / "sparse.pt")
    torch.save({"ema": [1]}, tmp_path / "nested.pt")
    assert "ema is a list" in refused(tmp_path / "nested.pt")
    torch.save({"ema": {}}, tmp_path / "hollow.pt")
    assert "ema is empty" in refused(tmp_path / "hollow.pt")
    torch.save({"state_dict": A}, tmp_path / "deeper.pt")
    assert 'torch.save(content["state_dict"], FILE)' in refused(tmp_path / "deeper.pt")
    assert "no such file" in refused(tmp_path / "missing.pt")
    (tmp_path / "weights.bin").touch()
    assert ".pt, .pth, .safetensors" in refused(tmp_path / "weights.bin")


def adam_state(names, **changes):
    """State of AdamW(model.parameters()), the first parameter frozen."""
    state = {
        number: {"step": torch.tensor(7.0), "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
        for number in range(1, len(names))
    }
    group = {"lr": 1e-4, "betas": (0.9, 0.999), "params": list(range(len(names)))}
    return {"state": state, "param_groups": [group]} | changes


def test_moments_go_by_the_names_of_their_parameters(tmp_path):
    torch.save({"model": A, "ema": A, "opt": adam_state(A)}, tmp_path / "a.pt")
    found = read_weight_file(tmp_path / "a.pt").adam
    assert list(found) == ["b"]
    assert set(found["b"]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}},
        {"state": {}, "param_groups": [{"params": [0, 1]}]},
        {"state": {1: {"momentum": torch.ones(1)}}, "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{"params": [0]}]},
        [1, 2],
    ],
)
def test_the_state_of_another_optimizer_is_left(tmp_path, state):
    torch.save({"model": A, "opt": state}, tmp_path / "a.pt")
    assert read_weight_file(tmp_path / "a.pt").adam is None


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_cut_off_anywhere_or_with_a_flipped_byte_is_refused_or_read(tmp_path, new_format):
    torch.save(A, tmp_path / "a.pt", _use_new_zipfile_serialization=new_format)
    whole = (tmp_path / "a.pt").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(0, len(whole), (150,), generator=generator).tolist():
        flipped = bytes([whole[place] ^ 0xFF])
        for damaged in (whole[:place], whole[:place] + flipped + whole[place + 1 :]):
            (tmp_path / "a.pt").write_bytes(damaged)
            with contextlib.suppress(UserError):
                read_weight_file(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "prefix", ["_orig_mod.module.", "module._orig_mod.", "module.module.", "_orig_mod._orig_mod."]
)
def test_names_of_wrappers_are_stripped_in_whatever_order(tmp_path, suffix, prefix):
    file = tmp_path / f"a{suffix}"
    named = {f"{prefix}{name}": tensor for name, tensor in A.items()}
    torch.save(named, file) if suffix == ".pt" else save_file(named, file)
    assert same(read_weight_file(file).model, A)
    both = named | {"b": A["b"].clone()}
    torch.save(both, file) if suffix == ".pt" else save_file(both, file)
    assert "keep one of them" in refused(file)


def test_a_view_that_is_larger_than_what_is_stored_is_no_weight(tmp_path):
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "a.pt")
    assert "a is no dense tensor" in refused(tmp_path / "a.pt")
