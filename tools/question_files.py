"""Write the question files of the tools."""

import json
import os
from pathlib import Path

from infra.host.console import say


def write_sets(directory: str, **sets: list[dict]) -> None:
    """Write the rows of each set to DIRECTORY/<name of the set>.jsonl."""
    os.makedirs(directory, exist_ok=True)
    for name, rows in sets.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        path = Path(directory, f"{name}.jsonl")
        path.write_text("".join(lines))
        say(f"{path}: {len(rows)} questions")
