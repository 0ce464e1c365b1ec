"""The table of `tools/plan.py --table`: the largest micro-batch of each model on each type."""

from collections.abc import Callable

from tools import remembered
from tools.sizes import model_of_size

MODELS = "0.5B", "1.5B", "3B", "7B", "14B", "32B"
# fmt: off
TYPES = ("a100-8", "h100-1", "h100-8", "h200-1", "v4-16", "v5litepod-16", "v5p-16", "v6e-8",
         "v6e-16", "v6e-64")
# fmt: on
# Tried in turn until something fits, as each is slower than the one before.
OFFLOADS = "none", "optimizer", "params"


def table(cfg, plan: Callable) -> str:
    """In Markdown. plan: of tools/plan.py; the flags of each plan are cfg's."""
    width = cfg.max_prompt + cfg.max_answer
    lines = [
        f"Rows of {width} tokens per device in one forward and backward: the largest `micro_batch` "
        "that fits, the GiB that it takes of a device, and the layout of the rollout (`dp x tp`).",
        "o: with `--offload optimizer`; p: with `--offload params`; -: not even so.",
        "",
        f"| devices | GiB | {' | '.join(MODELS)} |",
        "|---" * (2 + len(MODELS)) + "|",
    ]
    for device_type in TYPES:
        cells = []
        for name in MODELS:
            row = largest(cfg, plan, device_type, name)
            cells.append(in_words(row))
        lines.append(f"| {device_type} | {row['limit_gib']:.1f} | {' | '.join(cells)} |")
    versions = remembered.versions()
    compiled_by = ", ".join(f"{package} {versions[package]}" for package in versions)
    return "\n".join([*lines, "", f"Compiled by {compiled_by}; nothing was run."])


def largest(cfg, plan, device_type: str, name: str) -> dict:
    """The row of a plan of the first offload with which something fits."""
    for offload in OFFLOADS:
        setting = {"offload": offload}
        (row,) = plan(device_type, cfg, model_of_size(name), [setting])
        if row["micro_batch"]:
            break
    return row


def in_words(row: dict) -> str:
    """What stands in a cell."""
    if not row["micro_batch"]:
        return "-"
    mark = {"none": "", "optimizer": "o ", "params": "p "}[row["offload"]]
    return f"{mark}{row['micro_batch']}: {row['gib']:.1f}, {row['layout']}"
