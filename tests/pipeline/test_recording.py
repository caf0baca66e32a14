"""The recording of a pipeline: clocks that differ, the files of a window, which ranks take part."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from recorded import Ranks, costs_of, order_of, timeline_of

from titan_dit.build import recording_of
from titan_dit.execution import LocalExecutor, SlicedExecutor
from titan_dit.models.base import ModelSpec
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.pipeline.events import PipelineEvent, unmarked
from titan_dit.pipeline.pipelined import PipelinedExecutor
from titan_dit.pipeline.recording import Clock, Offset, read_all, write_files


def skewed(noted, offset_ns, drift):
    """A rank's moments on a clock of its own, and what a measurement says of it."""

    def own(at):
        return at + offset_ns + drift * at

    moved = [(str(moment), what, own(at)) for moment, what, at in noted]
    before, after = (Offset(at, own(at) - at, 0.0) for at in (0.0, noted[-1].at_ns))
    return moved, Clock(before, after)


def test_ranks_whose_clocks_differ_have_one_timeline():
    order = order_of()
    expected = timeline_of(order, costs_of(order, 5))
    noted = Ranks(order, costs_of(order, 5)).window(2)
    offsets = [(0.0, 0.0), (3e12, 1e-4), (-7e9, -2e-5), (5e5, 0.0)]
    moved, clocks = zip(*map(skewed, noted, *zip(*offsets, strict=True)), strict=True)
    for rank, wanted in zip(read_all(moved, clocks), expected.ranks, strict=True):
        assert [span.kind for span in rank.spans] == [span.kind for span in wanted.spans]
        times = [at for span in rank.spans for at in span[1:]]
        assert times == pytest.approx([at for span in wanted.spans for at in span[1:]], abs=1e-6)


def test_a_window_without_a_whole_step_writes_nothing(tmp_path):
    noted = [("step", 5, 0.0), ("starts", None, 10.0)]
    ranks = read_all([noted], [Clock(Offset(0, 0, 0), Offset(0, 0, 0))])
    timeline = SimpleNamespace(num_passes=len(ranks[0].passes))
    [line] = write_files(tmp_path / "profile", timeline)
    assert line == "no pipeline timeline: no step of its window has ended"
    assert not (tmp_path / "profile").exists()


def test_four_files_and_the_text_on_the_console(tmp_path):
    order = order_of("1f1b", virtual_stages=1)
    lines = write_files(tmp_path, timeline_of(order, costs_of(order, 1)), ["a note"])
    assert lines[-2:] == ["a note", f"pipeline timeline in {tmp_path}/timeline-steps-10-11.json.gz"]
    name = "timeline-steps-10-11"
    ends = ("costs.json", "json.gz", "png", "txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.{end}" for end in ends]
    assert (tmp_path / f"{name}.txt").read_text().splitlines() == lines[:-1]


def executor_of(kind):
    executor = mock.Mock(spec=kind)
    executor.device = torch.device("cpu")
    return executor


class Place:
    """A mesh, and where this rank is on its axes."""

    def __init__(self, **ranks):
        self.ranks, self.sizes = ranks, AxisSizes(pp=2)

    def axis(self, name):
        return SimpleNamespace(get_local_rank=lambda: self.ranks.get(name, 0))


SPEC = ModelSpec(
    build=torch.nn.Module,
    inputs={},
    stream={},
    predictions={},
    num_layers=5,
    num_heads=1,
    head_dim=1,
    ffn=1,
    num_tokens=1,
    embed_cost=0.5,
    head_cost=0.25,
)
PLAN = SimpleNamespace(
    stage_layers=(range(2), range(2, 5)),
    spec=SPEC,
    buckets=(),
)


@pytest.mark.parametrize("place", [{}, {"pp": 1}, {"dp_shard": 1}, {"pp": 1, "tp": 1}, {"cp": 1}])
def test_one_pipeline_of_several_is_recorded(place):
    recording = recording_of(executor_of(PipelinedExecutor), PLAN, Place(**place))
    assert recording.sizes == (2.5, 3.25)
    assert recording.takes_part == (set(place) <= {"pp"})
    if not recording.takes_part:
        recording.begin()  # Would talk to other ranks.
        recording.step(1)
        with recording.outside("optimizer"):
            pass
        assert recording.write(None) == []
        assert recording.recorder.notes == []


def test_without_a_pipeline_there_is_none_and_cp_hides_none():
    alone = SimpleNamespace(sizes=AxisSizes())
    assert recording_of(executor_of(LocalExecutor), PLAN, alone) is None
    inner = executor_of(PipelinedExecutor)
    sliced = mock.Mock(spec=SlicedExecutor, inner=inner)
    assert recording_of(sliced, PLAN, Place()).executor is inner


def test_nobody_watches_a_pipeline_by_default():
    assert PipelinedExecutor.mark is unmarked
    assert unmarked(PipelineEvent.BEGINS, None) is None
