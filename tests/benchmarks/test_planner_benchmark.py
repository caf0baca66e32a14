"""benchmarks/planner.py: the planner's figures against public tables, and its kernels by hand."""

import sys
from dataclasses import replace

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import facts_fit
import planner as benchmark
from facts_kernels import Held, Unfused, as_foundry, as_unfused
from facts_memory import memory_tables, messages_in_flight
from facts_rows import FACTS, case_of, plan_of, read, rehearsed, thirds
from facts_software import device_named

from titan_dit.config.layout import ActivationCheckpointConfig
from titan_dit.config.section import UserError
from titan_dit.planner.work import AttentionCall, Message

ROWS = read(FACTS / "megatron_v100.csv")
# Layouts of one model, and of another one with a pipeline: few rehearsals.
QUICK = ["MP_1x1x1_8_768x12", "MP_1x16x1_16_3072x16", "MP_1x32x1_16_3072x32"]
QUICK = [fact for fact in ROWS if fact.name not in QUICK]


@pytest.fixture(scope="module")
def v100():
    return facts_fit.source_of("v100", QUICK, device_named("v100_16", "megatron-lm 8aa4619f"))


def share(values, most):
    return sum(value <= most for value in values) / len(values)


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return (values[middle] + values[-middle - 1]) / 2


def held_out(source):
    assert not source.refused
    return [abs(error) for error in source.errors]


def test_twins_are_one_case_and_every_case_is_fitted_on_once():
    parts = thirds(ROWS)
    assert sum(len({fact.same for fact in part}) for part in parts) == 16
    assert sorted(fact.name for part in parts for fact in part) == sorted(f.name for f in ROWS)
    for part in parts:
        names = {fact.name for fact in part}
        assert ("DP_8x1x1_16_1536x16" in names) == ("2D_8x1x1_16_1536x16" in names)
        assert ("MP_1x8x1_16_1536x16" in names) == ("2D_1x8x1_16_1536x16" in names)


def test_a_row_becomes_a_plan_with_its_ranks_microbatches_and_equal_stages():
    fact = next(fact for fact in ROWS if fact.name == "2D_PP_2x4x4_512_2304x24")
    plan = plan_of(fact)
    assert (plan.sizes.dp_shard, plan.sizes.tp, plan.sizes.pp) == (2, 4, 4)
    assert (plan.num_microbatches, plan.microbatch_size) == (32, 8)
    assert [len(layers) for layers in plan.stage_layers] == [6, 6, 6, 6]


def test_layouts_on_v100_are_predicted_from_a_third_of_them(v100):
    errors = held_out(v100)
    assert median(errors) <= 0.05
    assert max(errors) <= 0.12


LATE = "megatron-lm 8aa4619f, 2304 x 24, 32 v100_16, batch 512"
WHY_LATE = "one of three fits plans tp 8 x pp 2 0.8% faster than tp 4 x pp 4; measured 6.2% slower"


def groups_beyond_5_percent(source):
    """Groups of layouts in which the planned best of a fit takes too long."""
    losses = facts_fit.losses_of(source)
    return {group for (group, _), loss in losses.items() if loss > facts_fit.EQUAL}


def test_the_planned_best_of_every_group_is_within_5_percent_of_the_measured_best(v100):
    losses = facts_fit.losses_of(v100)
    assert len(losses) == 2 * 3
    assert LATE in {group for group, _ in losses}
    assert groups_beyond_5_percent(v100) <= {LATE}


@pytest.mark.xfail(strict=True, reason=WHY_LATE)
def test_the_planned_best_of_32_v100_is_within_5_percent_of_the_measured_best(v100):
    assert LATE not in groups_beyond_5_percent(v100)


def test_the_measured_best_of_every_group_is_planned_as_equal(v100):
    for *_, best, choices in facts_fit.choices_of(v100):
        for fold, planned, _ in choices:
            assert fold.seconds[best.name] <= (1 + facts_fit.EQUAL) * fold.seconds[planned.name]


def test_a_choice_beyond_the_bar_is_named_in_the_overview(v100):
    rows = facts_fit.best_overview([v100])
    assert [row["table"] for row in rows] == ["v100", "all tables"]
    for row in rows:
        assert row["choices"] == 6
        late = [] if row["beyond it"] == "-" else row["beyond it"].split("; ")
        assert row["within 5%"] == 6 - len(late)
        assert all(LATE in name for name in late)


def test_one_gpu_and_tp_8_alone_predict_all_other_layouts():
    device = device_named("v100_16", "megatron-lm 8aa4619f")
    source = facts_fit.source_of("v100", QUICK, device, benchmark.FEW["megatron_v100"])
    errors = held_out(source)
    assert len(errors) == 12
    assert max(errors) <= 0.12


def test_attention_that_writes_scores_is_its_products_and_four_passes_over_them():
    fact = ROWS[0]
    counts = rehearsed(fact, plan_of(fact))
    [forward] = counts.block.forward.attention
    own = as_unfused(counts, Unfused(), "none", 0.0).block
    assert not own.forward.attention
    assert not own.backward.attention
    scores = 2 * 16 * 2048**2
    assert own.forward.fused - counts.block.forward.fused == scores * 9
    # A causal kernel skips half of what is written out.
    assert own.forward.flops - counts.block.forward.flops == forward.flops
    assert isinstance(forward, AttentionCall)


def test_checkpoints_repeat_all_of_forward_and_selective_ones_attention():
    fact = next(fact for fact in ROWS if fact["tp"] == 8)
    plan = plan_of(fact)
    counts = rehearsed(fact, plan)
    none, selective, full = (
        as_unfused(counts, Unfused(add_bytes=0), mode, 0.0).block
        for mode in ("none", "selective", "full")
    )
    repeated = full.backward - none.backward
    assert repeated.flops == pytest.approx(none.forward.flops)
    assert repeated.messages == none.forward.messages
    core = selective.backward - none.backward
    assert not core.messages
    assert core.flops == pytest.approx(2 * 2 * 16 * 2 * 2048**2 * 96)
    foundry = as_foundry(counts, "full", 0.0, float8=False).block
    assert (foundry.backward - counts.block.backward).flops == counts.block.forward.flops


def test_gradients_are_added_per_microbatch_and_hidden_messages_are_left_out():
    fact = next(fact for fact in ROWS if fact["tp"] == 8)
    counts = rehearsed(fact, plan_of(fact))
    added, without = (
        as_unfused(counts, Unfused(add_bytes=nbytes), "none", 0.0) for nbytes in (6, 0)
    )
    for part in ("embed", "block", "head"):
        more = getattr(added, part).backward.fused - getattr(without, part).backward.fused
        assert more == pytest.approx(6 * getattr(counts, part).trained)
    hidden = as_unfused(counts, Unfused(hides_tp=True), "none", 0.0)
    assert not hidden.block.backward.messages
    assert all(isinstance(message, Message) for message in without.block.backward.messages)
    assert len(without.block.backward.messages) == 1


def test_buffers_of_queued_messages_are_held_as_long_as_the_host_may_run_ahead():
    rows = {fact.name: fact for fact in ROWS}
    found = {}
    for name in ("MP_1x8x1_16_1536x16", "2D_PP_2x4x4_512_2304x24", "DP_1x1x1_2_1536x16"):
        fact = rows[name]
        counts = rehearsed(
            fact,
            replace(plan_of(fact), activation_checkpoint=ActivationCheckpointConfig(mode="none")),
        )
        found[name] = messages_in_flight(fact, Held(), counts) / counts.stream
        assert messages_in_flight(fact, Held(queue=0), counts) == 0
    # 1,024 kernels have 6 messages for every 105; a stage of 6 layers sends 4 each in backward.
    assert list(found.values()) == pytest.approx([1024 * 6 / 105, 24, 0])


@pytest.mark.long
def test_memory_of_the_v100_table_is_predicted_from_a_third_of_it():
    device = device_named("v100_16", "megatron-lm 8aa4619f")
    (_, fits), (_, rows) = memory_tables("v100", QUICK, device)
    assert float(fits[-1]["median"].rstrip("%")) <= 8
    # Without what the allocator holds ahead of the device, tp layouts are far too small.
    assert float(fits[1]["worst"].rstrip("%")) > 40
    assert len(rows) == len(QUICK)


def test_unknown_rows_columns_and_software_are_errors_of_one_line(tmp_path):
    path = tmp_path / "mine.csv"
    text = (FACTS / "megatron_v100.csv").read_text()
    path.write_text(text)
    with pytest.raises(UserError, match="no such case"):
        list(benchmark.sources_of(path, ["DP_9"]))
    path.write_text(text.replace("seq_tokens", "tokens"))
    with pytest.raises(UserError, match="columns seq_tokens are missing"):
        read(path)
    path.write_text(text.replace("megatron-lm 8aa4619f", "mine"))
    with pytest.raises(UserError, match="facts_software"):
        read(path)
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "none.csv")


@pytest.mark.long
def test_every_table_reaches_its_figures():
    found = {
        source.name: source
        for stem in ("megatron_v100", "megatron_a100", "llm_foundry")
        for source in benchmark.sources_of(FACTS / f"{stem}.csv")
    }
    v100, a100 = found["megatron_v100, v100_16"], found["megatron_a100, a100_80"]
    assert len(v100.counted) == 16
    assert median(held_out(v100)) <= 0.05
    assert max(held_out(v100)) <= 0.12
    assert len(a100.counted) == 24
    assert median(held_out(a100)) <= 0.04
    assert max(held_out(a100)) <= 0.10
    foundry = [abs(e) for name, s in found.items() if "foundry" in name for e in s.errors]
    assert median(foundry) <= 0.10
    assert share(foundry, 0.20) >= 0.85
    for source in found.values():
        assert groups_beyond_5_percent(source) <= {LATE}, source.name
    assert case_of(ROWS[0]).same == ROWS[0].same
