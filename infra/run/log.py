"""Output of a run: the lines that it prints, its .jsonl files, and the summary at the end."""

import json
import math
import os
import re
import string
import sys
import time

import jax
import jax.numpy as jnp

from infra.data import hf
from infra.host import files
from infra.host.chips import GIB
from infra.host.console import exit_on, first_line, readable, say, show_status, warn
from infra.run import advice
from infra.update.lora import adapter_shapes

# The lines that steps print, with metrics in a fixed order that grep and scripts can rely on.
SFT_LINE = (
    "sft {step}/{total} | nll {nll:.3f} | gnorm {grad_norm:.2f} | lr {lr:.1e} | "
    "upd {time/update_s:.1f}s"
)
GRPO_LINE = (
    "step {step}/{total} | reward {reward/mean:.2f} | solved {solved:.2f} | "
    "len {len/answer:.0f} | clip {clip_fraction:.3f} | kl {kl:.3f} | gnorm {grad_norm:.2f} | "
    "roll {time/rollout_s:.1f}s rew {time/reward_s:.1f}s upd {time/update_s:.1f}s | "
    "{thousands:.1f}k tok/s"
)
# Without a terminal, a status is printed if nothing else was printed for this many seconds.
QUIET_SECONDS = 30
# Supervised steps are many and short, so only one in this many is printed.
SFT_STEPS_PER_LINE = 10


# ---------------------------------------------------------------- the terminal
class Terminal:
    """Prints the lines of a run's steps and, on a terminal, a status below them.

    The status shows the phase, the step, tokens per second and the time left, until the next line
    replaces it. Without a terminal, a status is printed as a line of its own, but only if nothing
    else was printed for half a minute.
    """

    def __init__(self, sft_steps: int, total_steps: int, done: int):
        self.sft_steps = sft_steps
        self.total_steps = total_steps
        self.first_step = done + 1
        # The current phase, and when it began.
        self.phase = ""
        self.began = time.monotonic()
        # Parts of the status: the phase with its step, and how many questions are done.
        self.place = ""
        self.asked = ""
        # How many answers the phase had left when it began; inf if it does not count questions.
        self.left = math.inf
        # Steps of the current kind, supervised or GRPO, that have ended: their number, the last
        # step, and when the first and the last of these steps ended.
        self.ended = 0
        self.last_step = done
        self.first_end = self.last_end = time.monotonic()
        # Tokens per second of each phase, now or when the phase last ran.
        self.rates = {}
        self.printed = time.monotonic()
        # Metrics of the last GRPO steps, and the step after which advice was last given.
        self.recent = []
        self.advised = -math.inf

    def begin(self, phase: str, step: int, done: int = 0, total: int = 0, samples: int = 1) -> None:
        """Begin a phase of a step. An evaluation asks its questions in rounds, and calls this for
        each round: after `done` of `total` questions, with `samples` answers each.

        total: 0 for a phase that does not count questions.
        """
        # Use the same words as SFT_LINE and GRPO_LINE.
        is_supervised = self.sft_steps and step <= self.sft_steps
        kind = "sft" if is_supervised else "step"
        self.phase = phase
        self.place = f"{phase} | {kind} {step}/{self.total_steps}"
        self.asked = f" | {done}/{total} questions" if total else ""
        self.left = (total - done) * samples if total else math.inf
        self.began = time.monotonic()
        self.show()

    def decoded(self, answers: int, tokens: int) -> None:
        """Show progress of the current rollout. answers: number of answers that have ended. tokens:
        tokens decoded so far, of all answers."""
        # Right after prefill, no token has been decoded yet.
        if tokens:
            self.rates[self.phase] = tokens / (time.monotonic() - self.began)
        # An evaluation also decodes rows beyond the last question, which do not count.
        self.show(f" | {min(answers, self.left)} answers")

    def show(self, detail: str = "") -> None:
        # The most important parts come first, as a narrow terminal cuts off the rest.
        text = self.place + self.time_left() + self.asked + detail
        if rate := self.rates.get(self.phase):
            text += f" | {rate:.0f} tok/s"
        show_status(text)
        if not sys.stdout.isatty() and time.monotonic() - self.printed > QUIET_SECONDS:
            self.print(text)

    def time_left(self) -> str:
        """The time left, as text; "" before a second step has ended, and after the last step.

        The estimate uses the mean time of the steps after the first one, which compiles.
        """
        if self.ended < 2 or self.last_step == self.total_steps:
            return ""
        is_supervised = self.last_step < self.sft_steps
        # The pace of supervised steps says nothing about GRPO steps.
        end = self.sft_steps if is_supervised else self.total_steps
        # The pace includes evaluations and checkpoints between steps.
        pace = (self.last_end - self.first_end) / (self.ended - 1)
        seconds = pace * (end - self.last_step) - (time.monotonic() - self.last_end)
        minutes, seconds = divmod(max(0, round(seconds)), 60)
        hours, minutes = divmod(minutes, 60)
        goal = " to GRPO" if is_supervised and end < self.total_steps else ""
        return f" | ETA {hours}:{minutes:02}:{seconds:02}{goal}"

    def end_step(self, metrics: dict) -> None:
        """Print the line of a step that has ended. Among supervised steps, only the first, every
        tenth and the last step get a line."""
        step = metrics["step"]
        is_supervised = step <= self.sft_steps
        self.ended += 1
        self.last_step = step
        self.last_end = time.monotonic()
        if self.ended == 1:
            self.first_end = self.last_end
        self.rates["update"] = metrics["valid_tokens"] / metrics["time/update_s"]
        is_tenth = step % SFT_STEPS_PER_LINE == 0
        if not is_supervised or is_tenth or step in (self.first_step, self.sft_steps):
            self.print(step_line(metrics, self.total_steps))
        if not is_supervised:
            self.advise(metrics)
        if step == self.sft_steps:
            # GRPO steps have their own pace.
            self.ended = 0

    def advise(self, metrics: dict) -> None:
        """If nothing is learned, print the likeliest reason, unless one was printed recently."""
        self.recent = (self.recent + [metrics])[-advice.STEPS :]
        enough = min(advice.STEPS, self.total_steps - self.sft_steps)
        if len(self.recent) < enough:
            return
        line = advice.why_nothing_is_learned(self.recent)
        if line and metrics["step"] >= self.advised + advice.STEPS_BETWEEN:
            self.advised = metrics["step"]
            self.print(line)

    def print(self, line: str) -> None:
        self.printed = time.monotonic()
        say(line)


def step_line(metrics: dict, total: int) -> str:
    """The line of a step, from its metrics."""
    line = GRPO_LINE if "reward/mean" in metrics else SFT_LINE
    thousands = metrics.get("rollout/tokens_per_s", 0) / 1e3
    return DashForNaN().format(line, total=total, thousands=thousands, **metrics)


class DashForNaN(string.Formatter):
    """Formats NaN as `-`. The clip fraction, for example, is NaN if no tokens are trained."""

    def format_field(self, value, spec: str) -> str:
        is_defined = not isinstance(value, float) or not math.isnan(value)
        return super().format_field(value, spec) if is_defined else "-"


# ---------------------------------------------------------------- .jsonl files
class JsonLines:
    """A file of one JSON object per line, to which process 0 appends.

    If a line cannot be written, for example because the disk is full, it is printed to stderr and
    counted in `lost`, and the run goes on.
    """

    def __init__(self, path: str):
        self.path = path
        self.lost = 0

    def append(self, *rows: dict) -> None:
        if jax.process_index() != 0:
            return
        text = "".join(json_line(row) for row in rows)
        try:
            append_at_once(self.path, text.encode(errors="replace"))
        except OSError as e:
            self.lost += len(rows)
            shown = text if len(text) < 10_000 else f"{text[:1000]} ..."
            what = f"{self.path} cannot be written: {first_line(e)}"
            warn(f"{what}; lines lost: {self.lost}\n{shown}")


def sample(step: int, row: dict, answer: str, **scores) -> dict:
    """A row of samples.jsonl. row: the row of the data that `answer` belongs to."""
    asked = {"question": row["question"], "reference": row["answer"]}
    # The question is only the last message of a prompt.
    if len(row.get("prompt_messages", [])) > 1:
        asked["messages"] = row["prompt_messages"]
    return {"step": step} | asked | {"answer": answer} | scores


def json_line(row: dict) -> str:
    # JSON has neither NaN nor infinity.
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(plain, ensure_ascii=False) + "\n"


def append_at_once(path: str, data: bytes) -> None:
    """Append all of the bytes or none; they are on the disk when this returns. Raises OSError."""
    # Without a buffer, `write` returns how many bytes were written.
    with open(path, "ab", buffering=0) as f:
        end = f.tell()
        try:
            # A single call writes at most 2 GiB. On a full disk, the next call raises an error.
            left = memoryview(data)
            while left:
                left = left[f.write(left) :]
            os.fsync(f.fileno())
        except OSError:
            f.truncate(end)
            raise


def read_jsonl(path: str) -> list[dict]:
    """Returns the rows of a .jsonl file of a run, or [] if there is no file.

    Lines that are not a row of a step are skipped with a warning. An incomplete last line, which a
    killed run may leave, is skipped without a warning.
    """
    rows = []
    # A run that has just begun has no file yet.
    if not os.path.exists(path):
        return rows
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise ValueError("its step is not a whole number")
            rows.append(row)
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            warn(f"{path} line {number} is not a row of a step, and is skipped: {first_line(e)}")
    return rows


def is_evaluation(row: dict) -> bool:
    """Whether a row of metrics.jsonl belongs to an evaluation, not to a step."""
    return any(name.startswith("eval/") for name in row)


def start_wandb(project: str, out: str, flags: dict, resumes: bool):
    """Start a run on wandb.ai on process 0, or continue it if the training resumes. Returns the
    run; None elsewhere, or without a project."""
    if not project or jax.process_index() != 0:
        return None
    with exit_on(
        Exception, f"--wandb {project} needs wandb and WANDB_API_KEY; set up both, or drop the flag"
    ):
        # wandb is optional, and slow to import.
        import wandb

        # A run that starts over needs a new id: wandb drops the steps that the old id already has.
        path = f"{out}/wandb_id"
        # wandb refuses some characters, and long ids.
        run_id = f"{re.sub('[^A-Za-z0-9_-]', '-', out)[-80:]}-{time.time():.0f}"
        if resumes and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                run_id = f.read()
        run = wandb.init(project=project, name=out, id=run_id, resume="allow", config=flags)
        # wandb's own steps only go forward, but a resumed run may repeat an evaluation.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    with files.atomic_file(path) as f:
        f.write(run_id.encode())
    return run


# ---------------------------------------------------------------- the start and the end of a run
def print_setup(cfg, setup) -> None:
    """Print the devices, the model, and the size of a step."""
    processes = jax.process_count()
    device = jax.devices()[0].device_kind
    params = setup.model_cfg.n_params
    say(
        f"{processes} processes x {jax.local_device_count()} {device} devices, mesh "
        f"{dict(setup.mesh.shape)} | {params / 1e6:.2f}M parameters, compute {cfg.dtype}"
    )
    if cfg.lora:
        shapes = adapter_shapes(setup.model_cfg, cfg.lora).values()
        trained = sum(math.prod(shape) for shape in shapes)
        say(
            f"lora {cfg.lora}, alpha {cfg.lora_alpha}: {trained / 1e6:.2f}M parameters in adapters "
            f"are trained, and the others are frozen; lr {cfg.lr:g}, sft_lr {cfg.sft_lr:g} (with "
            "--lora, the default lr is ten times as high as without)"
        )
    trained_system = hf.trained_system(setup.model_dir)
    if trained_system not in (None, cfg.system):
        say(f"{cfg.model} was trained with --system {trained_system!r}, not {cfg.system!r}")
    sequences = cfg.batch * cfg.npq
    line = (
        f"{cfg.batch} questions x {cfg.npq} answers = {sequences} sequences per host, "
        f"{sequences * processes} in all, in rows of {setup.row_width} tokens | "
        f"{cfg.minibatches * cfg.ppo_epochs} updates a step"
    )
    if cfg.sft_steps:
        examples = len(setup.examples)
        line += f" | {examples} answers of up to {cfg.max_answer} tokens to imitate"
    if not setup.held_out:
        line += " | no held-out questions, no evaluation"
    say(line)
    # Weights are all-gathered over fsdp, which is slow between hosts.
    inner = setup.mesh.devices[0]
    spans = len({device.process_index for device in inner.flat})
    if spans > 1:
        # A host lacks the other hosts' shares of the weights.
        gib = params * jnp.dtype(cfg.dtype).itemsize * (1 - 1 / spans) / GIB
        say(
            f"fsdp*tp = {inner.size} spans {spans} hosts: each forward or backward pass sends "
            f"{gib:.2g} GiB to every host; --mesh host_local avoids that, at {spans} times the "
            "memory for parameters and optimizer"
        )


def print_summary(out: str, sft_steps: int, steps: int, seconds: float) -> None:
    """Print the first and the last evaluation, and where the results are.

    seconds: the time since this process began to train, without the time before a resume.
    """
    # Process 0 has the files.
    if jax.process_index() != 0:
        return
    # Read the evaluations from the files: a resumed run has not made all of them itself.
    metrics = read_jsonl(f"{out}/metrics.jsonl")
    evaluations = [row for row in metrics if is_evaluation(row)]
    took = f"{seconds / 60:.1f} minutes in this launch"
    say(f"\ndone: {sft_steps} supervised and {steps} GRPO steps, {took}")
    if evaluations:
        last = evaluations[-1]
        # A run that was resumed with --resume force may have evaluated other sets before.
        first = next(row for row in evaluations if row.keys() == last.keys())
        shown = [first] if first is last else [first, last]
        print_answers(out, [row["step"] for row in shown])
        say("")
        for name in last:
            if name.endswith("/solved"):
                which = name.removeprefix("eval/").removesuffix("solved").removesuffix("/")
                of = f" of {which}" if which else ""
                texts = " -> ".join(with_interval(row, name) for row in shown)
                say(f"held-out questions{of} solved: {texts}")
    model = f"model: {out}/final (Hugging Face format); " if sft_steps + steps else ""
    say(f"{model}metrics: {out}/metrics.jsonl")


def with_interval(row: dict, name: str) -> str:
    """The fraction of questions solved, with half the width of its 95% confidence interval."""
    text = f"{row[name]:.1%}"
    stderr = row.get(name.removesuffix("solved") + "stderr")
    # A set of one question has no standard error.
    if stderr is not None:
        text += f" +- {1.96 * stderr:.1%}"
    return f"{text} at step {row['step']}"


# At its end, a run prints the answers to this many questions of each held-out set.
SHOWN = 3


def print_answers(out: str, steps: list[int]) -> None:
    """Print answers to the first questions of each held-out set, in the evaluations at `steps`."""
    answers = [row for row in read_jsonl(f"{out}/evals.jsonl") if row["step"] in steps]
    shown = {}
    for row in answers:
        by_question = shown.setdefault(row["set"], {})
        if row["question"] in by_question or len(by_question) < SHOWN:
            by_question.setdefault(row["question"], {}).setdefault(row["step"], row)
    for by_question in shown.values():
        for question, of_step in by_question.items():
            say(f"\n  {shortened(question)}")
            for step, row in of_step.items():
                verdict = "right" if row["solved"] >= 1 else "wrong"
                say(f"    step {step:4} {verdict}  {shortened(row['answer'])}")


def shortened(text: str) -> str:
    """A text as it can be printed, without its middle if it is long."""
    text = readable(text)
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
