"""A rank that raises, and one that dies, while another one is in a call of a sharded vocabulary:
fault_ranks.py RANK STORE. Run by test_faults.py; rank 0 prints what its calls have raised."""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

import flce

TOKENS, HIDDEN, VOCAB = 12, 8, 20


def seconds(number):
    return datetime.timedelta(seconds=number)


def leaves_of(vocab):
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS, HIDDEN), torch.randn(vocab, HIDDEN)
    return x.requires_grad_(), w.requires_grad_(), torch.arange(TOKENS) % VOCAB


def error_of(act):
    try:
        act()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "nothing"


def main(rank, path):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds(600))
    x, w, y = leaves_of(VOCAB // 2)

    def loss(group, **options):
        shard = flce.VocabParallel(group, vocab=VOCAB)
        return flce.linear_cross_entropy(x, w, y, save="stats", vocab_parallel=shard, **options)

    loss(dist.group.WORLD).backward()  # what is imported and compared in the first call
    # Rank 1 raises in its own part of a step and makes no call.
    group = dist.new_group(timeout=seconds(5))
    loss(group).backward()
    if rank == 0:
        print(f"raises: {error_of(lambda: loss(group))}", flush=True)
        store.set("timed out", "")
    else:
        store.wait(["timed out"], seconds(300))
    # Rank 1 dies in front of its backward.
    group = dist.new_group(timeout=seconds(60))
    made = loss(group, accumulate_into="grad")
    if rank == 1:
        store.wait(["has a loss"], seconds(300))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("has a loss", "")
    x.grad, w.grad = None, torch.zeros_like(w)
    print(f"dies: {error_of(made.backward)}", flush=True)
    assert x.grad is None
    flce.linear_cross_entropy(*leaves_of(VOCAB)).backward()
    print("alone: a step", flush=True)
    os._exit(0)  # gloo's threads may outlive their group: a normal exit aborts now and then


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
