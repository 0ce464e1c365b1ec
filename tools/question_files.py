"""Write the question files of the tools."""

import json
import os

from infra.host import files
from infra.host.console import say


def write_sets(directory: str, **sets: list[dict]) -> None:
    """Write the rows of each set to DIRECTORY/<name of the set>.jsonl."""
    os.makedirs(directory, exist_ok=True)
    for name, rows in sets.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        path = f"{directory}/{name}.jsonl"
        with files.atomic_file(path) as f:
            f.write("".join(lines).encode())
        say(f"{path}: {len(rows)} questions")
