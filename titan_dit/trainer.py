"""The algorithm: build, fit, step. It knows no model, no objective and no mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit import __version__, catalog, config_file
from titan_dit.config import JobConfig
from titan_dit.data import loader
from titan_dit.data.base import DataConfig, check_fits
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.data.units import scale_hint
from titan_dit.evaluation.generate import check_drawing, generate, preview_labels
from titan_dit.models.base import ModelConfig
from titan_dit.objectives.base import Batch, Objective
from titan_dit.observe import console, flops, images
from titan_dit.observe.metrics import (
    Meter,
    Metrics,
    Row,
    check_installed,
    finite_or_none,
    peak_gib,
)
from titan_dit.parallel.gradients import clip_norm
from titan_dit.parallel.mesh import Mesh, solve
from titan_dit.parallel.runtime import World, set_deterministic
from titan_dit.pipeline.build import build
from titan_dit.pipeline.checks import check_layout
from titan_dit.rng import SampleRNG
from titan_dit.section import UserError
from titan_dit.state import resume
from titan_dit.state.checkpoints import Checkpoints
from titan_dit.state.ema import EMA
from titan_dit.state.lr_schedule import learning_rate
from titan_dit.state.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.state.store import place

Config: TypeAlias = JobConfig[ModelConfig, Objective, DataConfig]


class Trainer:
    """One run on this rank. Building it leaves the run directory alone."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.folder = Path(config.job.dir or f"outputs/{config.job.name}")
        if config.training.deterministic:
            set_deterministic()
        check_installed(config.metrics)

        sizes = solve(config.parallel, world.size)
        check_layout(config, sizes)
        self.sampler = catalog.sampler(config.sampling.sampler, config.objective.name)
        check_drawing(
            config.objective,
            config.model,
            config.sampling.steps if config.sampling.every else 1,
            config.sampling.cfg_channels,
            "[sampling] {}",
        )
        self.source = config.data.open()
        check_fits(self.source.facts, config.model.sample_shape, config.model.num_classes)

        self.mesh = Mesh(sizes, world.device.type)
        plan = catalog.tensor_plan(config.model.name)
        built = build(config, self.mesh, plan, world.device)
        self.executor, self.parameters = built.executor, built.parameters
        self.num_tokens = config.model.token_shape[0]
        self.num_parameters = built.num_parameters
        self.flops_per_sample = built.flops_per_sample

        self.optimizer = build_optimizer(self.parameters.values(), config.optimizer)
        self.ema = EMA(self.parameters, config.ema)
        self.plan = BatchPlan(config.training.global_batch_size)
        self.step, self.cursor = 0, 0
        self.nan_steps = torch.zeros((), device=world.device)
        self.nan_steps_in_a_row = torch.zeros((), device=world.device)
        self.checkpoints = Checkpoints(
            place(config.checkpoint.dir or self.folder / "checkpoints"), config.checkpoint
        )
        self.meter = Meter()
        self.metrics: Metrics | None = None

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        config = self.config
        self.resume()
        self.open_run_directory()
        batches, first = self.batches(), self.step + 1
        self.meter.restart()
        while self.step < config.training.steps:
            self.step += 1
            with self.meter.waiting():
                batch = next(batches)
            loss, grad_norm, lr = self.train_step(batch)
            if self.step == first or self.due(config.metrics.every):
                self.report(loss, grad_norm, lr)
            if self.due(config.sampling.every):
                self.preview()
            if self.due(config.checkpoint.every):
                self.save()
            self.tell_of_saves()
        self.checkpoints.finish()
        self.tell_of_saves()
        self.say(f"done: step {self.step}, everything is in {self.folder}")

    def due(self, every: int) -> bool:
        """Whether what is done every so many steps is done after this one; 0 is never."""
        last = self.step == self.config.training.steps
        return bool(every) and (self.step % every == 0 or last)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of every global batch, from the cursor on."""
        config, mesh = self.config, self.mesh
        epochs = EpochOrder(config.job.seed, len(self.source))
        return loader.load(
            self.source,
            RankOrder(self.plan, epochs, mesh.data_rank, mesh.sizes.data),
            self.cursor,
            config.model,
            self.world.device,
            seed=config.job.seed,
            workers=config.data.workers,
        )

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """One optimizer step: this rank's share of the loss, the gradient norm, the rate.

        Nothing here waits for the device. A step with a non-finite loss or gradient changes
        neither weights nor averages, on any rank.
        """
        config = self.config
        rng = SampleRNG(config.job.seed, batch.sample_numbers)
        loss = self.executor.step(config.objective.prepare(batch, rng))
        grad_norm = clip_norm(self.parameters.values(), config.training.max_grad_norm)
        bad = ~grad_norm.isfinite()
        lr = learning_rate(
            config.lr_schedule, config.optimizer.lr, self.step, config.training.steps
        )
        apply_gradients(self.optimizer, lr, skip=bad)
        self.ema.update(self.step, skip=bad)
        self.nan_steps += bad
        self.nan_steps_in_a_row = (self.nan_steps_in_a_row + 1) * bad
        _, self.cursor = self.plan(self.cursor)
        self.meter.steps += 1
        return loss, grad_norm, lr

    def report(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Write a line of metrics; the only place where the host waits for the device."""
        values = (self.mesh.sum_loss(loss), grad_norm, self.nan_steps, self.nan_steps_in_a_row)
        loss_value, norm_value, nan_steps, in_a_row = torch.stack(values).tolist()
        step_ms, data_wait_ms = self.meter.read()
        rate = self.config.training.global_batch_size / step_ms * 1e3
        tflops = rate * self.flops_per_sample / self.world.size / 1e12
        peak = flops.peak_tflops(self.world.device, self.config.precision.dtype)
        row: Row = {
            "step": self.step,
            "samples": self.cursor,
            "loss": finite_or_none(loss_value),
            "grad_norm": finite_or_none(norm_value),
            "lr": lr,
            "step_ms": step_ms,
            "samples_per_s": rate,
            "tokens_per_s": rate * self.num_tokens,
            "tflops_per_gpu": tflops,
            "mfu": tflops / peak if peak else None,
            "peak_gib": peak_gib(self.world.device),
            "data_wait_ms": data_wait_ms,
            # Steps are skipped for nothing else yet.
            "skipped_steps": round(nan_steps),
            "nan_steps": round(nan_steps),
        }
        # The first line of a resumed run is for the person at the console only.
        if self.metrics and (self.step == 1 or self.due(self.config.metrics.every)):
            self.metrics.log(row)
        self.say(console.progress(row, self.config.training.steps))
        limit = self.config.faults.max_consecutive_bad_steps
        if limit and in_a_row >= limit:
            raise UserError(
                f"[faults] max_consecutive_bad_steps={limit}: the last {round(in_a_row)} steps had "
                f"a non-finite loss or gradient (step {self.step}). Lower [optimizer] lr, look at "
                "the data, or resume from an older checkpoint with --checkpoint.resume PATH."
            )

    def preview(self) -> None:
        """Draw samples of the averaged weights, each data rank its share, and the loss curve."""
        sampling, ranks = self.config.sampling, self.mesh.sizes.data
        share = -(-sampling.num // ranks)
        numbers = torch.arange(share * ranks, device=self.world.device)
        labels = preview_labels(sampling.num, self.config.model.num_classes).to(numbers.device)
        mine = numbers[self.mesh.data_rank * share :][:share]
        with self.meter.paused(), self.ema.swapped_in():
            tokens = generate(
                self.executor.predict,
                self.config.objective,
                self.config.model,
                labels[mine.clamp(max=sampling.num - 1)],  # Beyond `num`: rows to be cut off.
                mine,
                seed=self.config.job.seed,
                sampler=self.sampler,
                steps=sampling.steps,
                eta=sampling.eta,
                cfg_scale=sampling.cfg_scale,
                cfg_channels=sampling.cfg_channels,
            )
            tokens = self.mesh.gather_over_data(tokens)[: sampling.num]
            if self.metrics:
                picture = self.folder / "samples" / f"step-{self.step:08d}.png"
                facts = self.source.facts
                latents = facts.to_stored_units(self.config.model.detokenize(tokens))
                images.draw_grid(picture, latents, labels.tolist(), facts.value_range)
                self.draw_curve()
                self.say(f"drew {picture}")

    def draw_curve(self) -> None:
        """The loss so far, as a picture."""
        if self.metrics:
            title = f"{self.config.job.name}: training loss"
            images.draw_curve(self.folder / "loss.png", *self.metrics.curve(), title)

    def tensors(self) -> dict[str, Any]:
        """Everything a checkpoint holds in tensors, under original names; loads in place."""
        return {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            "ema": self.ema.averages,
        }

    def save(self) -> None:
        """Begin a checkpoint, and wait until the tensors may change again; all ranks together."""
        with self.meter.paused():
            record = {
                "step": self.step,
                "cursor": self.cursor,
                "nan_steps": round(self.nan_steps.item()),
                "config": config_file.to_tables(self.config),
                "data": self.source.facts.as_json(),
                "layout": str(self.mesh.sizes),
                "versions": {"titan_dit": __version__, "torch": torch.__version__},
            }
            self.checkpoints.save(self.step, self.tensors(), record)
            self.draw_curve()

    def tell_of_saves(self) -> None:
        """Say how the saves ended that have ended."""
        for line in self.checkpoints.poll():
            self.say(line)

    def resume(self) -> None:
        """Load the checkpoint that the config asks for, if there is one."""
        settings = self.config.checkpoint
        start = resume.starting_point(self.checkpoints, settings.resume)
        path, record = start.path, start.record
        if path is None:
            return
        for line in start.told():
            self.say(line)
        if not settings.allow_changes:
            # Built anew: keys that did not exist then get their defaults, as they do now.
            before = config_file.build(record["config"], catalog.variant)
            configs = config_file.to_tables(before), config_file.to_tables(self.config)
            digests = record["data"]["digest"], self.source.facts.digest
            resume.check_same_mathematics(path, configs, digests, record.get("imported", False))
        load = resume.load_imported if record.get("imported") else resume.load
        load(path, record, self.tensors(), self.ema, verified=True)
        self.step, self.cursor = record["step"], record["cursor"]
        self.nan_steps.fill_(record["nan_steps"])
        if self.world.is_main:
            resume.set_aside_newer(self.checkpoints, start)
        self.say(f"resumed from {path}")

    def open_run_directory(self) -> None:
        """Write the resolved config, open the metrics, and say what will be done."""
        config = self.config
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(config_file.to_toml(config))
            tables = config_file.to_tables(config)
            self.metrics = Metrics(self.folder, config.job.name, config.metrics, self.step, tables)
        for line in (
            f"titan_dit {__version__}, torch {torch.__version__}: {self.mesh.sizes} on "
            f"{self.world.device.type}, {config.precision.dtype}",
            f"model   {config.model.name}: {self.num_parameters:,} parameters, {self.num_tokens} "
            f"tokens, {self.flops_per_sample / 1e9:.3g} GFLOP per sample and step",
            f"data    {config.data.name}: {len(self.source):,} samples, "
            f"{self.source.facts.num_classes} classes",
            f"steps   {self.step} of {config.training.steps} done, "
            f"{config.training.global_batch_size} samples each",
            f"output  {self.folder}",
        ):
            self.say(line)
        if self.world.is_main and (hint := scale_hint(self.source, config.model.sample_shape[0])):
            self.say(hint)

    def say(self, line: str) -> None:
        """Tell the person at the console, once."""
        if self.world.is_main:
            console.say(line)
