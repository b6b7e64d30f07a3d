#!/usr/bin/env python3
"""Predicts the time of a step with the vocabulary sharded over ranks: no GPU, no process group.

    python benchmarks/scale.py head 16384x8192x128256 8192x2048x151936 --predict

A step of the slowest rank, of T ranks and C chunks (docs/parallel-reference.md has the formula):

    products of all chunks + passes + exposed exchanges + jitter

A Plan of flce.plan says the chunks and the collectives with their calls and bytes; `predict` gives
each a time. meshes.py has the tables.

Everything here is calculated. Two records test it, of two H200 and of four H100 of one host
(benchmarks/results, 2026-11-23-h200x2- and 2026-11-27-h100x4-vocab-parallel.json).
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

import flce

ELEMENT, WIDE = 2, 4  # bytes of bfloat16 and of float32


@dataclass(frozen=True)
class Machine:
    """Constants of the GPUs and of what joins them. Times in seconds, rates per second."""

    multiprocessors: int = 132
    # Multiply-adds at full waves. Fitted to one number: with it the three bare products of half of
    # head's vocabulary take 18.84 ms, the median of the record's five runs (18.77 to 19.01).
    multiply_adds: float = 347.2e12
    # Bytes of a pass over rows, and what a kernel takes in addition. Fitted to a profile taken with
    # those runs (its times are in no record), chunks of 4096 rows: gather of x 22 us (67 MB),
    # offsets 22 us (67 MB), finish_grad_input 57 us (201 MB). Nominal: 4.8 TB/s.
    # benchmarks/NOTES.md, 2026-11-22: a small kernel takes 2 to 6 us.
    memory: float = 3.7e12
    launch: float = 4e-6
    # A target's share of the kernels in which one block reads all targets. Fitted: prepare runs
    # twice, 47 us for 8192 tokens (the same profile). Finding the valid rows: 40 us
    # (csrc/core/gpu_facts.c), taken as those of 8192 tokens.
    prepare_target: float = 2.4e-9
    find_target: float = 4.4e-9
    # merge_statistics: a thread goes over the numbers of all ranks three times, one load at a time.
    # Assumed: 0.15 us a load. Of two ranks it cannot be told from the launch.
    merge_rank: float = 0.45e-6
    # What a chunk takes longer if a rank's classes are no multiple of 8 (csrc/core/chunks.c).
    ragged: float = 50e-6
    # One direction of a GPU's NVLink: the ring's peak (nccl-tests#212). What a peer adds, its flags
    # and the start of a copy, follows from 33.5 MB measured in 0.10 ms between two GPUs
    # (NOTES.md, 2026-11-23). Copies run one after the other.
    nvlink: float = 370e9
    copy_peer: float = 9e-6
    # NCCL inside a host. Fitted to 0.15 ms for those bytes, the mean of its all-to-all and its
    # all-gather (the same note), with the latency of small messages (Triton-distributed#57).
    nccl: float = 268e9
    nccl_latency: float = 25e-6
    # A network card of 400 Gb/s for each GPU: 46 to 48 GB/s are what NCCL's authors expect of it
    # (nccl-tests#290). Nothing beyond one host was measured here: the latency of each doubling of
    # the hosts, and of each message of an all-to-all, are assumed.
    host: int = 8
    network: float = 45e9
    network_latency: float = 10e-6
    message: float = 1e-6
    # Standard deviation of a rank's time between two synchronisations, relative to that time. One
    # GPU's step over the bare products right before it: (p95 - p5) / median 3.65 %, which are 3.29
    # standard deviations (results/2026-11-21-h200-loop-control.json). Taken as that of GPUs.
    sigma: float = 0.011


H200 = Machine()
# Four H100: their bare products took 9.14 to 9.67 ms in four runs; the multiply_adds of H200 give
# 9.47. The memory's rate is that of finish_grad_input in a profile: 403 MB in 143 us, of which
# `launch` is 4.
H100 = replace(H200, memory=2.9e12)


def ceil_div(a, b):
    return -(-a // b)


# ---- products ----

# csrc/core/chunks.c: output tiles of cuBLASLt and the time of their elements over the largest's.
TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (192, 192, 1.0),
    (192, 128, 1.02),
    (128, 192, 1.02),
    (128, 128, 1.06),
)
MOST_SPLITS, SPLIT_BYTES = 3, 32 << 20  # of k; partial results in the GEMM's workspace
LOGITS_TILE, CLUSTER_ROWS = (128, 192), 256  # csrc/architectures.h
LEAST_ROWS = 193  # of a chunk, for that kernel (csrc/architectures.h)


def product(machine, m, n, k, out=ELEMENT):
    """Seconds of a GEMM [m][k] x [k][n] by its best tile and splits: whole waves of tiles, or its
    bytes if they take longer."""
    efforts = []
    for (rows, columns, effort), splits in itertools.product(TILES, range(1, MOST_SPLITS + 1)):
        if splits > 1 and splits * m * n * WIDE > SPLIT_BYTES:
            continue
        waves = ceil_div(ceil_div(m, rows) * ceil_div(n, columns) * splits, machine.multiprocessors)
        efforts.append(waves * rows * columns * effort / splits)
    adds = min(efforts) * machine.multiprocessors * k
    moved = (m * k + k * n) * ELEMENT + m * n * out
    return machine.launch + max(adds / machine.multiply_adds, moved / machine.memory)


def logits_product(machine, rows, hidden, vocab, out=ELEMENT):
    """The product with exp in its epilogue. `out`: bytes of an element that it writes, or 0."""
    if rows < LEAST_ROWS:  # float32 logits by cuBLASLt, which a pass over the rows reads
        passes = rows * vocab * (WIDE + out) / machine.memory + machine.launch
        return product(machine, rows, vocab, hidden, WIDE) + passes
    tiles = ceil_div(rows, CLUSTER_ROWS) * 2 * ceil_div(vocab, LOGITS_TILE[1])
    waves = ceil_div(tiles, machine.multiprocessors)
    adds = waves * machine.multiprocessors * math.prod(LOGITS_TILE) * hidden
    moved = (rows + vocab) * hidden * ELEMENT + rows * vocab * out
    return machine.launch + max(adds / machine.multiply_adds, moved / machine.memory)


def weight_product(machine, rows, hidden, vocab, added):
    """dW of a chunk. The share of dW's own traffic that the mainloop does not hide is a linear fit
    to measured GEMMs (csrc/core/chunks.c: chunk_dw_effort)."""
    adds, elements = product(machine, vocab, hidden, rows), vocab * hidden
    moves = elements * 2 * ELEMENT
    hidden_until = elements * rows / machine.multiply_adds * machine.memory / moves
    share = min(max(1.2 - 0.58 * hidden_until, 0.0), 1.0)
    return adds + share * (moves if added else moves / 2) / machine.memory


def bare_products(machine, tokens, hidden, vocab):
    """The three GEMMs of a rank's share, as scale.py's `products` runs them."""
    sizes = (tokens, vocab, hidden), (tokens, hidden, vocab), (vocab, hidden, tokens)
    return sum(product(machine, *size) for size in sizes)


# ---- collectives ----


class Transport(NamedTuple):
    """How ranks exchange, and whether products run at full speed at the same time."""

    name: str
    overlaps_products: bool


# Measured under a product of dW: +0.02 ms of 0.10 (NOTES.md, 2026-11-23).
COPIES = Transport("copy engines", True)
# Measured: as long as exposed, or longer. A collective waits for multiprocessors that the products
# hold, or delays their last clusters. Beyond a host this is what flce runs today.
NCCL = Transport("NCCL", False)
# Not built: within the hosts first, which sum, then between them, by what takes no multiprocessor.
HIERARCHICAL = Transport("hierarchical", True)


def transport_of(machine, ranks):
    """The transport that flce uses. Ranks of one host are consecutive."""
    return COPIES if ranks <= machine.host else NCCL


def latency(machine, hosts):
    return machine.nccl_latency + machine.network_latency * math.log2(hosts)


def gather_seconds(machine, transport, ranks, received, members=None):
    """An all-gather, or a reduce-scatter, in which a rank receives (sends) `received` bytes.
    `members`: ranks of the group on a host. Its cards share what the host receives."""
    members = members or min(ranks, machine.host)
    if transport is COPIES:
        return (ranks - 1) * machine.copy_peer + received / machine.nvlink
    link = machine.nccl if transport is NCCL else machine.nvlink
    remote = received * (ranks - members) / max(ranks - 1, 1) / members
    hosts = ceil_div(ranks, members)
    return latency(machine, hosts) + max(received / link, remote / machine.network)


def exchange_seconds(machine, transport, ranks, received):
    """An all-to-all in which a rank receives `received` bytes. NCCL's is of pairs: what comes from
    other hosts comes through a GPU's own card (nccl-tests#267). Hierarchically the ranks of a host
    exchange, and sum, before one sum for each host crosses the network."""
    if transport is COPIES or ranks <= machine.host:
        return gather_seconds(machine, transport, ranks, received)
    members, block = machine.host, received / (ranks - 1)
    hosts = ceil_div(ranks, members)
    if transport is NCCL:
        remote = (ranks - members) * (block / machine.network)
        local = (members - 1) * block / machine.nccl
        return latency(machine, hosts) + (ranks - members) * machine.message + max(remote, local)
    whole = ranks * block
    within = whole * (members - 1) / members / machine.nvlink
    sums = whole * (1 + 1 / members) / machine.memory
    between = (hosts - 1) * (block / machine.network)
    latencies = machine.nccl_latency + latency(machine, hosts) + machine.launch
    return latencies + within + sums + between


# ---- a step ----


@dataclass
class Prediction:
    """Seconds of a step of the slowest rank. `exchange`: all collectives, `exposed`: what of them
    no product or pass hides. `received`: bytes by collective."""

    ranks: int
    chunks: int
    save: str
    sequence: bool
    transport: str
    bare: float  # the bare products of the same share
    products: float = 0.0
    passes: float = 0.0
    exchange: float = 0.0
    exposed: float = 0.0
    jitter: float = 0.0
    received: dict = field(default_factory=dict)

    @property
    def step(self):
        return self.products + self.passes + self.exposed + self.jitter

    @property
    def ratio(self):
        """To the bare products of the slowest rank, as scale.py measures it."""
        return self.step / (self.bare * (1 + self.jitter / (self.products + self.passes)))


class _Step:
    """Adds up the parts of a step in the order of csrc/core/engine.c. Passes are (bytes, launches);
    sizes are those of the share of a rank with the most classes."""

    def __init__(self, machine, transport, plan, hidden, vocab, result):
        self.machine, self.transport, self.plan, self.result = machine, transport, plan, result
        self.hidden, self.ranks, self.tokens = hidden, plan.ranks, plan.rows
        self.vocab = ceil_div(vocab, plan.ranks)
        self.divided = plan.ranks > 1
        # csrc/core/gpu_facts.c: is_worth_finding_rows
        self.finds = self.vocab >= 8192 and self.tokens * self.vocab >= 1 << 27

    def add_pass(self, moved, launches=1):
        seconds = moved / self.machine.memory + launches * self.machine.launch
        self.result.passes += seconds
        return seconds

    def add_product(self, seconds):
        self.result.products += seconds
        return seconds

    def collective(self, name, cover):
        """One call of a collective, `cover` seconds of work at the same time. What is hidden still
        takes the memory's time to read and write the bytes: of 33.5 MB 18 us, measured 20."""
        if name not in self.plan.collectives:
            return
        result, planned = self.result, self.plan.collectives[name]
        received = planned.bytes / (planned.forward + planned.backward)
        result.received[name] = result.received.get(name, 0) + received
        seconds_of = exchange_seconds if planned.kind == "all-to-all" else gather_seconds
        seconds = seconds_of(self.machine, self.transport, self.ranks, received)
        result.exchange += seconds
        exposed = seconds
        if self.transport.overlaps_products:
            exposed = max(seconds - cover, 0.0) + 2 * received / self.machine.memory
        result.exposed += min(exposed, seconds)

    def row_bytes(self, rows, per_element):
        return rows * self.hidden * per_element

    def open(self):
        """Before the chunks, in the forward and in the backward: sequence's x, a rank's targets,
        the rows to compute and what has to be cleared."""
        if "input" in self.plan.collectives:
            if self.transport is COPIES:  # x into shared memory, and from there into x of all
                self.add_pass(self.row_bytes(self.tokens // self.ranks, 4 * ELEMENT), 2)
            self.collective("input", 0.0)
        if self.divided:
            self.add_pass(16 * self.tokens)
        if self.finds:
            self.add_pass(0, 3)
            self.result.passes += self.machine.launch + self.tokens * self.machine.find_target

    def prepare(self, times):
        """The scalars of all classes, and of a rank's with the order of its targets."""
        one = self.machine.launch + self.tokens * self.machine.prepare_target
        self.result.passes += times * one

    def logits(self, rows, writes, fused=True):
        """Logits, statistics, and E with `writes`. Not `fused`: in the backward of "stats"."""
        machine, ragged = self.machine, self.vocab % 8 > 0
        if self.finds:
            self.add_pass(self.row_bytes(rows, 2 * ELEMENT))
        if not fused:
            self.add_product(product(machine, rows, self.vocab, self.hidden, WIDE))
            self.add_pass(rows * self.vocab * (WIDE + ELEMENT))
        else:
            self.add_pass(self.row_bytes(rows, 2 * ELEMENT))  # the offsets: x and the targets' W
            out = ELEMENT if writes else 0
            self.add_product(logits_product(machine, rows, self.hidden, self.vocab, out))
            self.add_pass(rows * ceil_div(self.vocab, LOGITS_TILE[1]) * WIDE, 2)
        if ragged:
            self.result.passes += machine.ragged

    def statistics(self, rows, cover):
        """Pack, a copy of a rank's own, the exchange, the merge of all ranks'."""
        if self.divided:
            self.add_pass(rows * 2 * WIDE * (3 + self.ranks), 3)
            self.result.passes += self.ranks * self.machine.merge_rank
            self.collective("statistics", cover)

    def input_product(self, rows):
        return self.add_product(product(self.machine, rows, self.hidden, self.vocab, WIDE))

    def gradients(self, rows, first, last):
        """Behind dX's product: coefficients, dX and coef x of the rows, dW."""
        self.add_pass(0)
        # D in float32, x and the targets' W are read, dX and coef x written
        self.add_pass(self.row_bytes(rows, WIDE + 4 * ELEMENT))
        added = not first
        weight = weight_product(self.machine, rows, self.hidden, self.vocab, added)
        self.add_product(weight)
        if last and "partial_dx" in self.plan.collectives:
            self.sum_dx(weight)

    def sum_dx(self, weight):
        """dX of all ranks, during dW's product of `weight` seconds. Where sums of dX are gathered,
        that product is split in two: the ranks' terms are exchanged during the first half, then
        summed, and the sums gathered during the second (dw_first_classes of csrc/flce.h)."""
        gathers = "summed_dx" in self.plan.collectives
        self.collective("partial_dx", weight / 2 if gathers else weight)
        self.add_pass(self.row_bytes(self.tokens, ELEMENT * (1 + 2 / self.ranks)))
        if gathers:
            self.collective("summed_dx", weight / 2)

    def finish(self):
        """The target rows of dW; the sum of the losses and the scaling of gradients."""
        # Each token adds to one row of dW on every rank (its target's or its substitute's): the
        # expected number of distinct rows of random targets.
        touched = self.vocab * -math.expm1(-self.tokens / self.vocab)
        moved = self.row_bytes(self.tokens, ELEMENT) + self.row_bytes(touched, 2 * ELEMENT)
        self.add_pass(moved)
        self.add_pass(0, 2)  # reduce, scale_grads


def _chunks(rows, chunk_rows):
    return [min(chunk_rows, rows - first) for first in range(0, rows, chunk_rows)]


def _forward_gradients(step):
    """save="grads": all products in the forward's loop."""
    chunks = _chunks(step.tokens, step.plan.chunk_rows)
    for index, rows in enumerate(chunks):
        step.logits(rows, writes=True)
        if index == 0:
            step.prepare(2 if step.divided else 1)
        cover = step.input_product(rows)
        step.statistics(rows, cover)
        step.gradients(rows, index == 0, index == len(chunks) - 1)


def _forward_then_backward(step):
    """save="logits" and "stats": the statistics are exchanged after the forward."""
    plan = step.plan
    for index, rows in enumerate(_chunks(step.tokens, plan.chunk_rows)):
        step.logits(rows, writes=plan.save == "logits")
        if index == 0:
            step.prepare(2 if step.divided else 1)
    step.statistics(step.tokens, 0.0)
    step.open()
    chunks = _chunks(step.tokens, plan.backward_chunk_rows)
    for index, rows in enumerate(chunks):
        if plan.save == "stats":
            step.logits(rows, writes=True, fused=False)
        step.input_product(rows)
        step.gradients(rows, index == 0, index == len(chunks) - 1)
    step.prepare(1)  # the order of the targets once more


def predict(plan, hidden, vocab, machine=H200, transport=None):
    """The Prediction of a plan of flce.plan(..., ranks=): forward and backward with class targets
    and no options, bfloat16. `vocab`: classes of all ranks."""
    transport = transport or transport_of(machine, plan.ranks)
    share = ceil_div(vocab, plan.ranks)
    result = Prediction(
        ranks=plan.ranks,
        chunks=plan.chunks if plan.save == "grads" else plan.backward_chunks,
        save=plan.save,
        sequence="input" in plan.collectives,
        transport=transport.name if plan.ranks > 1 else "",
        bare=bare_products(machine, plan.rows, hidden, share),
    )
    step = _Step(machine, transport, plan, hidden, vocab, result)
    step.open()
    if plan.save == "grads":
        _forward_gradients(step)
    else:
        _forward_then_backward(step)
    step.finish()
    # E[max of T] - E about sigma sqrt(2 ln T), of the work since the synchronisation before. The
    # share of time does not depend on how many synchronisations divide it.
    spread = machine.sigma * math.sqrt(2 * math.log(plan.ranks))
    result.jitter = spread * (result.products + result.passes)
    return result


# ---- plans ----


def budget_of(tokens, hidden, vocab, ranks, chunks, row_bytes=64):
    """The max_memory of so many chunks. `row_bytes`: E's rows are aligned to them."""
    rows = min(ceil_div(ceil_div(tokens, chunks), CLUSTER_ROWS) * CLUSTER_ROWS, tokens)
    return rows * ceil_div(ceil_div(vocab, ranks) * ELEMENT, row_bytes) * row_bytes


def make_plan(tokens, hidden, vocab, ranks, save="grads", chunks=1, sequence=False):
    """A rank's Plan with that many chunks. It is of the CPU, which every machine has: collectives,
    calls and bytes are those of GPUs, and max_memory decides the chunks, as it does there."""
    size = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "ranks": ranks}
    budget = budget_of(tokens, hidden, vocab, ranks, chunks)
    options = {"save": save, "max_memory": budget, "sequence": sequence}
    # By name: no wider sum over many chunks, in whose place other loops would be planned.
    return flce.plan(**size, **options, device="cpu", accum_dtype=torch.bfloat16)
