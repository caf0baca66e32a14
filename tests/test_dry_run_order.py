"""What a dry run says of an order that is decided at run time, or read from a file."""

import torch
from tiny import tiny_config
from unchecked import unchecked

from titan_dit.dry_run import report
from titan_dit.dry_run.fake_step import take_fake_step
from titan_dit.dry_run.memory import MemoryLog, StorageKind
from titan_dit.dry_run.pipeline import (
    fullest,
    growth_of,
    microbatches_to_run,
    most_held,
    simulated,
)
from titan_dit.pipeline.schedules import files
from titan_dit.plan import resolve

MODEL = {"num_layers": 4, "hidden_size": 64, "latent_size": 16}
M = 8


def config_of(**pipeline):
    """A pipeline of two ranks and eight microbatches."""
    training = {"global_batch_size": M, "microbatch_size": 1}
    sections = {"parallel": {"pp": 2}, "training": training, "pipeline": pipeline}
    return tiny_config(model=MODEL, **sections)


def plan_of(**pipeline):
    return resolve(config_of(**pipeline), 2)


def fake_report(config):
    facts, fields = config.objective.example(config.model)
    objective = config.objective.build(config.model, facts)
    sections = config.training, config.optimizer, config.ema
    return take_fake_step(resolve(config, 2), objective, fields, *sections)


def test_a_rank_may_hold_its_window_but_no_more_than_all_forwards():
    assert most_held(plan_of(), M) == (2, 1)
    assert most_held(plan_of(memory=2.0), M) == (2, 1)
    assert most_held(plan_of(order="run_time"), M) == (2, 1)
    assert most_held(plan_of(order="run_time", memory=3.0), M) == (6, 3)
    assert most_held(plan_of(order="run_time", memory=9.0), M) == (M, M)
    plan = plan_of(order="run_time", memory=3.0)
    assert growth_of(plan, microbatches_to_run(plan, M)[1], M) == [3, 3]


def test_what_a_rank_holds_at_most_includes_gradients_of_earlier_microbatches():
    few, several = (plan_of().order(count)[0] for count in (2, 3))
    # Microbatches in flight, halves of backward, and whether there are gradients.
    assert fullest(few) == {(2, 0, 0), (1, 0, 1)}
    assert fullest(several) == {(2, 0, 1)}


def test_more_activations_may_move_the_peak_to_another_moment():
    with MemoryLog() as log:
        with log.phase("forward", StorageKind.ACTIVATIONS):
            kept = torch.zeros(100)
            del kept
        with log.phase("optimizer", StorageKind.TEMPORARY):
            made = torch.zeros(250)
            del made
    one, three = log.peak(), log.peak(3.0)
    assert (one.total, one.phase) == (1000, "optimizer")
    assert (three.total, three.phase) == (1200, "forward")


def test_a_run_time_order_needs_the_memory_of_its_window():
    given = {}, {"order": "run_time", "memory": 2.0}
    with unchecked():
        planned, own = (fake_report(config_of(**keys)) for keys in given)
        # It is run with one microbatch, too, which torch's 1F1B refuses for two ranks.
        insists = fake_report(config_of(runtime="torch"))
    assert [rank.peak for rank in insists.ranks] == [rank.peak for rank in planned.ranks]
    for a, b in zip(planned.ranks, own.ranks, strict=True):
        held, more = (rank.peak.bytes[StorageKind.ACTIVATIONS] for rank in (a, b))
        assert held > 0
        assert more == 2 * held
        assert b.peak.total - a.peak.total == held
        assert (a.traffic, a.idle, a.flops) == (b.traffic, b.idle, b.flops)
    assert own.plan.pipeline.order == "run_time"
    # The planned one is run by torch's runtime, on fake tensors, too.
    [line] = [line for line in report.head(planned) if line.startswith("runtime")]
    assert line == "runtime torch's Schedule1F1B: within 2% of the own loop's step (simulated)"
    [line] = [line for line in report.head(own) if line.startswith("order")]
    assert line.startswith(
        "order   run_time, up to 4/2 activations of a stage on a rank (planned 2/1)"
    )


def test_the_lines_name_windows_and_idle_time_beside_the_planned():
    keys = {"schedule": "interleaved_zero_bubble", "virtual_stages": 2}
    assert [*report.order(plan_of(**keys), M)] == []
    plan = plan_of(**keys, order="run_time", memory=1.5)
    [line] = report.order(plan, M)
    even, varied, planned = (
        simulated(plan, M, jitter=jitter, memory=memory).idle_fraction
        for jitter, memory in ((0.0, 1.5), (0.3, 1.5), (0.3, None))
    )
    assert varied < planned
    assert line == (
        "order   run_time, up to 6 activations of a stage on a rank (planned 4); "
        f"idle {even:.1%}; with 30% jitter {varied:.1%} (planned {planned:.1%})"
    )
    *_, note = report.order(plan_of(order="run_time"), M)
    assert note.startswith('note    [pipeline] order="run_time" seldom pays')


def test_a_file_replaces_the_schedule_of_a_training_step(tmp_path):
    order = plan_of(schedule="gpipe").order(M)
    files.write_order(tmp_path / "own.csv", order)
    plan = plan_of(order=str(tmp_path / "own.csv"))
    assert most_held(plan, M) == (M, M)
    assert growth_of(plan, 2, M) == [M / 2, M]
    assert simulated(plan, M).order == order
