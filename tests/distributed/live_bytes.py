"""Bytes of a pipeline rank's live tensors between the actions of a training step."""

import gc
import weakref
from unittest import mock

import torch
from run_time import Jitter, pipelined
from test_grid import case_config
from tiny import randomize, torch_rng
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from titan_dit.parallel import fsdp
from titan_dit.pipeline.events import PipelineEvent
from titan_dit.pipeline.pipelined import Planned
from titan_dit.pipeline.transports.shared_memory import SharedReceiver
from titan_dit.trainer import Trainer


class Live(TorchDispatchMode):
    """Storages that operators have made and that have not died."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    @property
    def num_bytes(self):
        return sum(self.sizes.values())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages((args, kwargs or {}))}
        for storage in storages(out):
            if storage.data_ptr() not in given | {0}:
                self.watch(storage)
        return out

    def watch(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key, None)


def storages(tree):
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves if leaf.device.type != "meta"]


class Meter(Jitter):
    """A `Mark` that also measures: activations, received streams, messages to be sent."""

    def __init__(self, seed, live, executor):
        super().__init__(seed)
        self.live, self.before, self.most = live, live.num_bytes, 0
        transport = getattr(executor, "transport", None)
        receivers = transport.receivers.values() if transport else []
        self.shared = [receiver for receiver in receivers if isinstance(receiver, SharedReceiver)]

    def __call__(self, moment, what):
        super().__call__(moment, what)
        if moment in (PipelineEvent.BEGINS, PipelineEvent.ENDS):
            in_use = ((len(own.slots) - len(own.free)) * own.end.num_bytes for own in self.shared)
            used = sum(in_use)
            self.most = max(self.most, self.live.num_bytes - self.before + used)

    def found(self, executor):
        """Bytes held, of a stream; lanes from and to other ranks; what ran."""
        transport = getattr(executor, "transport", None)
        return {
            "most": self.most,
            "stream": sum(t.numel() * t.element_size() for t in executor.shapes.stream),
            "lanes in": len(transport.receivers) if transport else 0,
            "lanes out": len(transport.outgoing) if transport else 0,
            "held": self.peak,
            "ran": [str(action) for action in self.ran],
        }


def send_a_copy(source, message, tensors, send=Planned.send):
    """The planned order's sends are kept until the end of a pass on a CPU: they do not count."""
    with _disable_current_modes():
        copies = tuple(tensor.clone() for tensor in tensors)
    send(source, message, copies)


COPIED = mock.patch.object(Planned, "send", send_a_copy)


def measured(world, config, seed):
    """What a step in a pipeline holds at most, beside its weights and their gradients."""
    gc.collect()  # The slots of the case before.
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    executor = pipelined(trainer)
    batch = next(trainer.batches())
    prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
    with Live() as live, mock.patch.object(fsdp, "reduce_gradients"), COPIED:
        trainer.executor.step(prepared)  # From here on all gradients exist.
        executor.mark = meter = Meter(f"{seed} {world.rank}", live, executor)
        trainer.executor.step(prepared)
    return meter.found(executor)


def even(pipeline):
    """Two ranks with equal stages, apart from the embedding and the head."""
    return case_config("dit", {"pp": 2}, pipeline, {}, size=(8, 8))


def live_bytes(world, cases):
    """What a planned step of each schedule holds, and its steps in run-time order."""
    found = []
    for pipeline, *run_times in cases:
        configs = [even(pipeline | {"order": "run_time"} | run_time) for run_time in run_times]
        planned = measured(world, even(pipeline), 0)
        found.append((planned, [measured(world, config, 1) for config in configs]))
    return found
