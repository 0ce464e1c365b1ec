"""Which sequences share a row, and which rows go together through the devices."""

from dataclasses import dataclass

import jax
import numpy as np

import model
from infra import memory
from infra.cluster import all_gather_hosts


@dataclass(frozen=True)
class Packing:
    """This host's sequences in rows; of each minibatch M, what it has over all hosts."""

    shape: tuple[int, int]  # rows of this host in a micro-batch, tokens of a row
    # Of each minibatch its micro-batches, as many on every host: {row of this host: [sequence]}.
    micro_batches: list[list[dict]]
    answers_M: np.ndarray  # answers, in a row or not
    answer_tokens_M: np.ndarray  # their tokens
    counts: dict  # of a step, by `count_tokens`


def row_width(longest: int, mesh) -> int:
    """Tokens of a row that holds sequences up to `longest`, in units that tp divides."""
    unit = 8 * mesh.shape["tp"]
    return -(-longest // unit) * unit


def pack(lengths, width: int) -> list[list[int]]:
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


def pack_minibatches(prompts, answers, computed, minibatches: int, setup) -> Packing:
    """Prompts with their answers -> rows of each minibatch, dealt out over this host's devices.

    A minibatch takes every minibatches-th sequence, so that the same sequences go together on any
    number of hosts. computed: a bool of each; the others belong to a minibatch, and to no row.
    setup: of the run.
    """
    width = setup.row_width
    micro_batch = setup.micro_batch
    shards = setup.mesh.shape["dp"] * setup.mesh.shape["fsdp"] // jax.process_count()
    height = shards * micro_batch
    answer_lengths = np.array([len(answer) for answer in answers])
    lengths = answer_lengths + [len(prompt) for prompt in prompts]
    parts = [range(len(lengths))[m::minibatches] for m in range(minibatches)]
    # Packed within a minibatch: a row belongs to one update.
    rows_of = []
    for part in parts:
        kept = [i for i in part if computed[i]]
        packed = pack(lengths[kept], width)
        rows_of.append([[kept[i] for i in row] for row in packed])

    # A host that has fewer rows adds empty micro-batches: every process runs every jitted call. If
    # no host has a row there is one still: the optimizer's step is that of a gradient of 0.
    needed_M = [max(1, -(-len(rows) // height)) for rows in rows_of]
    micro_batches_M = all_gather_hosts(needed_M).max(0)
    micro_batches = []
    computed_rows = 0
    # A device computes its rows in chunks, of which the last may be partly empty; chunks without
    # any row are left out.
    chunk = model.rows_at_once(micro_batch, width)
    for rows, n in zip(rows_of, micro_batches_M, strict=True):
        micro_batches.append([])
        for k in range(n):
            own = rows[k * height : (k + 1) * height]
            filled = (len(own) + shards - 1 - np.arange(shards)) // shards
            computed_rows += int((-(-filled // chunk) * chunk).sum())
            # Dealt out one by one: each device has as many, but for one. A device's rows stand
            # together, the filled ones first.
            places = {i % shards * micro_batch + i // shards: row for i, row in enumerate(own)}
            micro_batches[-1].append(places)

    own_M2 = [(len(part), answer_lengths[part].sum()) for part in parts]
    answers_M, answer_tokens_M = all_gather_hosts(own_M2).sum(0).T
    slots = computed_rows * width
    counts = count_tokens(lengths, answer_lengths, computed, slots, setup.model_cfg)
    return Packing((height, width), micro_batches, answers_M, answer_tokens_M, counts)


def count_tokens(lengths, answer_lengths, computed, slots, model_cfg) -> dict:
    """What a step's metrics are made of, summed over all hosts."""
    of_host = {
        "valid": answer_lengths.sum(),  # tokens of all answers
        "trained": answer_lengths[computed].sum(),  # and of those that are computed
        "tokens": lengths[computed].sum(),  # the latter's prompts included
        "slots": slots,  # and padding
        "flops": memory.flops(model_cfg, lengths[computed].tolist()),
    }
    of_all = all_gather_hosts(list(of_host.values())).sum(0).tolist()
    return dict(zip(of_host, of_all, strict=True))
