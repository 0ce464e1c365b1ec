"""One run as train.py's loop sees it: its checkpoints, what it writes and prints, and its end."""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import jax

from infra.data import hf
from infra.host import chips, files
from infra.host.chips import GIB
from infra.host.console import check, first_line, say, warn
from infra.host.processes import (
    Stop,
    all_gather_processes,
    check_for_stop,
    code_hash,
    commit,
    watch_signals,
)
from infra.run import checkpoint, log, run_dir
from infra.run.profiler import Profiler
from infra.update import lora
from infra.update.fit import rollout_advice, update_advice
from infra.update.state import without_base


class Run:
    """A run. The caller has claimed its directory, `cfg.out`, so that no other run uses it.

    step: the last complete step. skipped: consecutive skipped updates up to that step. Both go into
    checkpoints.
    """

    def __init__(self, cfg):
        """Find the checkpoint that the run resumes from, if there is one.

        Exits with code 2 if the directory holds anything but this run, and with code 0 if the run
        has finished.
        """
        self.out = cfg.out
        self.flags = dataclasses.asdict(cfg)  # for config.json
        self.total_steps = cfg.sft_steps + cfg.steps
        self.step, self.files, self.skipped = run_dir.open_run(
            cfg.out, self.total_steps, self.flags, cfg.resume
        )
        run_dir.keep_compiled(cfg.out)
        # The exit code after a signal depends on whether a later step has been saved.
        self.resumed_after = self.step
        self.cfg = cfg
        # Seconds of each of the last ten steps.
        self.step_seconds = []
        # The counterpart of this run on wandb.ai, if `start_wandb` starts one.
        self.wandb = None
        # With --lora, the model that the adapters belong to, as lora.base_of describes it.
        self.base = None

    def note_base(self, base: dict) -> None:
        """Exit with code 2 if the run resumes from adapters of another base. Checkpoints name the
        base, and do not contain it."""
        self.base = base
        if not self.files:
            return
        header = checkpoint.read_about(self.files[0])
        fault = lora.difference(json.loads(header.get("base", "{}")), base)
        check(not fault, f"{self.out} cannot resume: {fault}, or choose another --out")

    def note_data(self, data: dict) -> None:
        """Keep `data` for config.json, and warn if the code or the questions have changed since the
        run's last start.

        data: numbers and checksums of the training questions, and of all held-out questions.
        """
        self.data = data
        if not self.step or jax.process_index() != 0:
            return
        # Changed flags are refused. A change of the code or of the data may be meant, so only warn.
        before = files.read_json(f"{self.out}/config.json")
        if before.get("code") != code_hash():
            was = before.get("commit")
            commits = f"commit {was} before, {commit()} now"
            if was == commit():
                commits = f"Python files have changed since, at the same commit {was}"
            warn(f"{self.out} resumes with other code: {commits}")
        # Older versions wrote no `data`, or nothing about held-out questions.
        data_before = data | before.get("data", {})
        for count, crc, what in (
            ("questions", "crc32", "training prompts or answers have changed"),
            ("held_out", "held_out_crc32", "held-out questions, and so its evaluations, differ"),
        ):
            if (data_before[count], data_before[crc]) != (data[count], data[crc]):
                numbers = f"{data_before[count]} questions before, {data[count]} now"
                warn(f"{self.out} resumes, but its {what}: {numbers}")

    def check_disk(self, state) -> None:
        """Exit with code 2 unless the disk has room for checkpoints. state: a tree of shapes."""
        cfg = self.cfg
        run_dir.check_disk(self.out, state, self.step, self.total_steps, cfg.save_every, cfg.keep)

    def start_wandb(self) -> None:
        """Start the run on wandb.ai if there is a project. Exits with code 2 if that fails."""
        cfg = self.cfg
        self.wandb = log.start_wandb(cfg.wandb, self.out, self.flags, resumes=self.step > 0)

    def open_outputs(self, setup) -> None:
        """Open the files and the terminal. From here on, signals end the run at a `stop_point`.

        setup: the trainer's Setup, which is printed.
        """
        cfg = self.cfg
        self.began = time.monotonic()
        base = {"base": json.dumps(self.base)} if self.base else {}
        self.saver = checkpoint.Saver(self.out, cfg.keep, self.step, base)
        self.metrics = log.JsonLines(f"{self.out}/metrics.jsonl")
        self.samples = log.JsonLines(f"{self.out}/samples.jsonl")
        self.evals = log.JsonLines(f"{self.out}/evals.jsonl")
        self.terminal = log.Terminal(cfg.sft_steps, self.total_steps, self.step)
        self.profiler = Profiler(f"{self.out}/profile", cfg.profile)
        self.stop_signal = watch_signals()
        # bfloat16 operations per second of all devices together; 0 if unknown.
        self.peak_flops = chips.chip(setup.mesh.devices.flat[0]).flops * setup.mesh.size
        log.print_setup(cfg, setup)

    # ------------------------------------------------------------ the state
    def load(self, wanted) -> dict | None:
        """The state of the checkpoint that the run resumes from, or None if there is none.

        wanted: a tree of shapes with shardings, on any mesh.
        """
        # Steps count from 1, so 0 means no checkpoint.
        if not self.step:
            return None
        say(f"resuming {self.out} after step {self.step}")
        return checkpoint.load_shards(self.files, wanted)

    def begin(self, state) -> None:
        """Begin to train from this state: write config.json, and drop the rows that were written
        after its step."""
        # With --resume force, this overwrites the old flags, so it comes after all checks and after
        # the checkpoint has loaded: if the model has changed, the checkpoint may not fit.
        run_dir.write_config(self.out, self.flags, self.data)
        run_dir.truncate_to(self.out, self.step)
        self.saver.remember(self.step, without_base(state), self.skipped)

    def save(self) -> None:
        """Begin to write a checkpoint of the last complete step, whose state `end_step` noted."""
        self.saver.begin()

    # ------------------------------------------------------------ a step
    def begin_step(self, step: int) -> None:
        self.profiler.begin_step(step)
        self.stop_point()

    def stop_point(self) -> None:
        """Raise Stop in all processes if a signal has asked any of them to end the run."""
        check_for_stop(self.stop_signal)

    def show(self, phase: str, step: int, done: int = 0, total: int = 0, samples: int = 1) -> None:
        """Show the phase of a step as the terminal's status, after `done` of `total` questions with
        `samples` answers each. `saved_if_cut_short` compares the phase, too.

        phase: rollout, update or evaluating.
        """
        self.terminal.begin(phase, step, done, total, samples)

    def between_stages(self, answers: int, tokens: int) -> None:
        """Show the progress of a rollout after each prefill and each stage of decoding (see
        infra/rollout/engine.py). A rollout takes a long time, so a signal may end the run here."""
        self.stop_point()
        self.terminal.decoded(answers, tokens)

    def end_step(self, step: int, state, metrics: dict) -> None:
        """Print and write the metrics of a step that is complete, and note its state."""
        self.profiler.end_step()
        # From here on, the step counts as complete, and the next checkpoint has its state.
        self.step = step
        self.terminal.end_step(metrics)
        self.saver.remember(step, without_base(state), self.skipped)
        self.write(metrics)

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl, and send it to wandb."""
        self.metrics.append(row)
        if self.wandb:
            try:
                self.wandb.log(row)
            except Exception as e:
                warn(f"wandb fails: {first_line(e)}; it gets no more metrics, and the run goes on")
                self.wandb = None

    def write_samples(self, step: int, rows: list, answers: list, scores: list[dict]) -> None:
        """Append answers with their scores to samples.jsonl. rows: the rows that were asked."""
        answered = zip(rows, answers, scores, strict=True)
        self.samples.append(*[log.sample(step, row, text, **own) for row, text, own in answered])

    def write_evals(self, step: int, answers: list[dict]) -> None:
        """Append the answers of an evaluation to evals.jsonl."""
        self.evals.append(*[{"step": step} | answer for answer in answers])

    def note_step_seconds(self, seconds: float) -> float:
        """Note how long a step took. Returns the mean of the last ten steps."""
        self.step_seconds = (self.step_seconds + [seconds])[-10:]
        return sum(self.step_seconds) / len(self.step_seconds)

    def device_metrics(self, flops: float, seconds: float) -> dict:
        """Model FLOPs utilisation of an update of `flops` operations, and memory of the fullest
        device. mfu is None if the chip is unknown, and memory is None if JAX does not report it."""
        # The operations that all devices could have done in this time.
        possible = self.peak_flops * seconds
        metrics = {"mfu": flops / possible if possible else None}
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        for key in ("bytes_in_use", "peak_bytes_in_use"):
            gib = max(stat.get(key, 0) for stat in stats) / GIB
            metrics[f"memory/train/{key}_max_gib"] = float(all_gather_processes(gib).max()) or None
        return metrics

    def last_checkpoint(self) -> str:
        """The directory of the newest complete checkpoint, or "none"."""
        # Wait for a checkpoint that is still being written.
        self.saver.finish()
        newest = self.saver.newest
        return f"{self.out}/step_{newest:06}" if newest else "none"

    def has_evaluation(self) -> bool:
        """Whether the evaluation after the last complete step is in metrics.jsonl."""
        return run_dir.has_evaluation(self.out, self.step)

    # ------------------------------------------------------------ the end
    def finish(self, params, setup) -> None:
        """Wait for the last checkpoint, write final/, print a summary, and send the results to
        the bucket.

        setup: the trainer's Setup, which names the model that the run started from.
        """
        cfg = self.cfg
        self.saver.finish()
        if self.total_steps:
            # Users of the model will need its system prompt.
            about = {"step": self.total_steps, "commit": commit(), "system": cfg.system}
            final = self.out, setup.model_dir, params, setup.model_cfg, setup.mesh, about
            hf.write_final(*final, cfg.lora_scale, partial(self.write_adapter, params, setup))
        log.print_summary(self.out, cfg.sft_steps, cfg.steps, time.monotonic() - self.began)
        for file in (self.metrics, self.samples, self.evals):
            if file.lost:
                warn(f"{file.path} lacks {file.lost} lines, which could not be written; see above")
        run_dir.send_results(self.out)

    def write_adapter(self, params, setup, directory: str) -> None:
        """With --lora, write the adapters to `directory`/adapter, as PEFT does."""
        if not self.cfg.lora:
            return
        # The tiny model has no name that PEFT could find.
        is_tiny = self.cfg.model == "tiny"
        name = os.path.abspath(setup.model_dir) if is_tiny else self.cfg.model
        base = self.base | {"model": name}
        lora.write(f"{directory}/adapter", params, self.cfg, setup.model_cfg, setup.mesh, base)

    @contextlib.contextmanager
    def saved_if_cut_short(self, micro_batch: int) -> Iterator[None]:
        """If a signal, an OSError or a lack of device memory ends the training in this context,
        save the last complete step if possible, and print why the training ended.

        micro_batch: rows per device. If an update runs out of memory, the advice is to halve it.
        """
        saver = self.saver
        try:
            yield
        except Stop as stop:
            number = stop.args[0]
            say(f"\nended by {signal.Signals(number).name}: {saver.save_together()}")
            if number == signal.SIGUSR1 and saver.newest > self.resumed_after:
                # SIGUSR1 warns of Slurm's time limit. If a new step is saved, exit as for SIGTERM,
                # so that the job is requeued. Otherwise, a requeued job would get no further.
                number = signal.SIGTERM
            # Shells use this exit code for a command that was ended by a signal.
            raise SystemExit(128 + number) from None
        except OSError as e:
            warn(f"{first_line(e)}: fix that first\n{saver.save_before_exit()}")
            raise SystemExit(1) from None
        except jax.errors.JaxRuntimeError as e:
            phase = self.terminal.phase or "starting"
            # An evaluation follows the last complete step; other phases belong to the next one.
            step = self.step if phase == "evaluating" else self.step + 1
            if "RESOURCE_EXHAUSTED" not in str(e):
                saved = f"step {saver.newest} is saved" if saver.newest else "no step is saved"
                warn(f"step {step} ({phase}) failed on a device or in another process; {saved}")
                raise
            smaller = f"--micro_batch {micro_batch // 2} or " if micro_batch > 1 else ""
            advice = rollout_advice(self.cfg)
            if phase == "update":
                advice = smaller + update_advice(self.cfg)
            if jax.default_backend() == "gpu":
                advice += "; nvidia-smi shows whether other processes use the GPU"
            warn(
                f"a device ran out of memory in step {step} ({phase}): {first_line(e)[:300]}\n"
                f"{saver.save_before_exit()}; try {advice}"
            )
            raise SystemExit(1) from None
