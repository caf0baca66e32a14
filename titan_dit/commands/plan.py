"""`python -m titan_dit plan`: time, memory and the best layout of a run, without a GPU.

`plan --run RUN` sets a plan beside what a run measured, `plan --calibrate` fits a device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from titan_dit.commands import results_file
from titan_dit.commands.flags import PlanFlags
from titan_dit.config import catalog, config_file, flags, stages
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.models.base import ModelConfig
from titan_dit.observe import console
from titan_dit.opening import (
    bucket_facts,
    bucket_lines,
    example_of,
    open_objective,
    plan_run,
    settled_stages,
)
from titan_dit.plan import RunPlan, resolve
from titan_dit.planner import hardware, links, report
from titan_dit.planner.candidates import KEYS, Space, all_on_dp_shard
from titan_dit.planner.choice import Recommendation, peak_of, search, with_buckets_timed
from titan_dit.planner.counts import Derived, Rehearsals
from titan_dit.planner.hardware import Device
from titan_dit.planner.measured import beside, outdated
from titan_dit.planner.memory import memory, state_of
from titan_dit.planner.rates import OURS
from titan_dit.planner.search import CostModel
from titan_dit.planner.step import Estimate, check_host_steps, check_offload
from titan_dit.ranks import disk_errors
from titan_dit.system.files import try_to_replace


def main(options: PlanFlags, keys: Sequence[str]) -> None:
    """Plan, set a plan beside a run, or calibrate."""
    if options.calibrate or options.run:
        check_unused(options, keys)
        measured(options)
        return
    check_options(options)
    device = hardware.device_of(options.device)
    for line in outdated(device):
        console.say(line)
    check_gpus(options.gpus, device)
    config, fixed = config_of(options, keys)
    training, found = config.training, list[Recommendation]()
    if training.stages and options.write:
        raise UserError(
            f"--write {options.write}: {options.config} has [[stages]], each of which has a layout "
            "of its own. Leave --write out, and set parallel.KEY in the stages."
        )
    for number, each in enumerate(settled_stages(config)):
        if training.stages:
            console.say(stages.line_of(training, number))
        with stages.naming(config, number):
            found.append(plan(stages.alone(each), options.gpus, device, fixed, options.top))
            print_choice(found[-1], options)
    if training.stages:
        hours = sum(report.gpu_hours(choice) or 0.0 for choice in found)
        console.say(f"stages  {hours:,.0f} GPU-hours for all {training.stage_ends[-1]:,} steps")
    if options.out:
        reports = [report.as_json(choice, options.top, options.config) for choice in found]
        values = {"stages": reports} if training.stages else reports[0]
        results_file.write("--out", Path(options.out), json.dumps(values, indent=2) + "\n")
    if options.write:
        best = found[0].space.config_of(found[0].best.candidate)
        text = config_file.to_toml(config_file.to_tables(best))
        results_file.write("--write", Path(options.write), text)


def print_choice(choice: Recommendation, options: PlanFlags) -> None:
    """Print a plan, after the checks of a start once more for the very config that it names."""
    best = choice.space.config_of(choice.best.candidate)
    of_buckets = bucket_lines(best, plan_run(best, options.gpus))
    for line in (*report.lines(choice, options.top, options.config), *of_buckets):
        console.say(line)


def check_unused(options: PlanFlags, keys: Sequence[str]) -> None:
    """Raise UserError for flags of the search with --run or --calibrate, which ignore them."""
    flag, used = "--run", ["run", "device", "trust"]
    if options.calibrate:
        flag, used = "--calibrate", ["calibrate", "device", "out", "trust"]
    given = [f.name for f in fields(options) if getattr(options, f.name) != f.default]
    unused = [f"--{name}" for name in given if name not in used] + list(keys[:1])
    if unused:
        others = " and ".join(f"--{name}" for name in used[1:])
        raise UserError(
            f"{unused[0]} has no effect with {flag}, which reads {others} alone. Leave out one of "
            "the two."
        )


def check_options(options: PlanFlags) -> None:
    """Raise UserError for a plan without config, GPUs or device, and for files of another kind."""
    if not options.config:
        raise UserError(
            "plan needs --config FILE, such as --config dit_7b.toml; or --run RUN, or --calibrate "
            "gpu.json RUN ..."
        )
    if not options.gpus:
        raise UserError("plan needs --gpus NUMBER, such as --gpus 64.")
    if not options.device:
        raise UserError(
            f"plan needs --device NAME, one of {', '.join(hardware.names())}, or a .toml file."
        )
    for flag, path, suffix in (("out", options.out, ".json"), ("write", options.write, ".toml")):
        if path and Path(path).suffix != suffix:
            raise UserError(f"--{flag} {path}: name a {suffix} file.")
        if path:
            check_writable(flag, Path(path))


def check_writable(flag: str, file: Path) -> None:
    """Refuse, before the search, a file that cannot be written."""
    with disk_errors.writing(f"--{flag} {file}: its folder {file.parent}"):
        file.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors.writing(f"--{flag} {file}"):
        try_to_replace(file)


def check_gpus(gpus: int, device: Device) -> None:
    """Raise UserError for GPUs that leave a node partly used, unless they are in a single node."""
    node = device.gpus_per_node
    if not links.fills_nodes(gpus, device):
        below = gpus // node * node
        raise UserError(
            f"--gpus {gpus}: {device.name} has {node} GPUs a node, and {gpus} fill "
            f"{below // node} and a part of one. Give --gpus {below} or --gpus {below + node}."
        )
    if gpus > node and not device.nics_per_node:
        raise UserError(
            f"--gpus {gpus}: {device.name} has {node} GPUs a node and no link between nodes. Give "
            f"at most --gpus {node}, or a file with nics_per_node, nic_gb_per_s and "
            "node_latency_us."
        )


def config_of(options: PlanFlags, keys: Sequence[str]) -> tuple[JobConfig, list[str]]:
    """(the config with the keys of the command line, the keys of `KEYS` that it fixes).

    Raises UserError for a --fix of another form.
    """
    words = ["--config", options.config, *keys]
    for fix in (each for several in options.fix for each in several):
        key, equals, value = fix.partition("=")
        if not equals or not value or "." not in key:
            raise UserError(f"--fix {fix}: write section.key=value, such as parallel.tp=4.")
        words.append(f"--{key.strip().lstrip('-')}={value.strip()}")
    _, given = flags.split(words, (*config_file.plain_sections(), *config_file.CHOSEN_BY_NAME))
    return config_file.load(words, catalog.variant), [
        key for key in given if key in (*KEYS, "pipeline.split")
    ]


def plan(
    config: JobConfig, gpus: int, device: Device, fixed: Sequence[str], top: int
) -> Recommendation:
    """Search, then rehearse. Raises UserError if nothing can run or fits."""
    device.peak(config.precision.dtype)
    check_offload(config.offload, device)
    check_host_steps(config)
    # The microbatch size is searched.
    config = replace(config, training=replace(config.training, tokens_per_microbatch=None))
    space = Space(config, gpus, device, fixed)
    data = example_of(config)
    open_objective(config, resolve(config_alone(config), 1), data)
    exact, state = Rehearsals(config).counts, state_of(config)
    model = CostModel(
        counts=Derived(exact).counts,
        memory=lambda plan, counts: memory(plan, counts, OURS, state, only_fullest=True),
    )
    found = search(space, model, exact, partial(peak_of, config, data), top, shows=True)
    facts = bucket_facts(config)
    if facts is None:
        return found

    def timed(plan: RunPlan, of_bucket: ModelConfig) -> Estimate:
        counts = Rehearsals(replace(config, model=of_bucket)).counts(plan)
        return model.estimate(plan, counts, device)

    models = [each for _, each in config.objective.sized_models(config.model, facts)]
    return with_buckets_timed(found, models, facts.bucket_counts, timed)


def config_alone(config: JobConfig) -> JobConfig:
    """The config on one rank."""
    return replace(config, parallel=all_on_dp_shard(config.parallel))


def measured(options: PlanFlags) -> None:
    """Print a run beside its plan (--run), or fit a device's rates to runs (--calibrate).

    Raises UserError for missing flags.
    """
    device = hardware.device_of(options.device) if options.device else None
    if options.calibrate:
        from titan_dit.planner.calibrate import calibrate

        if not options.out or Path(options.out).suffix != ".toml":
            raise UserError("--calibrate needs --out FILE.toml, for the device.")
        files = [Path(name) for name in options.calibrate if name.endswith(".json")]
        runs = [Path(name) for name in options.calibrate if not name.endswith(".json")]
        if len(files) > 1:
            raise UserError(
                f"--calibrate {files[0]} {files[1]}: give one JSON of gpu.py, and runs."
            )
        measured_in = files[0] if files else None
        lines = calibrate(measured_in, runs, Path(options.out), device, options.trust)
    else:
        if device is None:
            raise UserError(f"--run needs --device, one of {', '.join(hardware.names())}.")
        lines = beside(Path(options.run or ""), device, options.trust)
    for line in lines:
        console.say(line)
