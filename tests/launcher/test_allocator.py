"""The CUDA allocator's settings of a run."""

import os
import subprocess
import sys

import pytest
import torch

from titan_dit.train import EXPANDABLE, REGISTRATION, expand_segments


def settled(*, cuda_graphs=False, **environment):
    expand_segments(environment, cuda_graphs=cuda_graphs)
    return environment


def test_segments_grow_unless_the_user_has_set_the_allocator():
    assert settled() == {"PYTORCH_ALLOC_CONF": EXPANDABLE}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        theirs = {name: "max_split_size_mb:128"}
        assert settled(**theirs) == theirs
    assert settled(PYTORCH_CUDA_ALLOC_CONF="")["PYTORCH_ALLOC_CONF"] == EXPANDABLE


def test_what_conflicts_with_growing_segments_leaves_them_off():
    assert settled(cuda_graphs=True) == {}
    assert settled(**{REGISTRATION: "true"}) == {REGISTRATION: "true"}
    assert "PYTORCH_ALLOC_CONF" in settled(**{REGISTRATION: "0"})


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_torch_reads_the_variable_after_its_import():
    """A wrong value is an error at the first use: not on import, where it would be too late."""
    code = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:Perhaps';"
        "torch._C._accelerator_setAllocatorSettings('expandable_segments:False')"
    )
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "Perhaps" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_s_segments_grow():
    code = (
        "import os; from titan_dit.train import expand_segments;"
        "import torch; expand_segments(os.environ, cuda_graphs=False);"
        "torch.zeros(2**25, device='cuda');"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
