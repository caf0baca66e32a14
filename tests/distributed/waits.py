"""Detects host reads of tensor values, which synchronise on a CUDA device."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
ASKING = {
    ATEN._local_scalar_dense,  # .item(), bool(), float(), int()
    ATEN.equal,
    ATEN.is_nonzero,
    ATEN.nonzero,
    ATEN.masked_select,
    ATEN._unique2,
    ATEN.unique_dim,
    ATEN.unique_consecutive,
    ATEN.bincount,
    ATEN.allclose,
}
TO_THE_HOST = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class Dispatched(TorchDispatchMode):
    """Operators that return a value to the host, or a shape that depends on values."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # A DTensor's operators are seen on its local tensors.
        if any(getattr(kind, "__torch_dispatch__", None) is not TENSORS for kind in types):
            return NotImplemented
        masks = op.overloadpacket in (ATEN.index, ATEN.index_put, ATEN.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeats = op is ATEN.repeat_interleave.Tensor and not (kwargs or {}).get("output_size")
        if op.overloadpacket in ASKING or masks or repeats:
            self.found.append(str(op))
        return op(*args, **(kwargs or {}))


TENSORS = torch.Tensor.__torch_dispatch__


class Called(TorchFunctionMode):
    """On the CPU these read memory directly, without an operator."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in TO_THE_HOST:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Waits:
    """Context manager: `found` collects the host reads in the block."""

    def __init__(self):
        self.found = []
        self.modes = (Dispatched(self.found), Called(self.found))

    def __enter__(self):
        for mode in self.modes:
            mode.__enter__()
        return self.found

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)
