"""`convert` shows what it verifies and writes."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from titan_dit.checkpoint import checkpoint
from titan_dit.commands import convert
from titan_dit.interop import tensor_file
from titan_dit.system import progress

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "dit_reference.safetensors"


def test_a_long_job_shows_what_is_verified_and_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    numbers = load_file(FIXTURE).items()
    torch.save(
        {k.removeprefix("model."): v for k, v in numbers if k.startswith("model.")}, "original.pt"
    )
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "RENEWED_S", 0.001)
    monkeypatch.setattr(checkpoint, "commit", slow(checkpoint.commit))
    convert.main(convert.ConvertFlags(input="original.pt", out="imported", heads=4))
    assert re.search(r"^writing imported  [\d.]+k/[\d.]+k ", capfd.readouterr().err, re.MULTILINE)
    monkeypatch.setattr(tensor_file.torch, "save", slow(torch.save))
    convert.main(convert.ConvertFlags(input="imported", out="shown.pt"))
    shown = capfd.readouterr().err
    assert re.search(r"^verified imported  ([\d.]+k)/\1 ", shown, re.MULTILINE)
    assert re.search(r"^writing shown.pt  [\d.]+k/[\d.]+k ", shown, re.MULTILINE)


def slow(call):
    def slowly(*given, **named):
        result = call(*given, **named)
        time.sleep(0.1)
        return result

    return slowly


def test_a_base_that_cannot_be_compared_is_named_with_its_own_error(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = SimpleNamespace(quantized={"w"}, lora=SimpleNamespace(base="nf4"))
    for init in ("", "gone"):
        record = {"config": {"checkpoint": {"init": init}}}
        convert.say_base(SimpleNamespace(saved=saved, record=record))
    alone, other = capsys.readouterr().out.splitlines()
    assert alone.endswith("base nf4: 1 weights, decoded once")
    assert "decoded once; not compared with the weights of init: [checkpoint] init gone" in other
