"""DiTs, a GPT and a BERT give loss, gradients and predictions of one process on every mesh."""

import itertools
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from tiny import randomize, tiny_config, torch_rng, whole
from tiny_bert import bert_config
from tiny_gpt import gpt_config
from tiny_joint import joint_config
from tiny_repa import sections as repa_sections

from titan_dit.build import run_executor
from titan_dit.data import loader
from titan_dit.data.order import steps_from
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.trainer import Trainer

# Eight ranks on two cores take their time.
pytestmark = pytest.mark.timeout(900)

PP, TP, CP, DP = {"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
COPIES = {"dp_replicate": 2, "dp_shard": 1}
ULYSSES = {"cp": 2, "cp_method": "ulysses"}
PLAIN = {"tp": 2, "sequence_parallel": False}


def schedule(name, virtual_stages=1, **more):
    return {"schedule": name, "virtual_stages": virtual_stages, **more}


FOLDED = schedule("interleaved_1f1b", 2)
# Kinds of a DiT: tables of [objective].
FLOW, DDPM = {}, {"name": "ddpm", "min_snr_gamma": 5.0}
# A flow with keys of [repa]: its block is on another pipeline stage than the loss.
REPA, CONV = {"repa": {}}, {"repa": {"projector": "conv", "spatial_norm": 0.6, "weight": 2.0}}
# Of a GPT: keys of [model].
TIED = {"dropout": 0.1}
UNTIED = {
    "tie_word_embeddings": False,
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "position_embedding_type": "rotary",
    "num_key_value_heads": 2,
}
# Of a BERT: norms after or before, and whether the order of spans is a second task, on padded
# samples, then with dropout if norms are after.
POST, PRE = ["post", False], ["pre", False]
POST_PAIRS, PRE_PAIRS = ["post", True], ["pre", True]
# Of a text-to-image DiT: keys of [model].
JOINT, TALL = {}, {"latent_size": [8, 4], "text_tokens": 4}
# Two buckets, whose steps have 8 and 16 samples.
TWO_SIZES = {"latent_size": [4, 8], "others": [[4, 4]]}
# Of Z-Image, FLUX.2 and Wan: keys of [model], and two buckets. Of Z-Image's 32 tokens 18 or 32 are
# a picture's.
RELEASED = {}
Z_SIZES = {"latent_size": [8, 16], "others": [[6, 12]]}
FLUX_SIZES = {"latent_size": [4, 4], "others": [[2, 4]]}
# Clips of two latent frames, and pictures.
FRAMES = {"latent_frames": 2, "others": [[1, 4, 8]]}
# With references as further channels and as tokens, and masks; of clips with first frames.
EDITS = TWO_SIZES | {"condition_channels": 2, "reference_tokens": True, "reference": "picture"}
FLUX_EDITS = FLUX_SIZES | {"reference_tokens": True, "reference": "picture"}
FIRST_FRAMES = {"latent_frames": 2, "condition_channels": 6, "reference": "first_frame"}
# By model and number of ranks: [parallel], [pipeline], the kind, recomputation mode if any.
CASES = {
    "dit": {
        2: [
            (DP, {}, DDPM),
            (COPIES, {}, FLOW),
            (TP, {}, REPA),
            (PLAIN, {}, DDPM),
            (CP, {}, CONV),
            (ULYSSES, {}, DDPM),
            (PP, schedule("1f1b", split=[2, 3]), DDPM),
            (PP, schedule("interleaved_zero_bubble", 2), REPA),
            (PP, schedule("zbv_zero_bubble"), DDPM),
            (PP, schedule("dualpipev"), CONV),
        ],
        4: [
            ({"pp": 4}, FOLDED, FLOW),
            ({"tp": 4}, {}, FLOW),
            (DP | CP, {}, DDPM),
            (TP | PP, schedule("dualpipev"), REPA),
            (ULYSSES | PP, FOLDED, DDPM),
        ],
        8: [(PP | TP | CP, FOLDED, CONV, "selective")],
    },
    "gpt": {
        2: [
            (DP, {}, TIED),
            (TP, {}, TIED),
            (TP, {}, UNTIED),
            (CP, {}, TIED),
            (ULYSSES, {}, UNTIED),
            (PP, schedule("1f1b"), TIED),
            (PP, FOLDED, UNTIED),
            (PP, schedule("zbv_zero_bubble"), TIED),
            (PP, schedule("dualpipev"), TIED),
        ],
        4: [
            (HSDP, {}, TIED),
            (DP | TP, {}, TIED),
            (DP | PP, schedule("zbv_zero_bubble"), TIED),
            (PLAIN | PP, FOLDED, TIED),
            (TP | CP, {}, UNTIED),
        ],
    },
    "bert": {
        2: [
            (TP, {}, POST_PAIRS),
            (PLAIN, {}, PRE_PAIRS),
            (CP, {}, POST),
            (ULYSSES, {}, POST_PAIRS),
            (PP, schedule("zbv_zero_bubble"), PRE_PAIRS),
            (DP, {}, PRE),
        ],
    },
    "joint_dit": {
        2: [
            (PLAIN, {}, JOINT),
            (CP, {}, TALL),
            (ULYSSES, {}, JOINT),
            (PP, schedule("zbv_zero_bubble"), JOINT),
            (DP, {}, TWO_SIZES),
            (PP, schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5), TWO_SIZES),
            (TP, {}, EDITS),
            (CP, {}, EDITS),
            (PP, FOLDED, EDITS),
        ],
        4: [
            (TP | CP, {}, TWO_SIZES),
            (PP | ULYSSES, FOLDED, TALL),
        ],
    },
    "z_image": {2: [(TP, {}, Z_SIZES), (CP, {}, Z_SIZES), (PP, FOLDED, Z_SIZES)]},
    "flux2": {
        2: [
            (PP, FOLDED, FLUX_SIZES),
            (TP, {}, FLUX_EDITS),
            (CP, {}, FLUX_EDITS),
        ],
        4: [(PLAIN | CP, {}, FLUX_SIZES, "selective")],
    },
    "wan": {
        2: [
            (TP, {}, FRAMES),
            (CP, {}, FRAMES),
            (PP, FOLDED, FRAMES),
            (TP, {}, FIRST_FRAMES),
            (CP, {}, FIRST_FRAMES),
        ],
        4: [({"tp": 4}, {}, FRAMES)],
    },
}
# The whole grid, for ./run_tests.sh --long.
LONG = {
    "dit": {
        2: [
            (PP, schedule("gpipe"), FLOW),
            (PP, FOLDED, FLOW),
            (DP, {}, REPA),
            (COPIES, {}, CONV),
            (TP, {}, CONV),
            (PLAIN, {}, REPA),
            (PLAIN, {}, CONV),
            (CP, {}, REPA),
            (ULYSSES, {}, CONV),
            (PP, schedule("gpipe"), REPA, "full"),
            (PP, schedule("1f1b", split=[1, 4]), REPA),
            (PP, schedule("1f1b"), CONV, "selective"),
            (PP, schedule("looped_bfs", 2), REPA),
            (PP, schedule("zbv_zero_bubble"), REPA),
            (PP, schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5), CONV),
        ],
        4: [
            (TP | CP, {}, CONV),
            (HSDP, {}, REPA, "full"),
            (DP | PP, schedule("zbv_zero_bubble"), CONV),
            (PLAIN | PP, schedule("1f1b"), REPA),
            (PLAIN | CP, {}, CONV),
            (HSDP, {}, DDPM),
            (DP | TP, {}, FLOW),
            (DP | PP, schedule("zbv_zero_bubble"), FLOW),
            (TP | CP, {}, DDPM),
            (COPIES | ULYSSES, {}, FLOW),
            ({"cp": 4}, {}, DDPM),
            ({"cp": 4, "cp_method": "ulysses"}, {}, FLOW),
            (COPIES | TP, {}, FLOW),
            (COPIES | CP, {}, FLOW),
            (COPIES | PP, schedule("interleaved_1f1b", 4), FLOW),
            (TP | ULYSSES, {}, FLOW),
            (PLAIN | PP, schedule("1f1b"), DDPM),
            (CP | PP, schedule("interleaved_zero_bubble", 2), FLOW),
        ],
        8: [
            (PP | TP | ULYSSES, schedule("zbv_zero_bubble"), DDPM, "attention"),
            (PP | DP | TP, schedule("dualpipev"), REPA, "attention"),
            (PP | DP | CP, schedule("1f1b"), DDPM, "full"),
            (DP | CP | TP, {}, DDPM, "attention"),
            (COPIES | ULYSSES | TP, {}, FLOW, "full"),
            (HSDP | TP, {}, FLOW, "selective"),
            (HSDP | CP, {}, FLOW),
            (HSDP | PP, schedule("interleaved_zero_bubble", 2), FLOW),
        ],
    },
    "gpt": {
        2: [
            (COPIES, {}, UNTIED),
            (PLAIN, {}, TIED),
            (CP, {}, UNTIED),
            (PP, schedule("interleaved_zero_bubble", 2), TIED),
            (PP, schedule("dualpipev"), UNTIED),
        ],
        4: [
            ({"pp": 4}, FOLDED, TIED),
            (COPIES | PP, schedule("1f1b"), TIED),
            (TP | PP, schedule("dualpipev"), TIED),
            (CP | PP, schedule("1f1b"), TIED),
        ],
        8: [
            (PP | CP | TP, FOLDED, TIED),
            (PP | DP | TP, schedule("interleaved_zero_bubble", 2), TIED, "attention"),
        ],
    },
    "bert": {
        2: [
            (DP, {}, POST_PAIRS),
            (COPIES, {}, PRE_PAIRS),
            (TP, {}, PRE),
            (ULYSSES, {}, PRE_PAIRS),
            (PP, schedule("1f1b"), POST),
            (PP, FOLDED, PRE_PAIRS),
            (PP, schedule("interleaved_zero_bubble", 2), POST_PAIRS),
            (PP, schedule("dualpipev"), POST_PAIRS),
        ],
        4: [
            ({"pp": 4}, FOLDED, POST_PAIRS),
            ({"tp": 4}, {}, POST_PAIRS),
            (HSDP, {}, POST_PAIRS),
            (DP | TP, {}, PRE),
            (PP | ULYSSES, FOLDED, POST_PAIRS),
            (DP | PP, schedule("zbv_zero_bubble"), POST_PAIRS),
            (DP | ULYSSES, {}, PRE_PAIRS),
            (TP | PP, schedule("dualpipev"), POST_PAIRS),
            (TP | CP, {}, POST),
            (TP | ULYSSES, {}, POST_PAIRS),
        ],
        8: [
            (PP | DP | TP, schedule("interleaved_zero_bubble", 2), POST_PAIRS),
            (PP | TP | ULYSSES, FOLDED, PRE_PAIRS, "selective"),
            (HSDP | TP, {}, POST_PAIRS, "attention"),
        ],
    },
    "z_image": {
        2: [
            (ULYSSES, {}, Z_SIZES),
            (DP, {}, Z_SIZES),
            (COPIES, {}, RELEASED),
            (PLAIN, {}, Z_SIZES),
            (PP, schedule("zbv_zero_bubble"), RELEASED),
            (PP, schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5), Z_SIZES),
        ],
        4: [
            (TP | CP, {}, Z_SIZES, "full"),
            (PLAIN | CP, {}, Z_SIZES, "selective"),
            (TP | PP, schedule("dualpipev"), Z_SIZES),
            (DP | TP, {}, Z_SIZES, "selective"),
            (DP | CP, {}, Z_SIZES),
            (HSDP, {}, RELEASED),
            (PP | ULYSSES, FOLDED, Z_SIZES, "attention"),
            ({"cp": 4}, {}, Z_SIZES),
        ],
        8: [(PP | TP | CP, schedule("1f1b"), Z_SIZES), (DP | PP | TP, FOLDED, RELEASED)],
    },
    "flux2": {
        2: [
            (TP, {}, FLUX_SIZES),
            (CP, {}, FLUX_SIZES),
            (ULYSSES, {}, FLUX_SIZES),
            (DP, {}, FLUX_SIZES),
            (COPIES, {}, RELEASED),
            (PLAIN, {}, FLUX_SIZES),
            (PP, schedule("zbv_zero_bubble"), RELEASED),
            (PP, schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5), FLUX_SIZES),
        ],
        4: [
            (TP | CP, {}, FLUX_SIZES, "full"),
            (TP | PP, schedule("dualpipev"), FLUX_SIZES),
            (DP | TP, {}, FLUX_SIZES, "selective"),
            (DP | CP, {}, FLUX_SIZES),
            (HSDP, {}, RELEASED),
            (PP | ULYSSES, FOLDED, FLUX_SIZES, "attention"),
            ({"cp": 4}, {}, FLUX_SIZES),
        ],
        8: [
            (PP | TP | CP, schedule("1f1b"), FLUX_SIZES),
            (DP | PP | TP, FOLDED, RELEASED),
            (PP | TP | CP, FOLDED, FLUX_EDITS, "selective"),
        ],
    },
    "wan": {
        2: [
            (ULYSSES, {}, FRAMES),
            (DP, {}, FRAMES),
            (COPIES, {}, RELEASED),
            (PLAIN, {}, FRAMES),
            (PP, schedule("gpipe"), FRAMES),
            (PP, schedule("1f1b"), FRAMES),
            (PP, schedule("looped_bfs", 2), FRAMES),
            (PP, schedule("interleaved_zero_bubble", 2), FRAMES),
            (PP, schedule("zbv_zero_bubble"), RELEASED),
            (PP, schedule("dualpipev"), FRAMES),
            (PP, schedule("interleaved_zero_bubble", 2, order="run_time", memory=1.5), FRAMES),
        ],
        4: [
            ({"tp": 4, "sequence_parallel": False}, {}, FRAMES),
            ({"cp": 4}, {}, FRAMES),
            ({"cp": 4, "cp_method": "ulysses"}, {}, FRAMES),
            (TP | CP, {}, FRAMES, "full"),
            (PLAIN | ULYSSES, {}, FRAMES, "selective"),
            (TP | PP, schedule("dualpipev"), FRAMES),
            (DP | TP, {}, FRAMES, "selective"),
            (DP | CP, {}, FRAMES),
            (HSDP, {}, RELEASED),
            (PP | ULYSSES, FOLDED, FRAMES, "attention"),
            ({"pp": 4}, FOLDED, FRAMES),
        ],
        8: [
            (PP | TP | CP, schedule("1f1b"), FRAMES),
            (DP | PP | TP, FOLDED, RELEASED),
            (PP | TP | CP, FOLDED, FIRST_FRAMES, "selective"),
        ],
    },
    "joint_dit": {
        2: [
            (DP, {}, JOINT),
            (TP, {}, TALL),
            (PP, schedule("1f1b"), TALL),
            (TP, {}, TWO_SIZES),
            (CP, {}, TWO_SIZES),
            (PP, FOLDED, TWO_SIZES),
            (COPIES, {}, TWO_SIZES),
            (CP, {}, JOINT, "full"),
            (PP, schedule("dualpipev"), TALL),
            (PP, FOLDED, JOINT),
            (ULYSSES, {}, TWO_SIZES),
            (PLAIN, {}, TWO_SIZES),
            (PP, schedule("dualpipev"), TWO_SIZES),
        ],
        4: [
            ({"tp": 4}, {}, TWO_SIZES),
            ({"cp": 4}, {}, TALL),
            ({"cp": 4, "cp_method": "ulysses"}, {}, TWO_SIZES),
            (HSDP, {}, TWO_SIZES),
            (DP | TP, {}, TWO_SIZES),
            (DP | CP, {}, TWO_SIZES),
            (DP | PP, schedule("zbv_zero_bubble"), TWO_SIZES),
            (TP | PP, schedule("dualpipev"), TWO_SIZES),
            (PLAIN | ULYSSES, {}, EDITS, "full"),
            (DP | PP, schedule("zbv_zero_bubble"), EDITS),
            (TP | ULYSSES, {}, TALL),
            (CP | PP, schedule("interleaved_zero_bubble", 2), TWO_SIZES),
            ({"pp": 4}, FOLDED, TWO_SIZES),
        ],
        8: [
            (PP | TP | CP, FOLDED, TWO_SIZES, "selective"),
            (PP | TP | ULYSSES, schedule("zbv_zero_bubble"), TWO_SIZES, "attention"),
            (PP | DP | CP, schedule("1f1b"), TWO_SIZES, "full"),
            (DP | CP | TP, {}, TWO_SIZES),
        ],
    },
}
# Where fp64 shows more; in the whole grid also in fp32.
IN_FP64 = {
    "dit": [TP, CP, PP, TP | CP, CP | PP, HSDP, PP | TP | CP, DP | CP | TP],
    "gpt": [TP, PP, CP, HSDP, TP | PP, TP | CP],
    "bert": [TP, {"tp": 4}, ULYSSES, PP, HSDP, TP | PP, DP | TP, TP | CP, PP | ULYSSES],
    "joint_dit": [TP, PLAIN, ULYSSES, PP, TP | CP, PP | TP | CP, DP | CP, {"cp": 4}],
    "z_image": [TP, CP, ULYSSES, PP, PLAIN],
    "flux2": [TP, CP, ULYSSES, PP, PLAIN],
    "wan": [TP, CP, ULYSSES, PP, PLAIN, {"tp": 4}, {"cp": 4}],
}


def case_config(model, parallel, pipeline, kind, dtype="fp32", mode="none", size=None):
    """As small as the layout allows, see `size_for`: there are more ranks than cores."""
    number, batch = size or size_for(parallel, pipeline)
    layers = {"num_layers": number}
    sections = {
        "parallel": parallel,
        "pipeline": pipeline,
        "precision": {"dtype": dtype},
        "activation_checkpoint": {"mode": mode},
        "ema": {"decays": []},  # One step is measured.
        "training": {
            "global_batch_size": batch,
            "microbatch_size": 1 if data_ranks(parallel) > 1 else 2,
        },
    }
    if "repa" in kind:
        sections |= repa_sections(**kind["repa"])
        kind = FLOW
    if model == "dit":
        return tiny_config(model=layers | {"qk_norm": True}, objective=kind, **sections)
    if model == "gpt":
        # Then the loss's divisor is a sum over ranks, and weights are sliced with their tokens.
        ends = {} if kind.get("tie_word_embeddings", True) else {"end_of_document": 0}
        objective = {"mask_end_of_document": bool(ends)}
        return gpt_config(data=ends, objective=objective, model=layers | kind, **sections)
    if model in TOKENS_OF:
        if model != "joint_dit":
            layers = blocks_of_kinds(model, layers["num_layers"])
        of_data = {key: kind[key] for key in ("others", "reference") if key in kind}
        keys = {key: value for key, value in kind.items() if key not in of_data}
        if "reference" in kind:
            of_data["masks"] = True
            sections["objective"] = {"reference_dropout": 0.25}
        if "others" in kind:
            size = {"tokens_per_step": batch * TOKENS_OF[model], "batch_multiple": batch}
            sections["training"] |= size | {"global_batch_size": None}
        sections["data"] = of_data
        return joint_config(model, model=layers | keys, **sections)
    norm_place, sentence_order = kind
    keys = {"norm_place": norm_place, "dropout": 0.1 if kind == POST_PAIRS else 0.0}
    return bert_config(sentence_order=sentence_order, model=layers | keys, **sections)


# Tokens of the largest sample of a text-to-image network.
TOKENS_OF = {"joint_dit": 8, "z_image": 32, "flux2": 16, "wan": 16}
FEW_LAYERS = 3
"""First, middle and last: enough without a pipeline."""


def blocks_of_kinds(model, layers):
    """Keys of [model] that make so many blocks of all kinds."""
    if model == "z_image":
        return {"num_layers": layers - 2, "num_refiner_layers": 1}
    if model == "wan":
        return {"num_layers": layers}
    return {"num_double_layers": 2, "num_single_layers": layers - 2}


def size_for(parallel, pipeline):
    """(layers, samples of a step).

    Eight stages need as many layers; five leave stages uneven. Samples are two microbatches for
    every rank, and as many as the schedule of a pipeline needs.
    """
    if "pp" not in parallel:
        return FEW_LAYERS, 8 if data_ranks(parallel) > 2 else 4
    return 8 if parallel["pp"] * pipeline.get("virtual_stages", 1) == 8 else 5, 8


def data_ranks(parallel):
    return parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)


def measure(world, config):
    """Loss, gradients, their norm and a prediction."""
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    batches = one_of_each_bucket(trainer)
    # Three rows, which microbatches of two do not divide; the same ones on every rank.
    rows, inspect = [(number, number) for number in range(3)], trainer.objective.inspect
    first = loader.load_samples(trainer.source, rows, inspect, world.device, 3.0)
    few = trainer.objective.prepare(first, torch_rng(trainer, first))
    lengths = {name: value for name, value in few.context.items() if name == "lengths"}
    prediction = trainer.executor.predict(few.inputs, few.static, lengths)
    every = [trainer.objective.prepare(each, torch_rng(trainer, each)) for each in batches]
    loss = loss_of(trainer, trainer.executor, every)
    gradients = {name: whole(p.grad) for name, p in trainer.parameters.items()}
    norm = clip_norm(trainer.parameters.values(), 0).item()
    if config.parallel.pp > 1 and config.pipeline.order == "planned":
        assert_same_in_the_other_runtime(trainer, every, loss, gradients)
    return loss, gradients, norm, prediction


def one_of_each_bucket(trainer):
    """The first batch of every bucket, in the order of the buckets."""
    found = {}
    for step, batch in zip(steps_from(trainer.step_plan, 0), trainer.batches(), strict=False):
        found.setdefault(step.bucket, batch)
        if len(found) == len(trainer.plan.each_bucket):
            return [found[bucket] for bucket in sorted(found)]


def loss_of(trainer, executor, every):
    """The sum of the losses of some batches, whose gradients are added up."""
    return sum(trainer.mesh.sum_loss(executor.step(prepared)).item() for prepared in every)


def assert_same_in_the_other_runtime(trainer, every, loss, gradients):
    """torch's runtime and the own loop give the same bits."""
    for parameter in trainer.parameters.values():
        parameter.grad = None
    other = beside(trainer, "own" if trainer.plan.runtime.torch else "torch")
    assert loss_of(trainer, other, every) == loss
    for name, parameter in trainer.parameters.items():
        assert torch.equal(whole(parameter.grad), gradients[name]), name


def beside(trainer, runtime):
    """Another executor of a trainer's stages."""
    pipeline = replace(trainer.plan.pipeline, runtime=runtime)
    buckets = tuple(replace(each, pipeline=pipeline) for each in trainer.plan.buckets)
    plan = replace(trainer.plan, pipeline=pipeline, buckets=buckets)
    assert all((each.runtime.torch is None) == (runtime == "own") for each in plan.each_bucket)
    every = getattr(trainer.executor, "by_shapes", {"": trainer.executor}).values()
    stages = getattr(next(iter(every)), "inner", next(iter(every))).stages
    parts = {index: stage.part for index, stage in stages.items()}
    return run_executor(plan, trainer.objective, trainer.mesh, parts, trainer.world.device)


def compare(found, expected):
    """Relative errors: loss, norm, prediction, and the worst gradient with its name.

    Gradients relative to the largest of the tensor, with a floor: that of the key bias is 0.
    """
    loss, gradients, norm, prediction = found
    _, whole_gradients, whole_norm, whole_prediction = expected
    errors = {}
    for name, gradient in gradients.items():
        floor = max(whole_gradients[name].abs().max().item(), 1e-3 * whole_norm)
        errors[name] = (gradient - whole_gradients[name]).abs().max().item() / floor
    worst = max(errors, key=errors.get)
    return {
        "loss": abs(loss - expected[0]) / expected[0],
        "norm": abs(norm - whole_norm) / whole_norm,
        "prediction": (prediction - whole_prediction).abs().max().item()
        / whole_prediction.abs().max().item(),
        "gradient": errors[worst],
        "worst": worst,
        "names": sorted(errors),
    }


SIZES = (2, 4, 8)
MODELS = tuple(CASES)


def cases_of(model, num_ranks, is_long=False):
    """(model, [parallel], [pipeline], kind, dtype, recomputation mode) of every case."""
    cases = CASES[model].get(num_ranks, [])
    if is_long:
        late = LONG[model].get(num_ranks, [])
        cases = late + [case for case in cases if case[0] in IN_FP64[model]]
    return [
        (model, parallel, pipeline, kind, dtype, *(mode or ["none"]))
        for parallel, pipeline, kind, *mode in cases
        for dtype in dtypes_of(model, parallel, is_long)
    ]


def all_cases_of(models=MODELS, sizes=SIZES, late=(False, True)):
    return [case for which in itertools.product(models, sizes, late) for case in cases_of(*which)]


def dtypes_of(model, parallel, is_long):
    """The formats to compute a layout in."""
    if parallel not in IN_FP64[model]:
        return ("fp32",)
    return ("fp32", "fp64") if is_long else ("fp64",)


def key_of(model, parallel, pipeline, kind, dtype, *_):
    """The key of a case's reference: model, kind, format, layers and samples."""
    return json.dumps([model, kind, dtype, size_for(parallel, pipeline)])


def reference(world, keys):
    """One process, by key."""
    found = {}
    for key in keys:
        model, kind, dtype, size = json.loads(key)
        config = case_config(model, {}, {}, kind, dtype, size=size)
        found[key] = measure(world, config)
    return found


def all_cases(world, references, cases):
    results = {}
    for case in cases:
        found = measure(world, case_config(*case))
        results[json.dumps(case)] = compare(found, references[key_of(*case)])
    return results


@pytest.fixture(scope="module")
def references(request):
    cases = all_cases_of(late=(False, True) if request.config.getoption("--long") else (False,))
    keys = [key_of(*case) for case in cases]
    # And the rounding of one process, see `rounding_of`.
    for model, _, _, kind, *_ in cases:
        keys += [key_of(model, {}, {}, kind, dtype) for dtype in TOLERANCE]
    return on_ranks(1, reference, list(dict.fromkeys(keys)))[0]


@pytest.fixture(scope="module")
def launched(references):
    """By number of ranks: what every rank found in the cases of all models."""

    @cache
    def launch(num_ranks, is_long):
        cases = all_cases_of(sizes=[num_ranks], late=[is_long])
        wanted = {key_of(*case) for case in cases}
        return on_ranks(num_ranks, all_cases, {key: references[key] for key in wanted}, cases)

    return launch


TOLERANCE = {"fp32": 1e-6, "fp64": 1e-9}


def rounding_of(model, kind, references):
    """The error of one process's own gradients in fp32: it differs between CPUs."""
    fp32, fp64 = (references[key_of(model, {}, {}, kind, dtype)] for dtype in TOLERANCE)
    return compare(fp32, fp64)["gradient"]


def check(model, num_ranks, launched, references, is_long=False):
    by_rank = launched(num_ranks, is_long)
    for case in cases_of(model, num_ranks, is_long):
        _, _, _, kind, dtype, _ = case
        found = [results[json.dumps(case)] for results in by_rank]
        seen = set().union(*(errors["names"] for errors in found))
        assert seen == set(references[key_of(*case)][1]), case
        tolerance = TOLERANCE[dtype]
        if model in TOKENS_OF and dtype == "fp32":
            tolerance = 2e-6
        if dtype == "fp32" and model not in ("dit", "joint_dit"):
            tolerance = max(tolerance, 2 * rounding_of(model, kind, references))
        for errors in found:
            # A loss is reported in fp32.
            assert errors["loss"] <= 1e-6, case
            assert errors["norm"] <= 1e-6, case
            assert errors["gradient"] <= tolerance, (case, errors["worst"], errors["gradient"])
            # That of a DiT, from random weights, is larger than what it was added up from.
            limit = 1e-5 if model == "dit" else tolerance
            assert errors["prediction"] <= limit, (case, errors["prediction"])


LANDING = [(size, model) for size in SIZES for model in MODELS if size in CASES[model]]
REST = [(size, model) for size in SIZES for model in MODELS]


@pytest.mark.parametrize(("num_ranks", "model"), LANDING)
def test_every_mesh_gives_what_one_process_gives(num_ranks, model, launched, references):
    check(model, num_ranks, launched, references)


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "model"), REST)
def test_the_rest_of_the_grid_gives_what_one_process_gives(num_ranks, model, launched, references):
    check(model, num_ranks, launched, references, is_long=True)


AXES = {"pp", "dp_replicate", "dp_shard", "cp", "tp"}


def meshes(model, *grids):
    """The axes of every case."""
    cases = [case for grid in grids for some in grid[model].values() for case in some]
    return [frozenset(a for a in AXES if parallel.get(a, 1) > 1) for parallel, *_ in cases]


def test_the_grid_has_every_axis_alone_every_pair_and_mixes_of_three():
    landing, whole_grid = meshes("dit", CASES), meshes("dit", CASES, LONG)
    for axis in AXES:
        assert frozenset({axis}) in landing
    for pair in map(frozenset, itertools.combinations(sorted(AXES), 2)):
        assert pair in whole_grid, pair
        # dp_replicate with another axis is like dp_shard with it.
        if "dp_replicate" not in pair:
            assert pair in landing + meshes("gpt", CASES), pair
    assert sum(len(mesh) >= 3 for mesh in whole_grid) >= 5
    # With two ranks, the previous rank is the next one.
    fours = [parallel for parallel, *_ in CASES["dit"][4]]
    assert {"pp": 4} in fours
    assert {"tp": 4} in fours


@pytest.mark.parametrize("model", ["z_image", "flux2", "wan"])
def test_released_networks_are_on_every_axis_and_on_most_pairs(model):
    found = set(meshes(model, CASES, LONG))
    assert {frozenset({axis}) for axis in AXES} <= found
    pairs = set(map(frozenset, itertools.combinations(sorted(AXES - {"dp_replicate"}), 2)))
    assert len(pairs & found) >= 5
    assert sum(len(mesh) >= 3 for mesh in found) >= 2


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_to_compute_in_fp64_is_in_the_grid(model):
    every = [case[1] for case in all_cases_of([model])]
    assert all(parallel in every for parallel in IN_FP64[model])


def test_a_text_to_image_dit_is_on_twenty_meshes_with_two_sizes_of_pictures():
    meshes = [case[1] for case in all_cases_of(["joint_dit"]) if case[3] == TWO_SIZES]
    assert len({json.dumps(mesh) for mesh in meshes}) >= 20


def test_a_bert_is_on_twenty_meshes_and_in_all_kinds():
    cases = all_cases_of(["bert"])
    assert len({json.dumps(case[1:3]) for case in cases}) >= 20
    kinds = [case[3] for case in cases]
    assert all(kind in kinds for kind in (POST, PRE, POST_PAIRS, PRE_PAIRS))


def drifting(world):
    """The tied weight after 50 steps: of the first stage, and of the last stage's copy."""
    config = gpt_config(parallel=PP, training={"steps": 50}, optimizer={"lr": 1e-2})
    trainer = Trainer(config, world)
    batches = trainer.batches()
    for trainer.step in range(1, 51):
        trainer.train_step(next(batches))
    tied = trainer.executor.tied
    tied.fetch()
    dist.barrier()  # A rank that ends would take its message along.
    return [whole(p) for p in (*tied.owners, *tied.copies)], sorted(trainer.parameters)


def test_tied_weights_have_equal_bits_after_fifty_steps_and_one_name():
    (owned, first), (copied, last) = on_ranks(2, drifting)
    assert torch.equal(owned[0], copied[0])
    assert "embed.token.weight" in first
    assert "head.out.weight" not in first + last
