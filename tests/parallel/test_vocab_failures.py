"""Calls of a sharded vocabulary that fail: interrupts, lost peers, options that differ.
On ranks over gloo."""

import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
import unittest.mock

import torch
import torch.distributed as dist

import flce
from flce.distributed import collectives
from harness import cases
from harness.vocab_case import HIDDEN, TOKENS, VOCAB, make
from harness.vocab_exchanges import (
    Preempted,
    comparisons,
    exchanges,
    interrupting,
    raise_preempted,
    raised,
)
from harness.vocab_ranks import on, same_bytes


def interrupt():
    # Python does not set its handler where the parent ignores SIGINT, as a shell's background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def handled():
    previous = signal.signal(signal.SIGALRM, raise_preempted)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def step_of(case, vp, **options):
    """A function that takes one step, and a list of its parts: forward, backward."""
    leaves = case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()

    def forward(call=flce.linear_cross_entropy):
        return call(*leaves, case.target, vocab_parallel=vp, **options)

    def backward(loss):
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return forward, backward


def error_of(step, name, at, how=raise_preempted):
    try:
        with interrupting(name, at, how):
            step()
    except BaseException as error:
        return error
    return None


@on(2)
def test_interrupts(ranks):
    """They come out as themselves, of the same place on both ranks; the next step is right."""
    eager = flce.linear_cross_entropy
    compiled = torch.compile(eager, backend="aot_eager")
    for sequence, save, call in (
        (False, "grads", eager), (False, "stats", eager), (True, "logits", eager),
        (False, "logits", compiled),
    ):  # fmt: skip
        vp, places = ranks.parallel(VOCAB, sequence=sequence), 0
        own = ranks.divided(make(bias=False), sequence=sequence)
        forward, backward = step_of(own, vp, save=save)

        def step(forward=forward, backward=backward, call=call):
            return backward(forward(call))

        expected = step()
        for name in ("_group", "_works"):
            for at in itertools.count():
                where = f"{name} {at} {save}"
                if (error := error_of(step, name, at)) is None:
                    break
                ranks.note(type(error) is Preempted, f"{where}: {error!r}")
                frames = traceback.extract_tb(error.__traceback__)
                ranks.note(frames[-1].name == "raise_preempted", f"{where}: {frames}")
                ranks.note(not collectives._works(), f"{where}: Works stay")
                same = map(same_bytes, step(), expected)
                ranks.note(all(same), f"{where}: the next step")
            places += at
        ranks.note(places >= 7, f"{save}: {places} places")
        for kind, how in ((KeyboardInterrupt, interrupt), (SystemExit, sys.exit)):
            error = error_of(step, "_works", 1, how)
            ranks.note(type(error) is kind, f"{save}: {error!r}")
    with torch.inference_mode():  # no autograd's kernel is on the way of a compiled graph
        error = error_of(lambda: forward(compiled), "_works", 1)
    ranks.note(type(error) is Preempted, f"inference mode: {error!r}")


# Tensors made after a call, which may get the memory of that call.
SIZES = [2**power for power in range(9, 21)] * 2


def interrupted(seconds, release, act):
    """Whether a signal after `seconds` has ended `act`. Then, or soon after the signal, `release`
    lets the other rank go on, for which `act` may wait; until then what it has begun is in flight.
    Also returns how many of the bytes of tensors made in between have changed."""
    timer = threading.Timer(seconds + 0.02, release)
    timer.start()
    ended = False
    with handled():
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            act()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except Preempted:
            ended = True
    made = [torch.full((size,), 7, dtype=torch.uint8) for size in SIZES]
    timer.cancel()
    release()
    time.sleep(0.01)
    return ended, sum(int((one != 7).sum()) for one in made)


@on(2)
def test_signals_at_many_moments(ranks, moments=150):
    """Of a forward and of a backward of rank 0: what it has begun writes to no later tensor."""
    case = ranks.divided(cases.make_case(192, 128, 2048, dtype=torch.float32))
    store, ends, changed = dist.distributed_c10d._get_default_store(), 0, 0
    for save, part in (("grads", 0), ("stats", 1)):
        for moment in range(-1, moments):  # the first one is measured
            group, key = dist.new_group(), f"{save} {moment}"
            parts = step_of(case, flce.VocabParallel(group, vocab=2048), save=save)
            loss = parts[0]() if part or moment < 0 else None
            ranks.gathered(None)

            def act(parts=parts, loss=loss, part=part):
                return parts[1](loss) if part else parts[0]()

            if moment < 0:
                begin = time.perf_counter()
                act()
                duration = time.perf_counter() - begin
            elif ranks.rank == 0:
                collectives.compared.add(group)
                seconds = duration * (moment + 0.5) / moments
                ended, count = interrupted(seconds, lambda key=key: store.set(key, ""), act)
                ends, changed = ends + ended, changed + count
            else:
                collectives.compared.add(group)
                store.wait([key])
                with contextlib.suppress(RuntimeError):  # where rank 0 does not take part
                    act()
            dist.destroy_process_group(group)
            del group, parts, loss, act  # the last references: rank 1 sees that rank 0 has left
    ranks.note(changed == 0, f"{changed} bytes have changed")
    ranks.note(ranks.rank or ends > moments // 2, f"{ends} interrupts")


@on(2)
def test_a_lost_peer(ranks):
    """torch's error, with what failed and where."""
    group = dist.new_group()
    forward, backward = step_of(ranks.divided(make()), flce.VocabParallel(group, vocab=VOCAB))
    backward(forward())
    name = group.group_name
    ranks.gathered(None)
    if ranks.rank == 1:
        dist.destroy_process_group(group)
        del group
    ranks.gathered(None)
    if ranks.rank == 0:
        try:
            forward()
        except RuntimeError as error:
            cause, text = error.__cause__, str(error)
            which = rf"flce: exchange failed: (all_gather|wait) \(statistics\) of group '{name}': "
            ranks.note(type(error) is RuntimeError and re.match(which, text), text)
            ranks.note(isinstance(cause, RuntimeError) and str(cause) in text, f"{cause!r}")
        else:
            ranks.note(False, "nothing was raised")


# ---- FLCE_CHECK=1 ----

DIFFERENT = (
    ("softcap", 0.0, 30.0, {}),
    ("temperature", 1.0, 0.7, {}),
    ("gradient_eps", 2**-6, 2**-4, {"gradient": "sampled"}),
    ("reduction", "mean", "sum", {}),
    ("ignore_index", -100, -1, {}),
    ("save", "logits", "stats", {}),
    ("max_memory", 1 << 16, 1 << 17, {}),
    ("gradient", "exact", "sampled", {}),
    ("accum_dtype", torch.float32, torch.bfloat16, {}),
)


@on(2)
def test_options_that_differ(ranks):
    case, rank = ranks.divided(make(torch.bfloat16, bias=False)), ranks.rank

    def call(tokens=TOKENS, dtype=torch.bfloat16, wants=True, how=None, **options):
        x, w = case.input[:tokens].to(dtype).requires_grad_(wants), case.linear_weight.to(dtype)
        vp = ranks.parallel(VOCAB, **(how or {}))
        return flce.linear_cross_entropy(x, w, case.target[:tokens], vocab_parallel=vp, **options)

    def refuse(name, values, **options):
        got = "{!r} on rank 0, {!r} on rank 1".format(*values)
        what = f"{name}: expected the same on all ranks, got {got}"
        raised(ranks, what, ValueError, lambda: call(**options))

    call()
    with unittest.mock.patch.dict(os.environ, FLCE_CHECK="1"):
        for name, *values, others in DIFFERENT:
            refuse(name, values, **{name: values[rank] or None}, **others)
        shapes = [(torch.bfloat16, (TOKENS - 2 * one, HIDDEN)) for one in (0, 1)]
        refuse("input", shapes, tokens=TOKENS - 2 * rank)
        dtypes = torch.bfloat16, torch.float32
        refuse("input", [(one, shapes[0][1]) for one in dtypes], dtype=dtypes[rank])
        vectors = None, torch.ones(TOKENS)
        refuse("token_weight", (None, torch.float32), token_weight=vectors[rank])
        refuse("grad_input", (True, False), wants=rank == 0)
        refuse("reduce_input_grad", (True, False), how={"reduce_input_grad": rank == 0})
        call().backward()
    ranks.compare(make())


@on(2)
def test_options_are_compared_with_FLCE_CHECK_alone(ranks):  # noqa: N802
    group, own = dist.new_group(), ranks.divided(make())
    vp = flce.VocabParallel(group, vocab=VOCAB)
    compiled = torch.compile(flce.linear_cross_entropy, backend="aot_eager")
    operands = own.input, own.linear_weight, own.target
    for value, call, compared in (
        ("0", flce.linear_cross_entropy, 1), ("0", flce.linear_cross_entropy, 0),
        ("1", flce.linear_cross_entropy, 1), ("1", compiled, 0),
    ):  # fmt: skip
        with unittest.mock.patch.dict(os.environ, FLCE_CHECK=value), exchanges() as begun:
            call(*operands, vocab_parallel=vp)
        ranks.note(comparisons(begun) == compared, f"{value}: {begun}")
