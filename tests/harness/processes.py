"""The processes of the tests that need several. They are started once in a run of pytest, and are
forks of a process that has imported torch, because its import takes as long as hundreds of calls;
each case gets a process group of its own in them. What a case raises, or that it hangs, ends that
case alone, on all its ranks."""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import itertools
import os
import sys
import traceback
import warnings
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Seconds after which a hang ends, in a collective and in a case: no case is expected to take nearly
# as long, however busy the machine is. Once a rank has failed the others have AFTER_FAILURE.
IN_COLLECTIVE, IN_CASE, AFTER_FAILURE = 600, 1800, 30
# Modules that the process from which all are forked imports, of the packages that this process has
# imported. The last ones are for examples/finetune_hf.py too: there is one such process in a run.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo"]
PRELOADED += ["peft", "transformers.trainer", "transformers.models.llama.modeling_llama"]
_numbers = itertools.count()  # of the cases: their groups' prefixes in the store


def on_ranks(ranks, fresh=False):
    """Makes a test of a function that `ranks` processes run, in a group over gloo. `fresh`: in
    processes of its own, for what leaves traces in a process or finds those of others."""

    def decorate(function):
        @functools.wraps(function)
        def test(**arguments):
            run_on_ranks(ranks, function, fresh=fresh, **arguments)

        return test

    return decorate


def run_on_ranks(ranks, function, /, *, fresh=False, backend="gloo", variables=(), **arguments):
    """Runs function(**arguments), of a module's top level, in a group of `ranks` processes, and
    fails as it does. `variables` of the environment are set before the group is made, whose
    threads may read them."""
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    processes = Processes() if fresh else _shared()
    try:
        case = function.__module__, function.__name__, arguments
        texts = processes.run(ranks, backend, dict(variables), *case)
    finally:
        if fresh:
            processes.stop()
    if texts:
        pytest.fail("\n".join(texts), pytrace=False)


class Processes:
    """Processes that wait for cases: the first ones are the ranks of a case."""

    def __init__(self):
        self.started, seconds = [], datetime.timedelta(seconds=IN_COLLECTIVE)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, seconds, wait_for_workers=False)

    def start(self):
        context = mp.get_context("forkserver")
        there = [name for name in PRELOADED if name.split(".")[0] in sys.modules]
        context.set_forkserver_preload(there)
        own, other = context.Pipe()
        arguments = len(self.started), self.store.port, other
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        other.close()
        self.started.append((process, own))

    def stop(self):
        for process, connection in self.started:
            process.kill()
            process.join()
            connection.close()
        self.started = []

    def run(self, ranks, *case):
        """The texts of the failures. `case`: backend, environment variables, and of the function
        module, name and arguments. Each rank sends a text, "" if nothing failed, and then None when
        its group is gone."""
        if any(process.exitcode is not None for process, _ in self.started):
            self.stop()
        while len(self.started) < ranks:
            self.start()
        number, waiting = next(_numbers), {}
        for rank, (process, connection) in enumerate(self.started[:ranks]):
            connection.send((number, ranks, *case))
            waiting[connection] = rank, process
        texts, seconds = {}, IN_CASE
        while waiting and (ready := wait(list(waiting), seconds)):
            for connection in ready:
                rank, process = waiting[connection]
                try:
                    text = connection.recv()
                except EOFError:
                    process.join()
                    text = f"the process ended with exit code {process.exitcode}"
                if text is None or process.exitcode is not None:
                    del waiting[connection]
                if text:
                    texts.setdefault(rank, text)
                    seconds = AFTER_FAILURE
        for rank, _ in waiting.values():
            texts.setdefault(rank, f"not ended after {seconds} s")
        if waiting:
            self.stop()
        own = {rank: text for rank, text in texts.items() if text != OTHER_FAILED} or texts
        return [f"rank {rank}: {text}" for rank, text in sorted(own.items())]


_shared = functools.cache(Processes)
OTHER_FAILED = "the barrier after the case failed"


def serve(rank, port, connection):
    faulthandler.enable()  # a process that a signal ends prints its stacks
    torch.set_num_threads(1)
    seconds = datetime.timedelta(seconds=IN_COLLECTIVE)
    store = dist.TCPStore("127.0.0.1", port, None, False, seconds)
    with contextlib.suppress(EOFError):  # pytest has ended
        while True:
            number, ranks, backend, variables, *case = connection.recv()
            named = {"rank": rank, "world_size": ranks, "timeout": seconds}
            prefix = dist.PrefixStore(f"case {number}", store)
            join = functools.partial(dist.init_process_group, backend, store=prefix, **named)
            text = text_of(join, variables, *case)
            connection.send(text)
            if text:  # without its groups the collectives fail in which others wait for this rank
                gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            connection.send(None)
    os._exit(0)  # a normal exit aborts now and then: gloo's threads may outlive their group


@contextlib.contextmanager
def environment(variables):
    """Sets variables of the environment, and in the end restores those that differ from before. It
    writes no others, while mock.patch.dict would write all: NCCL's threads may read them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before:
            del os.environ[name]
        os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})


def text_of(join, variables, module, name, arguments):
    """What fails in a case; "" if nothing does."""
    try:
        function = getattr(importlib.import_module(module), name)
        with environment(variables), warnings.catch_warnings():
            torch.manual_seed(0)
            join()
            getattr(function, "__wrapped__", function)(**arguments)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
    except BaseException:
        return traceback.format_exc(limit=-4)
    try:
        dist.barrier()
    except RuntimeError:
        return OTHER_FAILED
    return ""
