"""The algorithm: build, fit, step. It knows no model, no objective and no mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from titan_dit import __version__
from titan_dit.checkpoint import run_lock
from titan_dit.checkpoint.ranks import Ranks
from titan_dit.checks import device as device_fits
from titan_dit.checks import validate
from titan_dit.checks.parts import check_source, validate_parts
from titan_dit.config import catalog, config_file, dotted_names
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.data import loader
from titan_dit.data.base import Batch
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.execution.build import build
from titan_dit.hooks import KEY as HOOKS
from titan_dit.hooks import Hooks, Run
from titan_dit.launcher.failure import begun, leave
from titan_dit.launcher.stop_request import Reason, StopRequest
from titan_dit.launcher.watchdog import Watchdog
from titan_dit.objectives.base import DataShare
from titan_dit.observe import console
from titan_dit.observe.flops import Work
from titan_dit.observe.journal import Journal
from titan_dit.observe.metrics import Meter, Row, peak_gib, row_of
from titan_dit.observe.profile import Profile
from titan_dit.observe.profile_summary import DATA_WAIT, OPTIMIZER
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.lr_schedule import learning_rate
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.parallel.compile import Recompiles
from titan_dit.parallel.mesh import Mesh, followed
from titan_dit.parallel.process_group import World, set_deterministic
from titan_dit.plan import resolve
from titan_dit.recovery import fault_log, resume, rollback
from titan_dit.recovery.guard import Guard, Reading
from titan_dit.recovery.ledger import Ledger
from titan_dit.recovery.progress import Progress
from titan_dit.recovery.sample_log import SampleLog
from titan_dit.rng import SampleRNG
from titan_dit.system.garbage_collection import Collector
from titan_dit.validation import validation_set

VERSIONS = {"titan_dit": __version__, "torch": torch.__version__}


class Trainer:
    """One run on this rank. Building it leaves the run directory alone."""

    def __init__(self, config: JobConfig, world: World) -> None:
        self.config, self.world, job = config, world, config.job
        self.folder = resume.folder_of(job)
        if config.training.deterministic:
            set_deterministic()
        # The first rank's view decides, as it does in `resume`.
        following = world.gather(resume.has_begun(job, config.checkpoint))[0]
        self.plan = plan = resolve(config, world.size, following)
        validate(config, plan, world.device)
        self.hooks = Hooks(job.hooks, world.is_main)
        self.end_if_a_hook_failed()
        self.source = config.data.open()
        check_source(self.source, config.data.name)
        self.objective = config.objective.build(config.model, self.source.facts)
        parts = plan, self.objective, self.source.fields, config.data.name
        validate_parts(*parts, self.source, previews=bool(config.sampling.every))
        self.held_out = held_out_rows(self.source, job.seed, config.validation.num_held_out)
        self.epochs = EpochOrder.of(job.seed, len(self.source), self.held_out)
        self.validation_set = validation_set.open_apart(
            config.validation,
            config.data,
            self.source,
            self.held_out,
            job.seed,
            self.folder,
            world,
        )

        self.mesh = Mesh(plan.sizes, world.device.type)
        built = build(plan, self.objective, self.mesh, world.device)
        self.executor, self.parameters = built.executor, built.parameters
        self.num_parameters, self.notes = built.num_parameters, built.notes
        batch, tokens = plan.global_batch_size, plan.spec.num_tokens
        rates = built.flops_per_sample, world.size, world.device, plan.precision.dtype
        self.work = Work.of(batch, tokens, *rates)

        self.optimizer = build_optimizer(self.parameters.values(), config.optimizer)
        self.ema = EMA(self.parameters, config.ema)
        self.ema.run_beside(self.optimizer)
        self.step, self.cursor, self.ledger = 0, 0, Ledger()
        self.guard = Guard(config.faults, world.device)
        self.checkpoints = resume.checkpoints_of(job, config.checkpoint)
        self.journal = Journal(self.folder, job.name, is_written=world.is_main)
        self.say = self.journal.say
        self.meter, self.recompiles = Meter(), Recompiles()
        self.collector = Collector(config.training.gc_every)
        self.watchdog = Watchdog(self.folder, world.rank, config.faults.step_timeout_s)
        self.profile = Profile(config.profile, self.folder / "profile", world.rank, world.device)
        self.sample_log: SampleLog | None = None
        self.row: Row = {}

    def fit(self) -> int:
        """Train from the newest checkpoint, or from the start, to the last step.

        Returns the process's exit code: 0, or 130 after Ctrl-C.
        """
        saves_in = self.checkpoints.folder if self.config.checkpoint.every else None
        with self.watchdog, run_lock.held(self.folder, saves_in, self.say):
            self.resume()
            self.open_run_directory()
            with StopRequest(self.world.size) as stop, self.collector:
                self.train(stop)
        self.end_if_a_hook_failed()
        return stop.exit_code

    def end_if_a_hook_failed(self) -> None:
        """Raise UserError, on every rank, for a hook that has raised on any."""
        if self.hooks.wanted and any(failures := self.world.gather(self.hooks.failure)):
            raise UserError(next(text for text in failures if text))

    def train(self, stop: StopRequest) -> None:
        """Take steps until the last one, or until the ranks are asked to stop."""
        config = self.config
        batches, begun_at = self.batches(), self.step + 1
        self.meter.restart()
        begun()
        self.call_hooks("begun", stop)
        while self.step < config.training.steps and not stop.agreed():
            self.step += 1
            self.profile.begin(self.step)
            with self.meter.waiting(), self.profile.mark(DATA_WAIT):
                batch = next(batches)
            with self.recompiles:
                _, _, lr = self.train_step(batch)
            if self.sample_log:
                self.sample_log.write(self.step, batch)
            self.write_profile()
            shown = self.step == begun_at or self.due(config.metrics.every)
            validated = self.due(config.validation.every)
            # Looked at before a checkpoint too, which must not hold what has to be undone.
            looked = shown or validated or self.due(config.checkpoint.every)
            if looked or self.due(self.guard.every):
                reading = self.read_guard()
                if shown or validated:
                    self.report(reading, lr, self.validate() if validated else {})
            self.call_hooks("step_ended", stop)
            if self.guard.limit:
                self.go_back()
                batches, begun_at = self.batches(), self.step + 1
                continue
            if validated:
                self.call_hooks("validated", stop)
            if self.due(config.sampling.every):
                self.preview()
            if self.due(config.checkpoint.every):
                self.save()
                self.call_hooks("saved", stop)
            self.tell_of_saves()
            self.collector.after(self.step)
            self.watchdog.alive(self.step)
        if self.step < config.training.steps:
            self.stop_early(stop, begun_at)
        else:
            self.write_profile(stopped=True)
            self.finish_saves()
            self.say(f"done: step {self.step}, everything is in {self.folder}")
        self.call_hooks("ended", stop)

    def stop_early(self, stop: StopRequest, begun_at: int) -> None:
        """Save what has not been saved, and leave the launcher a note that steps are left."""
        every = self.config.checkpoint.every
        if self.guard.taken:
            self.read_guard()
        if self.guard.limit:
            self.go_back()
        elif every and self.step >= begun_at and not self.due(every):
            self.save()
            self.call_hooks("saved", stop)
        self.write_profile(stopped=True)
        self.finish_saves()
        leave({"stopped": stop.reason.name, "step": self.step})
        end = "the same command goes on from it" if every else "nothing saved: [checkpoint] every=0"
        by = f" by {HOOKS}" if stop.reason == Reason.HOOK else stop.by
        self.say(f"stopped{by} after step {self.step}; {end}")

    def call_hooks(self, moment: str, stop: StopRequest) -> None:
        """Show the run to the user's hooks; one that raises stops all ranks, in good order."""
        if not self.hooks.wanted:
            return
        slow = nullcontext() if moment == "step_ended" else self.watchdog.slow(f"in {HOOKS}")
        with slow, self.meter.paused():
            self.hooks.call(moment, self.step, self.cursor, self.row)
        if self.hooks.failure:
            stop.ask(Reason.HOOK)

    def due(self, every: int) -> bool:
        """True every `every` steps and on the last step; never if 0."""
        last = self.step == self.config.training.steps
        return bool(every) and (self.step % every == 0 or last)

    @property
    def batch_plan(self) -> BatchPlan:
        """Which samples come in which step."""
        return BatchPlan(self.plan.global_batch_size, self.ledger.skipped_ranges)

    @property
    def data_share(self) -> DataShare:
        """This rank's part of what the data-parallel ranks share."""
        mesh, device = self.mesh, self.world.device
        return DataShare(device, mesh.data_rank, mesh.sizes.data, mesh.gather_over_data)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of every global batch, from the cursor on."""
        share, rows = self.data_share, self.plan.padded_samples_per_rank
        order = RankOrder(self.batch_plan, self.epochs, share.rank, share.num_ranks, rows)
        inspect, workers = self.objective.inspect, self.config.data.workers
        where = self.cursor, inspect, share.device
        return loader.load(self.source, order, *where, workers=workers)

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """One optimizer step: this rank's share of the loss, the gradient norm, the rate.

        Nothing here waits for the device. A bad step (see `Guard`) changes neither weights nor
        averages, on any rank.
        """
        config = self.config
        rng = SampleRNG(config.job.seed, batch.sample_numbers)
        loss = self.executor.step(self.objective.prepare(batch, rng))
        lr = learning_rate(
            config.lr_schedule, config.optimizer.lr, self.step, config.training.steps
        )
        with self.profile.mark(OPTIMIZER):
            grad_norm = clip_norm(self.parameters.values(), config.training.max_grad_norm)
            bad = self.guard.check(self.step, self.cursor, loss, grad_norm)
            apply_gradients(self.optimizer, lr, skip=bad)
            self.ema.update(self.step, skip=bad)
        _, self.cursor = self.batch_plan(self.cursor)
        self.meter.steps += 1
        return loss, grad_norm, lr

    def read_guard(self) -> Reading:
        """Wait for the device, and write down which steps were bad since the last time."""
        seed, device = self.config.job.seed, self.world.device
        reading = self.guard.read(self.mesh.sum_loss)
        for bad in reading.bad:
            numbers, _ = self.batch_plan(bad.cursor)
            self.ledger = self.ledger.leave_out(bad.step, numbers)
            drawn = fault_log.drawn_for(self.objective, seed, numbers, device)
            line = fault_log.bad_step(bad, numbers, self.epochs.rows(numbers), drawn)
            self.journal.add(fault_log.FILE, line)
            self.say(console.skipped(bad.step, bad.kind, bad.grad_norm, self.folder))
        return reading

    def report(self, reading: Reading, lr: float, validated: Row) -> None:
        """Write a line of metrics."""
        row = self.row = validated | row_of(
            *(self.step, self.cursor, reading.loss, reading.grad_norm, lr),
            times=self.meter.read(),
            work=self.work,
            peak_gib=peak_gib(self.world.device),
            nan_steps=self.guard.nan_steps,
            spike_steps=self.guard.spike_steps,
        )
        # The first line of a resumed run is for the person at the console only.
        if self.step == 1 or validated or self.due(self.config.metrics.every):
            self.journal.log(row)
        self.say(console.progress(row, self.config.training.steps), self.recompiles.news())

    def go_back(self) -> None:
        """Load the newest checkpoint from before the bad steps, and leave their data out."""
        assert self.guard.streak
        assert self.guard.limit
        (first, begin), (last, cursor) = self.guard.streak, self.guard.limit
        bad = rollback.BadSteps(
            first, last, (self.batch_plan(begin)[0][0], self.batch_plan(cursor)[1])
        )
        with self.watchdog.slow("going back"), self.meter.paused():
            self.checkpoints.wait()
            start = resume.newest_before(self.checkpoints, first)
            # Only the first rank changes the disk; that it cannot be done holds for all.
            context = self.folder, self.checkpoints, self.config.faults
            rollbacks = Ranks().first(lambda: rollback.go_back(*context, bad, start))
            assert start.path
            resume.load(start.path, start.record, self.tensors(), self.ema, verified=True)
        self.say(*start.told(), console.went_back(last, start.path, *bad.numbers))
        self.go_on_from(Progress.of(start.record, rollbacks))
        self.journal.add(fault_log.FILE, fault_log.rollback(last, self.step, *bad.numbers))
        self.journal.forget_after(self.step)
        self.open_sample_log()
        self.collector.rest()  # Data workers are forked once more, and inherit its state.

    def validate(self) -> Row:
        """The losses of the validation set, of the weights and of every average of them."""
        assert self.validation_set
        given = self.validation_set, self.objective, self.executor, self.data_share
        seed, rows = self.config.job.seed, self.plan.padded_samples_per_rank
        with self.watchdog.slow("validating") as alive, self.meter.paused():
            found = validation_set.losses(*given, alive, seed=seed, batch_size=rows)
            for average in self.ema.averages:
                with self.ema.swapped_in(average):
                    losses = validation_set.losses(*given, alive, seed=seed, batch_size=rows)
                found |= {f"{name}_ema_{average}": loss for name, loss in losses.items()}
            self.collector.full()
        return found

    def preview(self) -> None:
        """Show what the averaged weights make, each data rank its share, and the loss curve."""
        given = self.config.sampling, self.config.job.seed, self.data_share
        slow = self.watchdog.slow("drawing")
        with slow, self.meter.paused(), self.ema.swapped_in():
            preview = self.objective.preview(self.executor.predict, *given)
            self.journal.show(self.step, preview)
            self.journal.draw_curve()
            self.collector.full()

    def write_profile(self, *, stopped: bool = False) -> None:
        """Write the profile if its steps are over, all ranks waiting for those that write."""
        if self.profile.is_over(stopped=stopped):
            with self.watchdog.slow("profiling"), self.meter.paused():
                with self.journal.sparing("the profile"):
                    self.say(*self.profile.write())
                self.world.gather(None)
        elif stopped and (missed := self.profile.missed()):
            self.say(missed)

    def tensors(self) -> dict[str, Any]:
        """Everything a checkpoint holds in tensors, under original names; loads in place."""
        return {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            "ema": self.ema.averages,
        }

    def save(self) -> None:
        """Begin a checkpoint, and wait until the tensors may change again; all ranks together."""
        with self.watchdog.slow("saving"), self.meter.paused():
            if self.guard.taken:
                self.read_guard()
            progress = Progress(self.step, self.cursor, self.ledger, self.guard.state())
            record = progress.as_record(self.epochs.num_rows) | {
                "config": config_file.to_tables(self.config),
                "config_format": config_file.FORMAT,
                "data": self.source.facts.as_json(),
                "layout": str(self.mesh.sizes),
                "versions": VERSIONS,
            }
            self.checkpoints.save(self.step, self.tensors(), record)
            self.journal.draw_curve()
            self.collector.full()

    def finish_saves(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self.watchdog.slow("saving"):
            self.checkpoints.finish()
        self.tell_of_saves()

    def tell_of_saves(self) -> None:
        """Say how the saves ended that have ended."""
        self.say(*self.checkpoints.poll())

    def resume(self) -> None:
        """Load the checkpoint that the config asks for, if there is one."""
        settings = self.config.checkpoint
        start = resume.starting_point(self.checkpoints, settings.resume)
        path, record = start.path, start.record
        if path is None:
            Ranks().first(lambda: resume.check_not_elsewhere(self.config.job, settings))
            return
        self.say(*start.told())
        if not settings.allow_changes:
            # Built anew: keys that did not exist then get their defaults, as they do now.
            before = config_file.build(config_file.of_record(record), catalog.variant)
            configs = config_file.to_tables(before), config_file.to_tables(self.config)
            digests = record["data"]["digest"], self.source.facts.digest
            held_out = before.validation.num_held_out, len(self.held_out)
            imported = record.get("imported", False)
            resume.check_same_mathematics(path, configs, digests, held_out, imported)
        load = resume.load_imported if record.get("imported") else resume.load
        load(path, record, self.tensors(), self.ema, verified=True)
        own = resume.is_own(self.checkpoints, path)
        rollbacks = rollback.read(self.folder) if own else rollback.Rollbacks()
        self.go_on_from(Progress.of(record, self.world.gather(rollbacks)[0]))
        if self.world.is_main:
            resume.set_aside_newer(self.checkpoints, start)
        self.say(f"resumed from {path}")

    def go_on_from(self, progress: Progress) -> None:
        """Take up where a checkpoint stands whose tensors are loaded."""
        self.step, self.cursor, self.ledger = progress.step, progress.cursor, progress.ledger
        self.guard.load(progress.guard)

    def open_sample_log(self) -> None:
        """Begin to write down what every step sees, if that is wanted."""
        mesh = self.mesh
        if self.config.faults.log_samples:
            rank, ranks, writes = mesh.data_rank, mesh.sizes.data, mesh.speaks_for_samples
            self.sample_log = SampleLog.begin(self.folder, rank, ranks, writes=writes)

    def open_run_directory(self) -> None:
        """Write the resolved config, open the metrics, and say what will be done."""
        config, world, tables = self.config, self.world, config_file.to_tables(self.config)
        self.journal.open(tables, config.metrics, self.step)
        if world.is_main and not self.ledger.skipped:
            (self.folder / rollback.FILE).unlink(missing_ok=True)  # Of a run that is no more.
        self.open_sample_log()
        if self.validation_set and world.is_main:
            self.validation_set.remember(self.folder)
        device, flops = world.device, self.work.flops_per_sample
        counted = len(self.source), len(self.held_out), self.source.facts.about
        sizes = console.Sizes(self.num_parameters, flops, self.plan.spec.num_tokens, *counted)
        where = VERSIONS, f"{self.mesh.sizes} on {device.type}", sizes, self.step, self.folder
        named = config.model.name, config.data.name
        self.say(*followed(config.parallel, self.mesh.sizes))
        self.say(*console.beginning(named, config.precision, config.training, *where))
        own = {"model": config.model, "objective": config.objective, "data": config.data}
        own |= self.objective.imported(config.sampling)
        if self.plan.tensor_plan_function:
            own["parallel"] = self.plan.tensor_plan_function
        self.say(*dotted_names.origins(own), *self.hooks.origins())
        if world.is_main:
            hint = device_fits.attention_hint(self.plan, device, flops)
            self.say(*self.notes, *self.objective.hints(self.source), hint)
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        steps, ranks = config.training.steps, (world.rank, world.size)
        self.hooks.show(Run(config.job.name, self.folder, steps, *ranks, tables, parameters))
