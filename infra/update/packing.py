"""Pack sequences into rows, and group the rows into micro-batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

import model
from infra.host.processes import all_gather_processes, host_count
from infra.update import lora

# Short sequences share rows of up to SHARED_WIDTH tokens, if each device then has MIN_ROWS rows
# or more, and attention takes at most MAX_ATTENTION times as many FLOPs as the matmuls.
SHARED_WIDTH = 512
MIN_ROWS = 8
MAX_ATTENTION = 0.05


@dataclass(frozen=True)
class Packing:
    """This host's sequences in rows, and for each minibatch (M) the totals over all hosts."""

    shape: tuple[int, int]  # (this host's rows in a micro-batch, tokens per row)
    # The micro-batches of each minibatch. All hosts have the same number. A micro-batch is
    # {row of this host: [index of each sequence in the row]}.
    micro_batches: list[list[dict]]
    answers_M: np.ndarray  # number of answers with a loss, packed or not, of all hosts
    answer_tokens_M: np.ndarray  # number of tokens of these answers
    counts: dict  # the step's totals, from `count_tokens`


class RowShape(NamedTuple):
    """The size of the rows that sequences are packed into."""

    width: int  # tokens per row
    most: int  # maximum rows per device that a minibatch's sequences take


def row_shape(longest: int, cfg, model_cfg: model.ModelConfig, mesh) -> RowShape:
    """Choose the width of rows for sequences of at most `longest` tokens.

    A row has room for k of the longest sequences. With k = 1, no two sequences longer than half a
    row can share a row. A wider row packs several of them and wastes less.
    """
    # In the forward, matmuls take 2 FLOPs per token and parameter. Attention over W tokens
    # takes 4 * W * N * H per token and layer.
    per_width = 4 * model_cfg.L * model_cfg.N * model_cfg.H
    widest = min(SHARED_WIDTH, MAX_ATTENTION * 2 * model_cfg.n_multiplied / per_width)
    sequences = sequences_of_device(cfg, mesh)
    k = max(1, min(int(widest / longest), sequences // MIN_ROWS))
    # The loss splits the tokens of a row over tp.
    unit = 8 * mesh.shape["tp"]
    # A row with fewer than k sequences has room for another, so all but the last have at least k.
    return RowShape(-(-k * longest // unit) * unit, max(1, -(-sequences // k)))


def sequences_of_device(cfg, mesh) -> int:
    """Sequences per device in a minibatch."""
    sequences = cfg.batch * cfg.npq * host_count(mesh)
    return sequences // (mesh.shape["dp"] * mesh.shape["fsdp"]) // cfg.minibatches


def pack(lengths, width: int) -> list[list[int]]:
    """Pack sequences into rows of `width` tokens by best fit, longest first. Returns, for each row,
    the indices of its sequences."""
    rows = []
    free = np.zeros(0, int)  # tokens that each row has left
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        # Choose the fullest row that still has room. Rows without room count as width + 1.
        fitting = np.where(free >= lengths[i], free, width + 1)
        if not rows or fitting.min() > width:
            rows.append([])
            free = np.append(free, width)
            fitting = np.append(fitting, width)
        best = int(fitting.argmin())
        rows[best].append(i)
        free[best] -= lengths[i]
    return rows


def pack_minibatches(prompts, answers, is_packed, has_loss, cfg, setup) -> Packing:
    """Pack prompts with their answers into rows, a set of rows for each minibatch, and deal the
    rows out over this host's devices.

    Minibatch m takes sequences m, m + n, m + 2 * n and so on, where n = cfg.minibatches. Each host
    has a multiple of n sequences, so a minibatch has the same sequences on any number of hosts.

    is_packed: whether to pack each sequence; the others are in no row. has_loss: whether each
    sequence counts in the normaliser of the loss. setup: the trainer's Setup.
    """
    width = setup.row_width
    micro_batch = setup.micro_batch
    shards = setup.mesh.shape["dp"] * setup.mesh.shape["fsdp"] // jax.process_count()
    height = shards * micro_batch
    answer_lengths = np.array([len(answer) for answer in answers])
    lengths = answer_lengths + [len(prompt) for prompt in prompts]
    minibatches = range(cfg.minibatches)
    parts = [range(len(lengths))[m :: cfg.minibatches] for m in minibatches]
    # Pack each minibatch separately, because a row belongs to one update.
    rows_M = []
    for part in parts:
        kept = [i for i in part if is_packed[i]]
        packed = pack(lengths[kept], width)
        rows_M.append([[kept[i] for i in row] for row in packed])

    # A host with fewer rows adds empty micro-batches, because every process must run every jitted
    # call. If no host has a row, there is still one micro-batch: the optimizer takes a step with
    # gradient 0.
    needed_M = [max(1, -(-len(rows) // height)) for rows in rows_M]
    micro_batches_M = all_gather_processes(needed_M).max(0)
    micro_batches = []
    computed_rows = 0
    # A device computes its rows in chunks. It skips an empty chunk, and computes a partly empty
    # chunk in full.
    chunk = model.rows_at_once(micro_batch, width)
    for rows, count in zip(rows_M, micro_batches_M, strict=True):
        micro_batches.append([])
        for k in range(count):
            own = rows[k * height : (k + 1) * height]
            # The number of rows that each device gets, if they are dealt out one by one.
            filled = (len(own) + shards - 1 - np.arange(shards)) // shards
            computed_rows += int((-(-filled // chunk) * chunk).sum())
            # Deal the rows out, so that the devices' numbers of rows differ by at most one. Each
            # device's places are contiguous, and it fills the first of them.
            places = {}
            for i, row in enumerate(own):
                device = i % shards
                places[device * micro_batch + i // shards] = row
            micro_batches[-1].append(places)

    own_M2 = [(has_loss[part].sum(), answer_lengths[part] @ has_loss[part]) for part in parts]
    answers_M, answer_tokens_M = all_gather_processes(own_M2).sum(0).T
    slots = computed_rows * width
    counts = count_tokens(lengths, answer_lengths, is_packed, slots, cfg, setup.model_cfg)
    return Packing((height, width), micro_batches, answers_M, answer_tokens_M, counts)


def count_tokens(lengths, answer_lengths, is_packed, slots, cfg, model_cfg) -> dict:
    """The totals that a step's metrics are computed from, summed over all hosts."""
    own = {
        "valid": answer_lengths.sum(),  # tokens of all answers
        "trained": answer_lengths[is_packed].sum(),  # tokens of the packed answers
        "tokens": lengths[is_packed].sum(),  # tokens of the packed answers and their prompts
        "slots": slots,  # places in the computed rows: tokens and padding
        "flops": flops(cfg, model_cfg, lengths[is_packed].tolist()),
    }
    totals = all_gather_processes(list(own.values())).sum(0).tolist()
    return dict(zip(own, totals, strict=True))


def flops(cfg, model_cfg: model.ModelConfig, lengths: Iterable[int]) -> float:
    """FLOPs of a forward and backward over sequences, without recomputation.

    Each token takes 6 FLOPs per trained matmul parameter, and 4 per frozen one. Each pair of a
    query and a key that it attends to takes 12 * N * H FLOPs per layer (arXiv 2204.02311,
    appendix B). The LM head counts for all tokens, although the loss skips most prompt tokens.
    """
    per_token = 6 * model_cfg.n_multiplied + lora.flops_of_a_token(cfg, model_cfg)
    per_pair = 12 * model_cfg.L * model_cfg.N * model_cfg.H
    total = 0.0
    for n in lengths:
        # Token number k of a sequence attends to k tokens.
        pairs = n * (n + 1) // 2
        total += per_token * n + per_pair * pairs
    return total
