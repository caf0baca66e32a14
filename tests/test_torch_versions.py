"""docs/torch-versions.md: private parts of torch, found in the source, looked for in this torch."""

import importlib
import inspect
import re
from functools import cache

import pytest
import torch
from commands import ROOT
from torch_uses import private_part, uses

PAGE = (ROOT / "docs" / "torch-versions.md").read_text().split("## Private parts")[1]
HERE = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))
ARGUMENTS = {
    "DeviceMesh._flatten": "self mesh_dim_name",
    "LocalElasticAgent._monitor_workers": "self worker_group",
    "LocalElasticAgent._restart_workers": "self worker_group",
    "LocalElasticAgent._start_workers": "self worker_group",
    "ParallelStyle._apply": "self module device_mesh",
    "_dump_snapshot": "filename",
    "_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal philox_seed philox_offset scale",
    "_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
    "_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp dropout_p "
    "is_causal attn_mask scale",
    "_efficient_attention": "query key value attn_bias compute_log_sumexp dropout_p "
    "is_causal scale",
    "_efficient_attention_backward": "grad_out_ query key value attn_bias out logsumexp "
    "philox_seed philox_offset dropout_p grad_input_mask is_causal scale",
    "_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal "
    "return_debug_mask scale",
    "_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset "
    "attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
    "_fused_sdp_choice": "query key value attn_mask dropout_p is_causal scale enable_gqa",
    "_linear_pointwise": "X W B attr scalars algorithm",
    "_c10d_functional.all_to_all_single": "input output_split_sizes input_split_sizes group_name",
    "_c10d_functional.wait_tensor": "tensor",
    "_BackendRendezvousStateHolder._sanitize": "self",
    "distributed_c10d._set_pg_timeout": "timeout group",
    "_record_memory_history": "enabled context stacks max_entries",
    "distributed_c10d._process_group_name": "ranks use_hashed_name",
    "enable_symm_mem_for_group": "group_name",
}
"""The first arguments of what we call or override, by the end of its name."""
RETURNS = {
    "_flash_attention": 9,
    "_flash_attention_for_cpu": 2,
    "_efficient_attention": 4,
    "_cudnn_attention": 9,
}
"""Values that an operator returns."""


@cache
def rows():
    """(file, full names, oldest torch, needs CUDA) of each row."""
    found = []
    for file, names, since in re.findall(r"^\| `([\w/.]+)` \| (`.*?`) \| ([^|]*) \|", PAGE, re.M):
        oldest = tuple(map(int, since.split(",")[0].split(".")))
        found.append((file, re.findall(r"`([^`]+)`", names), oldest, "CUDA" in since))
    return found


def names_of(file):
    return [name for where, names, *_ in rows() if where == file for name in names]


def is_named(use, name):
    """True if a full name is that of a use; of an attribute the class is not known."""
    part = private_part(name)
    if use.startswith("."):
        return use[1:] in part.split(".")
    # A namespace of which the row names a part is used as a string: "_c10d_functional::".
    return part == use or part.startswith(f"{use}.")


def unlisted(file, names):
    return [use for use in uses(file) if not any(is_named(use, name) for name in names)]


def unused(file, names):
    """Private names without a use; undocumented ones that do not stand in the file."""
    found, text = uses(file), file.read_text()
    return [
        name
        for name in names
        if not (
            any(is_named(use, name) for use in found)
            if private_part(name)
            else re.search(rf"\b{name.split('.')[-1]}\b", text)
        )
    ]


def test_every_private_use_has_a_row_and_every_row_a_use():
    package = ROOT / "titan_dit"
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    del files["checks/device.py"]  # It looks for what other files use.
    assert {file for file, *_ in rows()} <= files.keys()
    missing = {name: unlisted(file, names_of(name)) for name, file in files.items()}
    assert {name: found for name, found in missing.items() if found} == {}
    left = {name: unused(file, names_of(name)) for name, file in files.items()}
    assert {name: found for name, found in left.items() if found} == {}


SOURCE = '''
import os, torch
import torch._inductor.config as inductor
from torch.distributed import debug, _tools
from torch._dynamo.utils import counters
class Ours(torch.nn.Module):
    def __init__(self):
        self._ours = self._theirs
    def _run(self, mesh):
        """A docstring that says _nothing_."""
        self._run(mesh._flatten("x"))
        super()._run(), os._exit(0), getattr(mesh, "_by_name"), debug._clear(), counters["x"]
        return torch._C._x, torch.ops.aten._mm(1), inductor.cpp._isa, "aten::_s", "_c10d::x"
'''


def test_the_scan_sees_imports_attributes_and_strings(tmp_path):
    (tmp_path / "file.py").write_text(SOURCE)
    assert uses(tmp_path / "file.py") == {
        *("_inductor.config.cpp._isa", "_tools", "_dynamo.utils.counters", "._theirs"),
        *("._flatten", "._run", "._by_name", "_clear", "_C._x", "_mm", "_s", "_c10d.x"),
    }
    names = ["torch.Mesh._flatten", "torch._C._x", "torch._C._y", "torch.run.go"]
    assert "._flatten" not in unlisted(tmp_path / "file.py", names)
    assert "_mm" in unlisted(tmp_path / "file.py", names)
    assert unused(tmp_path / "file.py", names) == ["torch._C._y", "torch.run.go"]


CASES = [(file, name, *rest) for file, names, *rest in rows() for name in names]


def test_this_torch_has_every_part_that_its_version_should_have():
    lacks = []
    for file, name, oldest, is_cuda in CASES:
        if oldest > HERE or (is_cuda and not torch.version.cuda):
            continue
        try:
            probe(name)
        except (AttributeError, AssertionError) as error:
            lacks.append(f"titan_dit/{file} uses {name}, but torch {torch.__version__}: {error}")
    assert lacks == []


def probe(name):
    """Raise AttributeError or AssertionError if a part is missing or takes other arguments."""
    part = resolve(name)
    wanted = next((a for end, a in ARGUMENTS.items() if name.endswith(end)), None)
    if wanted is None:
        return
    if isinstance(part, torch._ops.OpOverloadPacket):
        schema = part.default._schema
        found = [argument.name for argument in schema.arguments]
        returns = next((n for end, n in RETURNS.items() if name.endswith(end)), None)
        assert returns in (None, len(schema.returns)), f"it returns {len(schema.returns)} values"
        assert " ".join(found) == wanted, f"it takes {' '.join(found)}"
    else:
        found = " ".join(inspect.signature(part).parameters)
        assert f"{found} ".startswith(f"{wanted} "), f"it takes {found}"


def resolve(name):
    """The part of this name. Of an attribute that objects get in __init__: None."""
    words = name.split(".")
    part = owner_module(words)
    for word in words[len(part.__name__.split(".")) :]:
        if isinstance(part, type) and not hasattr(part, word):
            sources = "".join(inspect.getsource(c) for c in part.__mro__[:-1] if is_torchs(c))
            assert re.search(rf"\bself\.{word}\b", sources), f"no {part.__name__} has it"
            return None
        part = getattr(part, word)
    return part


def owner_module(words):
    """The innermost module of a full name."""
    for length in range(len(words), 0, -1):
        try:
            return importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
    raise AttributeError(f"no module {words[0]}")


def is_torchs(kind):
    return kind.__module__.startswith("torch.")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.distributed.device_mesh.DeviceMesh._squash", "no DeviceMesh has it"),
        ("torch._foreach_squash_", "no attribute '_foreach_squash_'"),
        ("torch.ops.aten._squash", "no attribute '_squash'"),
    ],
)
def test_a_missing_part_fails_its_probe(name, words):
    with pytest.raises((AttributeError, AssertionError), match=words):
        probe(name)


def test_other_arguments_fail_the_probe(monkeypatch):
    name = "torch.ops.mkldnn._linear_pointwise"
    monkeypatch.setitem(ARGUMENTS, "_linear_pointwise", "X W B")
    with pytest.raises(AssertionError, match="it takes X W B attr scalars algorithm"):
        probe(name)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: None)
    with pytest.raises(AssertionError, match="it takes path"):
        probe("torch.cuda.memory._dump_snapshot")
