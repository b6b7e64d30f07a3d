"""The processes of the tests that need several."""

import contextlib
import datetime
import importlib
import json
import os
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextlib.contextmanager
def one_of(rank, file, ranks=2, seconds=600):
    """The body of a process that torch.multiprocessing.spawn has started: a group of `ranks` over
    gloo, whose collectives wait `seconds` for each other. The process ends after it."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    store = {"init_method": f"file://{file}", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=timeout, **store)
    yield
    dist.barrier()
    dist.destroy_process_group()
    # A normal exit aborts now and then: gloo's threads may outlive their group.
    os._exit(0)


def run_named(rank, ranks, folder, module, names):
    """The body of one of `ranks` processes: runs the functions `names` of the dict CASES[ranks] in
    `module`. A function gets a Ranks and returns the failures that it noted. An exception ends the
    process, because the ranks' collectives may no longer be the same; the others then end too,
    with an exception of the group."""
    for name in ("FLCE_MAX_MEMORY", "FLCE_CHECK"):
        os.environ.pop(name, None)
    os.environ["FLCE_TUNE_FILE"] = ""
    report, stopped, seconds = {}, None, {}
    with one_of(rank, folder / "store", ranks, seconds=20):
        functions = importlib.import_module(module).CASES[ranks]
        for name in names:
            begin = time.perf_counter()
            try:
                report[name] = functions[name]()
            except BaseException:
                stopped = [name, traceback.format_exc(limit=-3)]
                break
            finally:
                seconds[name] = time.perf_counter() - begin
        made = {"report": report, "stopped": stopped, "seconds": seconds}
        (folder / f"rank{rank}").write_text(json.dumps(made))
        with contextlib.suppress(RuntimeError):  # of the group, where a rank has stopped
            dist.barrier()
        os._exit(0)


def failures_of(ranks, folder, module, names):
    """{name: text of its failures, empty if there are none} of CASES[ranks] in `module`, run by
    `ranks` processes."""
    mp.spawn(run_named, (ranks, folder, module, names), ranks)
    made = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(ranks)]
    found = {}
    for name in names:
        texts = []
        for rank, own in enumerate(made):
            texts += [f"rank {rank}: {text}" for text in own["report"].get(name, ())]
            if own["stopped"] and own["stopped"][0] == name:
                texts.append(f"rank {rank} stopped: {own['stopped'][1]}")
        if not texts and any(name not in own["report"] for own in made):
            texts = ["did not run: a rank stopped before"]
        found[name] = "\n".join(texts)
    return found
