"""Python's garbage collector runs only after the chosen steps."""

import gc
import json
import weakref

import pytest
from harness import on_ranks
from tiny import tiny_config

from titan_dit.system.garbage_collection import Collector


@pytest.fixture(autouse=True)
def _python_decides_again():
    assert gc.isenabled()
    gc.unfreeze()
    of_tests = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*of_tests)
    gc.enable()
    gc.collect()
    gc.freeze()


class Node:
    """Part of a cycle: only the collector frees it."""


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_the_automatic_collector_is_off_from_the_first_step_on_and_on_again_after():
    with Collector(5) as collector:
        assert gc.isenabled()
        collector.after(1)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_it_is_on_again_after_an_error():
    def fail():
        with Collector(5) as collector:
            collector.after(1)
            assert not gc.isenabled()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_who_had_it_off_finds_it_off():
    gc.disable()
    with Collector(5) as collector:
        collector.after(1)
    assert not gc.isenabled()


def test_0_leaves_everything_to_python():
    with Collector(0) as collector:
        gone = cycle()
        for step in (1, 2):
            collector.after(step)
            collector.full()
            assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        assert gone() is not None


def test_cycles_are_freed_after_the_named_steps_and_not_in_between():
    freed = {}
    with Collector(3) as collector:
        for step in range(1, 10):
            gone = cycle()
            # Enough objects to trigger an automatic collection.
            made = [[] for _ in range(5000)]
            collector.after(step)
            freed[step] = gone() is None
            del made
    assert [step for step, is_freed in freed.items() if is_freed] == [1, 3, 6, 9]


def test_a_full_one_frees_what_has_outlived_a_collection():
    with Collector(1) as collector:
        collector.after(1)
        node = Node()
        node.itself, gone = node, weakref.ref(node)
        collector.after(2)
        del node
        collector.after(3)
        assert gone() is not None
        collector.full()
        assert gone() is None


def test_at_rest_python_decides_until_the_next_step():
    with Collector(5) as collector:
        collector.after(1)
        collector.restore()
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        collector.after(2)
        assert not gc.isenabled()


def run(world, folder, every):
    """Train 6 steps: losses, when the automatic collector was on, and the collections."""
    from titan_dit.trainer import Trainer

    config = tiny_config(
        job={"dir": str(folder)},
        training={"steps": 6, "gc_every": every},
        checkpoint={"every": 5},
    )
    trainer = Trainer(config, world)
    original, enabled, collected = trainer.train_step, {}, []

    def train_step(batch):
        enabled[trainer.step] = gc.isenabled()
        return original(batch)

    def note(phase, info):
        if phase == "start" and not gc.isenabled():
            collected.append((trainer.step, info["generation"]))

    trainer.train_step = train_step
    gc.callbacks.append(note)
    trainer.fit()
    gc.callbacks.remove(note)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], enabled, collected, gc.isenabled()


def runs(world, folder):
    return run(world, folder / "python", 0), run(world, folder / "steps", 2)


def test_a_run_has_the_same_losses_with_and_without(tmp_path):
    [(left_alone, taken)] = on_ranks(1, runs, tmp_path)
    assert len(taken[0]) == 6
    assert taken[0] == left_alone[0]
    assert all(left_alone[1].values())
    assert left_alone[2] == []
    assert [step for step, is_on in taken[1].items() if is_on] == [1]
    # (step, generation): full after step 1, every second step, full at the checkpoints of 5 and 6.
    assert taken[2] == [(1, 2), (2, 1), (4, 1), (5, 2), (6, 2), (6, 1)]
    assert left_alone[3]
    assert taken[3]
