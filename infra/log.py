"""What a person sees: the terminal, metrics.jsonl, samples.jsonl, the final report."""

import contextlib
import io
import json
import math
import os
import sys

import jax


def check(condition, message):
    """Stop with one line and exit code 2 unless the condition holds: for what the user can mend."""
    if not condition:
        warn(message.replace("\n", " "))
        raise SystemExit(2)

@contextlib.contextmanager
def exit_on(errors, message):
    """Stop likewise on such errors inside, with the message and the error's first line."""
    try:
        yield
    except BaseException as e:  # a panic of the tokenizers, which are in Rust, is no Exception
        if not isinstance(e, errors) and type(e).__name__ != "PanicException":
            raise
        check(False, f"{message}: {first_line(e)}")

def first_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

class Stream(io.FileIO):
    """A standard stream that bears that nobody reads it any more, or that its disk is full."""
    def write(self, data):
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)

def open_streams():
    """sys.stdout and sys.stderr, once more where they are closed. What is closed outside goes nowhere."""
    for name, number in ("stdout", 1), ("stderr", 2):
        try:
            raw = Stream(number, "w", closefd=False)
        except OSError:
            raw = open(os.devnull, "wb", buffering=0)
        buffered = io.BufferedWriter(raw)
        # a terminal may not have all letters of an answer
        stream = io.TextIOWrapper(buffered, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)

def warn(text):
    print(f"train.py: {text}", file=sys.stderr, flush=True)

def say(text, end="\n"):
    if jax.process_index() == 0:
        print("\r\033[K" * sys.stdout.isatty() + text, end=end, flush=True)

def progress(what, done=0, total=0):
    """What is being done, how far: on a terminal, a line that the next replaces; else one at each quarter."""
    what += f" {done}/{total}" * (total > 0)
    if sys.stdout.isatty():
        say(what, end="\r")
    elif total > 1 and done * 4 // total > (done - 1) * 4 // total:
        say(what)

# the line of a step, of its metrics: fixed order, greppable
SFT_LINE = "sft {step}/{total} | nll {nll:.3f} | gnorm {grad_norm:.2f} | lr {lr:.1e} | upd {time/update_s:.1f}s"

GRPO_LINE = ("step {step}/{total} | reward {reward/mean:.2f} | solved {solved:.2f} | len {len/answer:.0f} | "
        "clip {clip_fraction:.3f} | kl {kl:.3f} | gnorm {grad_norm:.2f} | roll {time/rollout_s:.1f}s "
        "upd {time/update_s:.1f}s | {thousands:.1f}k tok/s")

def append_jsonl(cfg, run, name, rows):
    """Append; what a full disk does not take waits for the next time."""
    if jax.process_index() == 0:
        plain = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v  # JSON has no NaN
        waiting = run.unwritten.setdefault(name, [])
        waiting += [json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False) for row in rows]
        text = "".join(line + "\n" for line in waiting).encode(errors="replace")
        try:
            with open(f"{cfg.out}/{name}", "ab", buffering=0) as f:
                end = f.tell()
                try:
                    if f.write(text) < len(text):
                        raise OSError("no room")
                    os.fsync(f.fileno())
                except OSError:
                    f.truncate(end)
                    raise
            waiting.clear()
        except OSError as e:
            warn(f"{cfg.out}/{name} cannot be written: {first_line(e)}; {len(waiting)} lines wait")

def read_jsonl(cfg, name):
    """The rows of a file of this run, which is made if need be. What is no row of a step is told, and left
    out; so is half a line at the end, which a killed run may leave."""
    rows = []
    with open(f"{cfg.out}/{name}", "a+", encoding="utf-8", errors="replace") as f:
        f.seek(0)
        lines = [line for line in f if line.endswith("\n")]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise ValueError("its step is no number")
            rows.append(row)
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            warn(f"{cfg.out}/{name} line {number} is no row of a step, and is left out: {first_line(e)}")
    return rows

def print_report(cfg, seconds):
    """Before and after, from what the run wrote down, so that it is the same after a resume."""
    scores = {m["step"]: m["eval/solved"] for m in read_jsonl(cfg, "metrics.jsonl") if "eval/solved" in m}
    say(f"\ndone: {cfg.sft_steps} supervised and {cfg.steps} GRPO steps, {seconds / 60:.1f} minutes")
    if scores:
        a, b = min(scores), max(scores)
        told = [s for s in read_jsonl(cfg, "samples.jsonl") if s.get("eval") and s["step"] in (a, b)]
        for s in sorted(told, key=lambda s: s["question"]):
            say(f"\n  {s['question']}\n" * (s["step"] == a)
                + f"    step {s['step']:4} {'right' if s['solved'] else 'wrong'}  {s['answer']}")
        say(f"\nheld-out questions solved: {scores[a]:.1%} at step {a} -> {scores[b]:.1%} at step {b}")
    say(f"checkpoint: {cfg.out}/final (Hugging Face format); " * (cfg.steps + cfg.sft_steps > 0)
        + f"metrics: {cfg.out}/metrics.jsonl")
