"""A pipeline's two runtimes: the same bits, their messages, and how long they keep tensors."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from tiny import gradients, randomize, tiny_config
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.pipelined import RECEIVES_AHEAD, Loop, Planned
from titan_dit.pipeline.schedules import torch_classes
from titan_dit.pipeline.schedules.schedule import schedule_of
from titan_dit.pipeline.torch_runtime import TorchExecutor
from titan_dit.trainer import Trainer

MICROBATCHES = 4
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 1,
    "dualpipev": 1,
}
USERS = {"users_schedules:AllForward": 1, "users_schedules:Placed": 2, "users_schedules:Folded": 1}


def trainer_of(
    world, schedule, virtual_stages, runtime="own", dtype="fp32", order=None, **parallel
):
    pipeline = {"schedule": schedule, "virtual_stages": virtual_stages, "runtime": runtime}
    config = tiny_config(
        model={"num_layers": 4},
        parallel={"pp": 2, **parallel},
        pipeline=pipeline | ({"order": str(order)} if order else {}),
        precision={"dtype": dtype},
        training={"global_batch_size": MICROBATCHES, "microbatch_size": 1},
    )
    trainer = Trainer(config, world)
    assert isinstance(trainer.executor, TorchExecutor) == (runtime == "torch")
    randomize(trainer.parameters)
    return trainer


def on_two_ranks(world, files):
    return {
        "bits": {name: both_gradients(world, name, v) for name, v in (SCHEDULES | USERS).items()},
        "bits of files": [both_gradients(world, *file) for file in files],
        "buffers": {
            runtime: {name: most_buffers(world, name, v, runtime) for name, v in SCHEDULES.items()}
            for runtime in ("own", "torch")
        },
        "messages": {name: messages(world, name, v) for name, v in SCHEDULES.items()},
        "groups": groups(world),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_ranks(2, on_two_ranks, list(written(tmp_path_factory.mktemp("orders"))))


def written(folder):
    """Order files as torch writes them: (schedule, stages of a rank, runtimes, path)."""
    for schedule, v, kind in (
        ("interleaved_1f1b", 2, "pipeline_order"),
        ("zbv_zero_bubble", 1, "pipeline_order_with_comms"),
    ):
        places = (0, 1, 0, 1) if v == 2 else (0, 1, 1, 0)
        held = [index for index, place in enumerate(places) if place == 0]
        stages = [torch_classes.DrivenStage(index, 4, 0, 2) for index in held]
        made = torch_classes.torch_class(schedule_of(schedule))
        rows = getattr(torch_classes.make(made, stages, MICROBATCHES), kind)
        text = "".join(",".join(map(str, rows[rank])) + "\n" for rank in range(2))
        path = folder / f"{schedule}.csv"
        path.write_text("# as torch writes it\n" + text.replace("None", ""))
        yield schedule, v, path


def both_gradients(world, schedule, virtual_stages, order=None, dtype="bf16", **parallel):
    """Loss and gradients of our loop in the schedule's order, and of torch's runtime.

    The grid compares most schedules in fp32 or fp64.
    """
    own = trainer_of(world, schedule, virtual_stages, "own", dtype, **parallel)
    torchs = trainer_of(world, schedule, virtual_stages, "torch", dtype, order, **parallel)
    return gradients(own), gradients(torchs)


def assert_equal_bits(found):
    (loss, ours), (other, theirs) = found
    assert loss == other
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(gradient.abs().sum() > 0 for gradient in ours.values())


@pytest.mark.parametrize("schedule", SCHEDULES | USERS)
def test_torchs_runtime_gives_the_bits_of_our_loop(schedule, two_ranks):
    for found in two_ranks:
        assert_equal_bits(found["bits"][schedule])


def test_order_files_of_torchs_give_the_bits_of_the_schedule(two_ranks):
    for found in two_ranks:
        assert len(found["bits of files"]) == 2
        for case in found["bits of files"]:
            assert_equal_bits(case)


def sharded_gradients(world, dtype="bf16"):
    """With four stages on a rank torch would free and gather them in turn, if it knew of FSDP."""
    cases = ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2)
    return [both_gradients(world, *case, dtype=dtype, dp_shard=2) for case in cases]


def test_torchs_runtime_gives_the_bits_of_our_loop_with_fsdp():
    for cases in on_ranks(4, sharded_gradients):
        for found in cases:
            assert_equal_bits(found)


def in_fp32(world, files):
    cases = [*(SCHEDULES | USERS).items(), *files]
    return [both_gradients(world, *case, dtype="fp32") for case in cases]


@pytest.mark.long
def test_torchs_runtime_gives_the_bits_of_our_loop_in_fp32(tmp_path):
    for found in on_ranks(2, in_fp32, list(written(tmp_path))) + on_ranks(
        4, sharded_gradients, "fp32"
    ):
        for case in found:
            assert_equal_bits(case)


def most_buffers(world, schedule, virtual_stages, runtime):
    """The most messages that had been posted and not used during a step, and after it."""
    most, loops, post, create = [0], [], Planned.post, Loop.__init__

    def counted(self, message):
        post(self, message)
        most[0] = max(most[0], len(self.arriving))

    def noted(self, *args):
        create(self, *args)
        loops.append(self)

    trainer = trainer_of(world, schedule, virtual_stages, runtime)
    with mock.patch.object(Planned, "post", counted), mock.patch.object(Loop, "__init__", noted):
        gradients(trainer)
    (loop,) = loops
    kept = [
        len(stage.kept) + len(stage.halves) + len(stage.postponed) for stage in loop.stages.values()
    ]
    return most[0], kept, len(loop.messages.arriving) + len(loop.made)


@pytest.mark.parametrize("runtime", ["own", "torch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_holds_few_messages_and_nothing_after_a_step(schedule, runtime, two_ranks):
    for found in two_ranks:
        most, kept, left = found["buffers"][runtime][schedule]
        # One in use, and the inputs of the next actions, whatever the number of microbatches.
        assert 1 <= most <= 1 + RECEIVES_AHEAD
        assert not any(kept)
        assert left == 0


def messages(world, schedule, virtual_stages):
    """By direction, the names of all messages of a step and of a prediction, as posted."""
    sent, received, names = {}, {}, []
    pass_on, empty, send, receive = Loop.pass_on, Planned.empty, P2PGroups.send, P2PGroups.receive

    def named(self, message, tensors):
        names[:] = [str(message)]
        pass_on(self, message, tensors)

    def created(self, message):
        names[:] = [str(message)]
        return empty(self, message)

    def sending(self, tensors, target):
        sent.setdefault((self.rank, target), []).extend(names)
        return send(self, tensors, target)

    def receiving(self, tensors, source):
        received.setdefault((source, self.rank), []).extend(names)
        return receive(self, tensors, source)

    trainer = trainer_of(world, schedule, virtual_stages)
    model = trainer.config.model
    inputs = {
        "tokens": torch.randn(3, *model.token_shape),
        "timestep": torch.rand(3),
        "labels": torch.arange(3),
    }
    with (
        mock.patch.object(Loop, "pass_on", named),
        mock.patch.object(Planned, "empty", created),
        mock.patch.multiple(P2PGroups, send=sending, receive=receiving),
    ):
        gradients(trainer)
        trainer.executor.predict(inputs, model.static(world.device))
    return sent, received


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_ends_post_the_messages_of_a_direction_in_the_same_sequence(schedule, two_ranks):
    (sent, received), (its_sent, its_received) = (rank["messages"][schedule] for rank in two_ranks)
    assert sent == its_received
    assert received == its_sent
    boundaries = {"1f1b": 1, "gpipe": 1, "zbv_zero_bubble": 2, "dualpipev": 2}.get(schedule, 3)
    # Forward and backward of four microbatches, forward of three rows.
    count = sum(map(len, (*sent.values(), *received.values())))
    assert count == boundaries * (2 * MICROBATCHES + 3)


def early_receives(world):
    """Receives that are posted before the sender can know of them, by one rank and the other.

    gloo blocks only the end that happens to listen: eight times, each on groups of its own.
    """
    found, other = [], 1 - world.rank
    for time in range(8):
        group = dist.new_group([0, 1])
        links = P2PGroups(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",)))
        links.open([(0, 1), (1, 0)])
        value, got = torch.full((1,), 10.0 * time + world.rank), torch.zeros(1)
        works = links.receive([got], other)
        if world.rank == time % 2:  # This rank has posted early; the other one waits for it.
            works += links.send([value], other)
        else:
            works.pop().wait()
            works += links.send([value], other)
        for work in works:
            work.wait()
        found.append(got.item())
    return found


def test_a_receive_can_be_posted_before_the_sender_is_there():
    lazily = {"TORCH_GLOO_LAZY_INIT": "1"}
    first, second = on_ranks(2, early_receives, variables=lazily, timeout=30)
    assert first == [10.0 * time + 1 for time in range(8)]
    assert second == [10.0 * time for time in range(8)]


def groups(world):
    """Groups of a rank and their sizes, of two pipelines on the same ranks; what uses them."""
    found, used, post = [], set(), dist.batch_isend_irecv

    def noted(operations):
        used.update((op.op.__name__, op.group.group_name) for op in operations)
        return post(operations)

    for _ in range(2):
        trainer = trainer_of(world, "interleaved_1f1b", 2)
        links = trainer.mesh.p2p
        found.append({pair: (g.size(), g.group_name) for pair, g in links.groups.items()})
    with mock.patch.object(dist, "batch_isend_irecv", noted):
        gradients(trainer)
    return found, used


def test_two_ranks_have_one_group_for_each_direction(two_ranks):
    for rank, found in enumerate(two_ranks):
        (first, second), used = found["groups"]
        assert first == second, "a second mesh opened groups again"
        assert first.keys() == {(0, 1), (1, 0)}
        assert all(size == 2 for size, _ in first.values())
        out, back = (first[rank, 1 - rank][1], first[1 - rank, rank][1])
        assert used == {("isend", out), ("irecv", back)}
