"""The table of `tools/plan.py --table`: the largest micro-batch that fits, for each model and type
of devices."""

from collections.abc import Callable

from tools import remembered
from tools.sizes import model_of_size

# fmt: off
MODELS = ("0.5B", "1.5B", "3B", "7B", "14B", "32B",
          "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
TYPES = ("a100-8", "h100-1", "h100-8", "h200-1", "v4-16", "v5litepod-16", "v5p-16", "v6e-8",
         "v6e-16", "v6e-64")
# fmt: on
# Values of --offload, tried in turn until something fits: each is slower than the one before.
OFFLOADS = "none", "optimizer", "params"


def table(cfg, plan: Callable) -> str:
    """Returns the table in Markdown. cfg: the flags of all plans. plan: `plan` of tools/plan.py."""
    width = cfg.max_prompt + cfg.max_answer
    marks = "o: with `--offload optimizer`; p: with `--offload params`; -: fits with neither."
    if cfg.lora:
        marks = (
            f"With `--lora {cfg.lora}`. - n: one row takes n GiB too much. + n: the update fits, "
            "but the rollout, which adds its own weights to the frozen ones, is n GiB too large."
        )
    lines = [
        f"Each cell: the largest `micro_batch` that fits (rows of {width} tokens per device), the "
        "GiB that it takes, and the layout of the rollout: groups of devices x devices per group. "
        "The devices of a group split the weights.",
        marks,
        "",
        f"| devices | GiB | {' | '.join(MODELS)} |",
        "|---" * (2 + len(MODELS)) + "|",
    ]
    for device_type in TYPES:
        rows = [largest(cfg, plan, device_type, name) for name in MODELS]
        limit = rows[0]["limit_gib"]
        cells = [in_words(row, cfg.lora) for row in rows]
        lines.append(f"| {device_type} | {limit:.1f} | {' | '.join(cells)} |")
    versions = remembered.versions()
    compiled_by = ", ".join(f"{package} {versions[package]}" for package in versions)
    return "\n".join([*lines, "", f"Compiled by {compiled_by}; nothing was run."])


def largest(cfg, plan, device_type: str, name: str) -> dict:
    """Returns the row of the first --offload that fits, or else of the last one."""
    # Adapters leave nothing to offload.
    offloads = ["none"] if cfg.lora else OFFLOADS
    for offload in offloads:
        setting = {"offload": offload}
        (row,) = plan(device_type, cfg, model_of_size(name), [setting])
        if row["fits"]:
            break
    return row


def in_words(row: dict, lora: int) -> str:
    """Format a row of a plan as a cell of the table. lora: rank of the adapters."""
    if not row["fits"]:
        return f"- {row['gib'] - row['limit_gib']:.1f}" if lora else "-"
    mark = {"none": "", "optimizer": "o ", "params": "p "}[row["offload"]]
    cell = f"{mark}{row['micro_batch']}: {row['gib']:.1f}, {row['layout']}"
    missing = row["rollout_gib"] - row["limit_gib"]
    return f"{cell} + {missing:.1f}" if lora and missing > 0 else cell
