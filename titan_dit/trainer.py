"""The training loop: build, fit, step. It knows no model, objective or mesh axis."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import titan_dit
from titan_dit.build import build
from titan_dit.checkpoint import run_lock
from titan_dit.config import stages
from titan_dit.config.job import JobConfig
from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError
from titan_dit.data import loader
from titan_dit.data.base import Batch, SampleOrder
from titan_dit.data.buckets import step_plan
from titan_dit.data.order import LaterOrder, RankOrder, StepPlan
from titan_dit.hooks import KEY as HOOKS
from titan_dit.hooks import Run
from titan_dit.objectives.base import DataShare
from titan_dit.observe.meter import Meter, Throughput, mean_step, peak_gib, peak_tflops
from titan_dit.observe.metrics import Row, row_of
from titan_dit.observe.profile import DATA_WAIT, OPTIMIZER, StepProfiler
from titan_dit.observe.run_log import RunLog
from titan_dit.opening import VERSIONS, open_run
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.lr_schedule import learning_rate
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.parallel.compile import Recompiles, compiles
from titan_dit.parallel.mesh import Mesh
from titan_dit.ranks import process_group
from titan_dit.ranks.failure import leave_note, training_started
from titan_dit.ranks.process_group import Ranks, World
from titan_dit.ranks.stop_request import Reason, StopRequest
from titan_dit.ranks.watchdog import Watchdog
from titan_dit.recovery import bad_steps, replicas
from titan_dit.recovery.bad_steps import Guard, Reading
from titan_dit.recovery.ledger import Ledger, SampleLog
from titan_dit.recovery.resume import (
    BadStreak,
    Progress,
    newest_step,
    of_a_later_stage,
    resumed,
    rolled_back,
    saves_of,
)
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files
from titan_dit.system.garbage_collection import Collector

if TYPE_CHECKING:
    from titan_dit.trained_model import TrainedModel


class HandedOn(NamedTuple):
    """Objects that a stage leaves in its process for the next one.

    All else is in its checkpoint.
    """

    mesh: Mesh
    stop: StopRequest


def fit(config: JobConfig, world: World) -> int:
    """Train the stages of a run that are left, one after another; return the exit code.

    A stage begins as a started run does: it is opened, and resumes from the checkpoint that the one
    before it has written. A run without stages is one.
    """
    training, step, before = config.training, 0, None
    if training.stages:
        step = Ranks().run_on_first(lambda: newest_step(config.job, config.checkpoint))
    with ExitStack() as locks:
        while True:
            trainer = Trainer(config, world, stages.number_after(training, step), before)
            code, step = trainer.fit(locks), trainer.step
            if trainer.stop.reason or step >= trainer.opened.steps:
                return code
            before = HandedOn(trainer.mesh, trainer.stop)
            del trainer
            free_memory(config.compile)


def free_memory(config: CompileConfig) -> None:
    """Free what only an ended stage held, before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if compiles(config):
        torch.compiler.reset()  # Its graphs are of modules that are gone.


class Trainer:
    """A run on this rank, or one stage of it. Making it does not write to the run directory."""

    @staticmethod
    def load(*run: Any, **choice: Any) -> TrainedModel:
        """`titan_dit.load`, by its older name."""
        found: TrainedModel = titan_dit.load(*run, **choice)
        return found

    def __init__(
        self, config: JobConfig, world: World, stage: int = 0, before: HandedOn | None = None
    ) -> None:
        """`config`: of the run; `stage`: number, from 0, of the one to train.

        `before`: what the stage before leaves in this process.
        """
        self.goes_on = before is not None
        self.opened = opened = open_run(config, world, stage, goes_on=self.goes_on)
        config, job = opened.config, opened.config.job
        self.config, self.world = config, world
        self.plan, self.hooks, self.identity = opened.plan, opened.hooks, opened.identity
        self.source, self.objective = opened.source, opened.objective
        self.sample_order: SampleOrder = opened.sample_order
        self.validation_set = opened.validation_set
        plan, device = self.plan, world.device
        kept = before is not None and before.mesh.sizes == plan.sizes
        self.mesh = before.mesh if before and kept else Mesh(plan.sizes, device.type)
        self.built = built = build(plan, self.objective, self.mesh, device)
        self.executor, self.parameters = built.executor, built.parameters
        peak = peak_tflops(device, plan.precision.dtype)
        self.work = [
            Throughput(each.global_batch_size, each.spec.num_tokens, flops, world.size, peak)
            for each, flops in zip(plan.each_bucket, built.flops_by_bucket, strict=True)
        ]

        self.optimizer = build_optimizer(
            self.parameters, config.optimizer, plan.spec, built.copies, plan.seed
        )
        self.ema = EMA(self.parameters, config.ema)
        self.ema.run_beside(self.optimizer)
        self.step, self.cursor, self.ledger = 0, 0, Ledger()
        self.stage_cursor = 0
        self.guard = Guard(config.faults, device, plan.precision)
        self.checkpoints = saves_of(job, config.checkpoint, config.ema, opened.steps)
        self.folder = job.folder
        self.log = RunLog(self.folder, job.name, is_written=world.is_first)
        self.say = self.log.say
        self.meter, self.recompiles = Meter(), Recompiles()
        self.collector = Collector(config.training.gc_every)
        self.stop = before.stop if before else StopRequest(world.size, device)
        self.stop.kept = config.training.num_steps < opened.steps
        self.watchdog = Watchdog(
            self.folder, world.rank, config.faults.step_timeout_s, process_group.set_timeouts
        )
        self.profile = StepProfiler(
            config.profile, self.folder, world.rank, device, built.recording
        )
        self.sample_log: SampleLog | None = None
        self.row: Row = {}

    def fit(self, locks: ExitStack | None = None) -> int:
        """Train from the checkpoint or step 0 to the last step of the stage; return the exit code.

        `locks` holds the run's locks until its last stage has ended, else they end with this one.

        If the only undamaged checkpoint is of an earlier stage, `step` is before this one: its
        stage has to go on first.
        """
        saves_in = self.checkpoints.folder if self.config.checkpoint.every else None
        with self.watchdog, nullcontext(locks) if locks else ExitStack() as held:
            if not self.goes_on:
                held.enter_context(run_lock.hold_locks(self.folder, saves_in, self.say))
            self.resume()
            if self.step < self.config.training.begin:
                return 0
            replicas.check(
                self.config.faults,
                self.parameters,
                self.mesh,
                self.step,
                drawn_by=self.config.job.initial_weights,
            )
            self.open_run_directory()
            with self.stop, self.collector:
                self.train()
        self.hooks.raise_failure(self.world.gather)
        return self.stop.exit_code

    def train(self) -> None:
        """Train until the last step of the stage or a stop request."""
        config = self.config
        batches, first_step = self.batches(), self.step + 1
        self.begin()
        while self.step < config.training.num_steps and not self.stop.agreed():
            self.step += 1
            self.profile.begin(self.step)
            with self.meter.waiting(), self.profile.mark(DATA_WAIT):
                batch = next(batches)
            with self.recompiles.during(batch):
                _, _, lr = self.train_step(batch)
            if self.sample_log:
                self.sample_log.write(self.step, batch)
            self.write_profile()
            logged = self.step == first_step or self.due(config.metrics.every)
            validated = self.due(config.validation.every) or self.due(config.fid.every)
            # Also before a checkpoint, which must not contain bad steps to be rolled back.
            saved = self.due(config.checkpoint.every) or self.checkpoints.takes_snapshot(self.step)
            if logged or validated or saved or self.due(self.guard.every):
                reading = self.read_guard()
                if logged or validated:
                    self.report(reading, lr, self.validate() if validated else {})
            self.call_hooks("step_ended")
            if self.guard.streak_end:
                self.roll_back()
                batches, first_step = self.batches(), self.step + 1
                continue
            if validated:
                self.call_hooks("validated")
            if self.due(config.sampling.every):
                self.preview()
            if saved:
                self.save(whole=self.due(config.checkpoint.every))
            self.report_saves()
            self.collector.after(self.step)
            self.watchdog.alive(self.step)
        if self.step < config.training.num_steps:
            self.stop_early(first_step)
        else:
            self.write_profile(stopped=True)
            self.finish_saves()
            done = self.opened.stage_line if self.step < self.opened.steps else None
            self.say(f"done: {done or f'step {self.step}, everything is in {self.folder}'}")
        self.call_hooks("ended")

    def begin(self) -> None:
        """Start the clocks. With [checkpoint] init draw a preview: wrong weights show at once."""
        self.meter.restart()
        training_started()
        self.call_hooks("begun")
        config = self.config
        if config.checkpoint.init and config.sampling.every and self.step == 0:
            self.preview()

    def stop_early(self, first_step: int) -> None:
        """Save unless just saved, and leave the launcher a note that the run is unfinished."""
        every = self.config.checkpoint.every
        if self.guard.unread:
            self.read_guard()
        if self.guard.streak_end:
            self.roll_back()
        elif every and self.step >= first_step and not self.due(every):
            self.save()
        self.write_profile(stopped=True)
        self.finish_saves()
        leave_note({"stopped": self.stop.reason.name, "step": self.step})
        end = "resume with the same command" if every else "nothing saved: [checkpoint] every=0"
        by = f" by {HOOKS}" if self.stop.reason == Reason.HOOK else self.stop.by
        self.say(f"stopped{by} after step {self.step}; {end}")

    def call_hooks(self, moment: str) -> None:
        """Call the user's hooks; an exception in one stops all ranks within two steps."""
        if not self.hooks.wanted:
            return
        slow = nullcontext() if moment == "step_ended" else self.watchdog.slow(f"in {HOOKS}")
        with slow, self.meter.paused():
            self.hooks.call(moment, self.step, self.cursor, self.row)
        if self.hooks.failure:
            self.stop.ask(Reason.HOOK)

    @contextmanager
    def paused(self, what: str) -> Iterator[Callable[[], None]]:
        """Pause the meter, extend the watchdog's timeout; yields a call to restart the timeout."""
        with self.watchdog.slow(what) as alive, self.meter.paused():
            yield alive
            self.collector.full()

    def due(self, every: int) -> bool:
        """True every `every` steps and on the last step; never if 0."""
        last = self.step == self.config.training.num_steps
        return bool(every) and (self.step % every == 0 or last)

    @property
    def step_plan(self) -> StepPlan:
        """The sample numbers of each step."""
        size, skipped = self.plan.global_batch_size, self.ledger.skipped_ranges
        return step_plan(self.sample_order, size, skipped)

    @property
    def data_share(self) -> DataShare:
        """This rank's share of the data."""
        mesh, device = self.mesh, self.world.device
        return DataShare(device, mesh.data_rank, mesh.sizes.data, mesh.gather_over_data)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of every global batch from the cursor on."""
        share, shapes = self.data_share, self.plan.each_bucket
        sizes = tuple(each.padded_samples_per_rank for each in shapes)
        order = RankOrder(self.step_plan, self.sample_order, share.rank, share.num_ranks, sizes)
        return loader.load(
            self.source,
            order,
            self.cursor,
            self.objective.inspect,
            share.device,
            workers=self.config.data.num_workers,
            step=self.step + 1,
        )

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """One optimizer step; return (this rank's share of the loss, gradient norm, lr).

        No host-device synchronisation with the fused AdamW. A bad step changes nothing (`Guard`).
        """
        config = self.config
        rng = SampleRNG(config.job.seed, batch.sample_numbers)
        loss = self.executor.step(self.built.prepare(batch, rng), self.guard.loss_scale)
        begin, end = config.training.begin, config.training.num_steps
        lr = learning_rate(config.lr_scheduler, config.optimizer.lr, self.step - begin, end - begin)
        with self.profile.mark(OPTIMIZER):
            grad_norm = clip_norm(
                self.parameters.values(),
                config.training.max_grad_norm,
                beside=self.stop.flag(),
                compiled=config.compile.enabled and loss.is_cuda,
                loss_scale=self.guard.loss_scale,
            )
            bad = self.guard.check(self.step, self.cursor, loss, grad_norm)
            apply_gradients(self.optimizer, lr, skip=bad, step=self.step)
            self.ema.update(self.step, skip=bad)
        _, self.cursor, bucket = self.step_plan(self.cursor)
        self.meter.count(bucket)
        return loss, grad_norm, lr

    def read_guard(self) -> Reading:
        """Read the guard (synchronises the device) and log the bad steps since the last read."""
        seed, device = self.config.job.seed, self.world.device
        reading = self.guard.read(self.mesh.sum_loss)
        for bad in reading.bad:
            numbers = self.step_plan(bad.cursor).numbers
            self.ledger = self.ledger.mark_untrained(bad.step, numbers)
            drawn = bad_steps.drawn_for(self.objective, seed, numbers, device)
            line = bad_steps.line_of_bad_step(bad, numbers, self.sample_order.rows(numbers), drawn)
            self.log.add(run_files.FAULTS, line)
            self.say(bad.message(self.folder / run_files.FAULTS))
        return reading

    def report(self, reading: Reading, lr: float, validated: Row) -> None:
        """Log and print a row of metrics; `validated` holds its validation losses, if any."""
        work = mean_step(self.work, self.meter.steps_of)
        row = self.row = validated | row_of(
            self.step,
            self.cursor,
            reading.loss,
            reading.smooth_loss,
            reading.grad_norm,
            lr,
            times=self.meter.read(),
            work=work,
            peak_gib=peak_gib(self.world.device),
            counters={
                **self.guard.counters,
                **self.objective.readings(),
                **self.built.readings(),
            },
        )
        # The first step of a resumed run is printed only.
        if self.step == 1 or validated or self.due(self.config.metrics.every):
            self.log.log(row)
        self.log.progress(row, self.opened.steps)
        self.say(self.recompiles.report())

    def roll_back(self) -> None:
        """Load the newest checkpoint before the bad steps and skip their samples.

        Raises UserError if all checkpoints of the stage are damaged.
        """
        (first, begin), (last, cursor) = self.guard.to_undo
        numbers = self.step_plan(begin).numbers[0], self.step_plan(cursor).next_cursor
        bad = BadStreak(first, last, numbers)
        with self.watchdog.slow("rolling back"), self.meter.paused():
            progress = rolled_back(
                self.checkpoints,
                self.config.job,
                self.config.faults,
                bad,
                self.tensors(),
                self.ema,
                self.say,
            )
            self.continue_from(progress)
        if self.step < self.config.training.begin:
            raise UserError(
                f"[checkpoint] all checkpoints of {self.opened.stage_line} are damaged. Run the "
                f"same command again: the run goes on after step {self.step}, in an earlier stage."
            )
        self.log.add(run_files.FAULTS, bad_steps.line_of_rollback(last, self.step, *numbers))
        self.log.forget_after(self.step)
        self.open_sample_log()
        self.collector.restore()  # Data workers are forked again and inherit its state.

    def validate(self) -> Row:
        """Validation losses of the weights and every EMA, and scores of pictures, whichever is due.

        Pictures are drawn with the first EMA.
        """
        with self.paused("validating") as alive:
            return self.opened.measured(self.executor, self.data_share, self.ema, self.due, alive)

    def preview(self) -> None:
        """Draw the preview, split over the data ranks, with the first EMA; then the loss curve."""
        with self.paused("drawing"), self.ema.swapped_in():
            preview = self.objective.preview(
                self.executor.predict,
                self.config.sampling,
                self.config.generation,
                self.config.job.seed,
                self.data_share,
            )
            self.log.show(self.step, preview)
            self.log.draw_curve()

    def write_profile(self, *, stopped: bool = False) -> None:
        """Write the profile if it is over or training has `stopped`; all ranks wait for it."""
        if self.profile.is_over(stopped=stopped):
            with self.watchdog.slow("profiling"), self.meter.paused():
                with self.log.tolerated("the profile"):
                    self.say(*self.profile.write())
                self.world.gather(None)
        elif stopped and (missed := self.profile.missed()):
            self.say(missed)

    def tensors(self) -> dict[str, Any]:
        """All tensors of a checkpoint, by original names; loading is in place."""
        model = {name: p.detach() for name, p in self.parameters.items()}
        moments = optimizer_tensors(self.optimizer, self.parameters)
        return {"model": model, "optimizer": moments, "ema": self.ema.averages}

    def save(self, *, whole: bool = True) -> None:
        """Start saving a checkpoint, or a snapshot alone; then tensors may change. Collective."""
        with self.paused("saving"):
            if self.guard.unread:
                self.read_guard()
            replicas.check(self.config.faults, self.parameters, self.mesh, self.step)
            sizes = self.plan.samples_per_step
            progress = Progress(
                self.step,
                self.cursor,
                self.ledger,
                self.guard.state(),
                sizes,
                self.stage_cursor,
            )
            layout = {"layout": str(self.mesh.sizes), "versions": VERSIONS}
            num_rows = self.sample_order.num_rows
            record = progress.as_record(num_rows) | self.identity.as_record() | layout
            self.checkpoints.save(self.step, self.tensors(), record, whole=whole)
            self.log.draw_curve()
        if whole:
            self.call_hooks("saved")

    def finish_saves(self) -> None:
        """Wait for the checkpoint in flight."""
        with self.watchdog.slow("saving"):
            self.checkpoints.finish()
        self.report_saves()

    def report_saves(self) -> None:
        """Print the outcome of finished saves."""
        self.say(*self.checkpoints.poll())

    def resume(self) -> None:
        """Load the checkpoint of [checkpoint] resume, else the weights of [checkpoint] init."""
        settings, tensors = self.config.checkpoint, self.tensors()
        if self.goes_on:
            settings = of_a_later_stage(settings)
        progress = resumed(
            self.checkpoints,
            self.config.job,
            settings,
            self.identity,
            tensors,
            self.ema,
            self.say,
        )
        if progress:
            self.continue_from(progress)
        elif settings.init:
            from titan_dit import init_from

            model = tensors["model"]
            self.say(*init_from.load(settings, self.identity, model, self.ema))

    def continue_from(self, progress: Progress) -> None:
        """Continue from the progress of a checkpoint whose tensors are loaded."""
        begin, self.step = self.config.training.begin, progress.step
        if self.step < begin:
            return
        if begin and self.step == begin:
            progress = progress.at_new_stage()
        progress.check_buckets(self.plan.samples_per_step)
        self.cursor, self.ledger = progress.cursor, progress.ledger
        self.stage_cursor = progress.stage_cursor
        if self.stage_cursor:
            self.sample_order = LaterOrder(self.opened.sample_order, self.stage_cursor)
        self.guard.load(progress.guard)

    def open_sample_log(self) -> None:
        """Start the sample log if [faults] log_samples is set."""
        if self.config.faults.log_samples:
            self.sample_log = SampleLog.begin(
                self.folder,
                self.mesh.data_rank,
                self.mesh.sizes.data,
                writes=self.mesh.speaks_for_samples,
            )

    def open_run_directory(self) -> None:
        """Write the resolved config, open the metrics and print the first console lines."""
        config, world = self.config, self.world
        self.log.open(self.identity.whole, config.metrics, self.step)
        if world.is_first and not self.ledger.skipped:
            (self.folder / run_files.ROLLBACKS).unlink(missing_ok=True)  # Left by a deleted run.
        self.open_sample_log()
        if self.validation_set and world.is_first:
            self.validation_set.remember(self.folder)
        self.say(*self.opened.lines(self.built, world.device, self.step))
        if world.is_first:
            self.objective.remember(self.folder)
            self.say(*self.opened.hints(self.built, world.device))
        self.hooks.show(
            Run(
                name=config.job.name,
                folder=self.folder,
                steps=self.opened.steps,
                rank=world.rank,
                num_ranks=world.size,
                config=self.identity.config,
                parameters=self.tensors()["model"],
            )
        )
