"""The command line: flags made from the fields of a Config, and the checks that need only flags."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import os
import re
from typing import Annotated, Literal, get_args, get_origin

from infra.data.chat import HALF_CHARACTER
from infra.data.questions import set_name
from infra.host.console import check
from infra.host.files import CheckpointError, read_json

# Types of numeric flags: (type, least value, bound). Values must be below the bound.
Natural = Annotated[int, 0, 2**31]
Positive = Annotated[int, 1, 2**31]
# The names of checkpoints have six digits.
Steps = Annotated[int, 0, 10**6]
ProcessCount = Annotated[int, 1, 10**4]
ProcessIndex = Annotated[int, 0, 10**4]
NonNegative = Annotated[float, 0, 1e38]
Temperature = Annotated[float, 1e-30, 1e38]
Fraction = Annotated[float, 0, 1]
# This bound is above 1, so that 1 is allowed.
Probability = Annotated[float, 1e-30, 1.0001]
# This matches texts that cannot be names or paths: those with control characters, such as NUL and
# line breaks, with half characters (surrogates), or with 1000 characters or more.
NO_NAME = "[\0-\x1f\ud800-\udfff]|.{1000}"


def parse_flags(argv: list[str], config_class, tiny: dict, description: str):
    """Returns the Config of a command line. The fields of `config_class` define the flags: their
    types, choices and help.

    tiny: defaults for `--model tiny`, which is the default model. description: for --help.
    """
    # The help of a flag is the comment beside its field. Read it from the source, since a dataclass
    # does not keep comments.
    source = inspect.getsource(config_class)
    help_of = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    parser = argparse.ArgumentParser(
        description=f"{description}\n--model tiny has these defaults instead: {tiny}",
        usage="python train.py [--flag value ...]",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # Print one line and exit with code 2, as for every mistake.
    names = [f"--{field.name}" for field in dataclasses.fields(config_class)]
    parser.error = lambda message: check(False, f"{message}; {guess(message, names)}see --help")
    for field in dataclasses.fields(config_class):
        bounds = range_of(field)
        parser.add_argument(
            f"--{field.name}",
            type=bounds[0] if bounds else str,
            choices=choices_of(field),
            help=f"{help_of[field.name]} (default {field.default!r})",
        )
    # `flags` has only the flags that were given, since the defaults differ for the tiny model.
    flags = vars(parser.parse_args(argv))
    is_tiny = flags.get("model", "tiny") == "tiny"
    defaults = config_class(**tiny) if is_tiny else config_class()
    if flags.get("adapter") and "lora" not in flags:
        flags = rank_of(flags["adapter"]) | flags
    if flags.get("lora"):
        # Adapters learn best at about ten times the learning rate of full training (Thinking
        # Machines, "LoRA Without Regret", 2025). The tiny model starts from random
        # weights, so its sft_lr is high already, and ten times as much is too high.
        names = ["lr"] if is_tiny else ["lr", "sft_lr"]
        rates = {name: float(f"{10 * getattr(defaults, name):g}") for name in names}
        defaults = dataclasses.replace(defaults, **rates)
    cfg = dataclasses.replace(defaults, **flags)
    check_numbers(cfg)
    check_texts(cfg)
    check_together(cfg)
    return dataclasses.replace(cfg, out=run_directory(cfg))


def rank_of(adapter: str) -> dict:
    """The flags lora and lora_alpha of a directory of adapters, or {} if they cannot be read."""
    with contextlib.suppress(CheckpointError, TypeError, LookupError):
        about = read_json(f"{adapter}/adapter_config.json")
        rank, alpha = about["r"], about["lora_alpha"]
        if type(rank) is type(alpha) is int:
            return {"lora": rank, "lora_alpha": alpha}
    return {}


def range_of(field: dataclasses.Field) -> tuple | None:
    """(int or float, least value, bound) of a numeric flag; None for texts."""
    return get_args(field.type) if get_origin(field.type) is Annotated else None


def choices_of(field: dataclasses.Field) -> tuple | None:
    """The values that a flag may have; None if any text or number may be given."""
    return get_args(field.type) if get_origin(field.type) is Literal else None


def guess(message: str, names: list[str]) -> str:
    """Returns the question `did you mean --steps? ` if the message is about an unknown flag that
    resembles one of `names`; otherwise ""."""
    _, _, unknown = message.partition("unrecognized arguments: ")
    # argparse lists the flag with its value, so cut the value off.
    word = unknown.partition(" ")[0].partition("=")[0]
    found = difflib.get_close_matches(f"--{word.lstrip('-')}", names, n=1)
    return f"did you mean {found[0]}? " if word.startswith("-") and found else ""


def run_directory(cfg) -> str:
    """The run's directory on this disk: `--out`, or out/<data>-<model> without it. For
    gs://bucket/run, it is out/gs/bucket/run."""
    out = re.sub("^gs://", "out/gs/", cfg.out.rstrip("/"))
    return out or f"out/{set_name(cfg.data)}-{set_name(cfg.model)}"


def check_numbers(cfg) -> None:
    """Exit with code 2 if a number is out of its range."""
    for field in dataclasses.fields(cfg):
        if range_of(field):
            _, least, below = range_of(field)
            value = getattr(cfg, field.name)
            check(
                least <= value < below,
                f"{field.name} = {value} is out of range; it must be a number >= {least} and "
                f"< {below}",
            )
    check(
        cfg.process_id < cfg.processes,
        f"process_id = {cfg.process_id} is out of range; it must be a number >= 0 and "
        f"< {cfg.processes}",
    )
    # 0 is greedy; a positive temperature below 1e-30 would make logits overflow.
    check(
        cfg.eval_temperature == 0 or cfg.eval_temperature >= 1e-30,
        f"eval_temperature = {cfg.eval_temperature} is out of range; give 0 (greedy), or 1e-30 "
        "or more",
    )
    check(cfg.top_p <= 1, f"top_p = {cfg.top_p} is more than 1, but 1 already keeps all tokens")


def check_texts(cfg) -> None:
    """Exit with code 2 if a text cannot be a name, or if the system prompt cannot be encoded."""
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        forbidden = NO_NAME
        fault = "a line break, another control character or half a character, or is too long"
        # Only the system prompt may have several lines.
        if field.name == "system":
            forbidden = HALF_CHARACTER
            fault = "half a character (a surrogate)"
        check(
            field.type is not str or not re.search(forbidden, value),
            f"{field.name} = {str(value)[:50]!r} holds {fault}",
        )
    # For other flags, "" has a meaning: a default, or nothing, such as no system prompt.
    for name in ("model", "data"):
        is_empty = not getattr(cfg, name).strip()
        check(not is_empty, f"--{name} is empty; give it a value, or drop the flag")


def check_together(cfg) -> None:
    """Exit with code 2 if flags contradict each other."""
    # A URL other than gs://... would become a directory of that name.
    is_bucket = re.match("gs://[^/]+/+[^/]", cfg.out)
    check(
        is_bucket or not re.match(r"\w+:/", cfg.out),
        f"out = {cfg.out} is neither a directory nor gs://bucket/run",
    )
    # GRPO compares the answers of a group, so a group needs at least two.
    check(
        cfg.npq >= 2 or cfg.steps == 0,
        f"npq = {cfg.npq} leaves no other answer to compare with; try --npq 8",
    )
    pair = r"\s*(question|answer)=\s*[^,\s][^,]*"
    check(
        re.fullmatch(f"({pair}(,{pair})?)?", cfg.columns),
        f"columns = {cfg.columns!r} is not of the form question=...,answer=...",
    )
    check_lora(cfg)
    last_step = cfg.sft_steps + cfg.steps
    # The names of checkpoints have six digits.
    check(
        last_step < 10**6,
        f"sft_steps + steps = {cfg.sft_steps} + {cfg.steps} = {last_step} must be below 1000000",
    )
    check(
        cfg.profile <= last_step,
        f"profile = {cfg.profile} is not a step of this run: the last is sft_steps + steps = "
        f"{cfg.sft_steps} + {cfg.steps} = {last_step}",
    )
    check(
        cfg.eval_temperature or cfg.eval_samples == 1,
        f"with eval_temperature = 0, the eval_samples = {cfg.eval_samples} answers to a question "
        "would be equal; add --eval_temperature 1, or drop --eval_samples",
    )
    # Rollouts do not use top_k and top_p: the loss computes logprobs of the complete distribution.
    check(
        cfg.eval_temperature or (cfg.top_k == 0 and cfg.top_p == 1),
        f"top_k = {cfg.top_k} and top_p = {cfg.top_p} are for sampled evaluation: add "
        "--eval_temperature 1, or drop them; rollouts sample the complete distribution, whose "
        "logprobs the loss computes",
    )
    if cfg.coordinator:
        port = re.fullmatch(r".+:([1-9]\d{0,4})", cfg.coordinator)
        check(
            port and int(port[1]) < 2**16,
            f"coordinator = {cfg.coordinator!r} is not host:port of process 0, with a port from 1 "
            "to 65535",
        )
    else:
        check(
            cfg.processes == 1 and cfg.process_id == 0,
            f"processes = {cfg.processes} and process_id = {cfg.process_id} need a --coordinator, "
            "host:port of process 0",
        )


def check_lora(cfg) -> None:
    """Exit with code 2 if the LoRA flags contradict each other."""
    if cfg.lora:
        check(
            cfg.offload == "none",
            f"offload = {cfg.offload} has no effect with lora = {cfg.lora}: only the small "
            "adapters have float32 copies and optimizer state; drop --offload",
        )
        return
    check(
        not cfg.adapter or os.path.exists(f"{cfg.adapter}/adapter_config.json"),
        f"adapter = {cfg.adapter} has no adapter_config.json; a run's adapters are in "
        "OUT/final/adapter",
    )
    check(
        not cfg.adapter,
        f"adapter = {cfg.adapter} needs --lora with its rank; leave out --lora only if r and "
        "lora_alpha in its adapter_config.json are integers",
    )
    check(
        cfg.lora_alpha == 32,
        f"lora_alpha = {cfg.lora_alpha} has no effect with lora = 0; add --lora 16, or drop "
        "--lora_alpha",
    )
