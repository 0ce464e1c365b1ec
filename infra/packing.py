"""Which sequences share a row, and which rows go together through the devices."""

from dataclasses import dataclass

import jax
import numpy as np

import model
from infra.cluster import all_gather_hosts


@dataclass(frozen=True)
class Packing:
    """This host's sequences in rows."""

    width: int  # tokens of a row
    height: int  # rows of this host in a micro-batch
    minibatches: list[range]  # the sequences of each update
    # Of each minibatch its micro-batches, as many on every host: {row of this host: [sequence]}.
    micro_batches: list[list[dict]]
    slots: int  # tokens that this host's devices compute, padding included


def row_width(longest: int, mesh) -> int:
    """Tokens of a row that holds sequences up to `longest`, in units that tp divides."""
    unit = 8 * mesh.shape["tp"]
    return -(-longest // unit) * unit


def pack(lengths: list[int], width: int) -> list[list[int]]:
    """Sequences into rows of `width` tokens, by best fit, longest first -> [[index] per row]."""
    rows = []
    free = np.zeros(0, int)  # tokens that each row has left
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        # The fullest row that still has room.
        fitting = np.where(free >= lengths[i], free, width + 1)
        if not rows or fitting.min() > width:
            rows.append([])
            free = np.append(free, width)
            fitting = np.append(fitting, width)
        best = int(fitting.argmin())
        rows[best].append(i)
        free[best] -= lengths[i]
    return rows


def pack_minibatches(
    lengths: list[int], minibatches: int, width: int, micro_batch: int, mesh
) -> Packing:
    """Sequences of these lengths -> rows of each minibatch, dealt out over this host's devices.

    A minibatch takes every minibatches-th sequence, so that the same sequences go together on any
    number of hosts. micro_batch: rows of a device.
    """
    shards = mesh.shape["dp"] * mesh.shape["fsdp"] // jax.process_count()
    height = shards * micro_batch
    parts = [range(len(lengths))[m::minibatches] for m in range(minibatches)]
    # Packed within a minibatch: a row belongs to one update.
    rows_of = []
    for part in parts:
        packed = pack([lengths[i] for i in part], width)
        rows_of.append([[part[i] for i in row] for row in packed])

    # A host that has fewer rows adds empty micro-batches: every process runs every jitted call.
    counts = all_gather_hosts([-(-len(rows) // height) for rows in rows_of]).max(0)
    micro_batches = []
    computed_rows = 0
    # A device computes its rows in chunks, of which the last may be partly empty; chunks without
    # any row are left out.
    chunk = model.rows_at_once(micro_batch, width)
    for rows, count in zip(rows_of, counts, strict=True):
        micro_batches.append([])
        for k in range(count):
            own = rows[k * height : (k + 1) * height]
            filled = (len(own) + shards - 1 - np.arange(shards)) // shards
            computed_rows += int((-(-filled // chunk) * chunk).sum())
            # Dealt out one by one: each device has as many, but for one. A device's rows stand
            # together, the filled ones first.
            places = {i % shards * micro_batch + i // shards: row for i, row in enumerate(own)}
            micro_batches[-1].append(places)
    return Packing(width, height, parts, micro_batches, computed_rows * width)
