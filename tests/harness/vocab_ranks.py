"""The ranks of a sharded vocabulary: a case's operands on each, and their results against those of
one process."""

import functools
import importlib

import pytest
import torch
import torch.distributed as dist

import flce
from harness import cases
from harness.drawn_options import called
from harness.processes import run_on_ranks

# Outputs of the whole vocabulary; every rank gets them.
OUTPUTS = ("loss", *flce.LinearCrossEntropyOutput._fields[1:6])
SHARDED = ("linear_weight", "linear_bias", "adapter_weight")
RETURNS = {f"return_{name}": True for name in OUTPUTS[1:]}


def on(*worlds):
    """Makes a test of a function of a Ranks, in groups of these sizes."""

    def decorate(function):
        @pytest.mark.parametrize("ranks", worlds, ids=lambda world: f"of{world}")
        @functools.wraps(function)
        def test(ranks, **given):
            names = {"module": function.__module__, "name": function.__name__}
            run_on_ranks(ranks, call, **names, given=given)

        return test

    return decorate


def call(module, name, given):
    own = Ranks()
    getattr(importlib.import_module(module), name).__wrapped__(own, **given)
    assert not own.failures, "\n".join(own.failures)


def chunk_ends(vocab, ranks):
    """Where the ranks' classes end, as torch.chunk divides them."""
    share = -(-vocab // ranks)
    return [min((rank + 1) * share, vocab) for rank in range(ranks)]


def same_bytes(left, right):
    left, right = (tensor.detach().contiguous().reshape(-1) for tensor in (left, right))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


class Ranks:
    """The members of a group, one of which is this process. What does not agree is noted and not
    raised: the collectives of the ranks then remain the same."""

    def __init__(self, group=None):
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.failures = []

    def note(self, holds, text):
        if not holds:
            self.failures.append(text)

    def agree(self, name, got, expected, tolerance=1e-12):
        """Notes a difference relative to the norm of `expected`."""
        self.note(got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}")
        if got.shape == expected.shape:
            error = cases.relative_error(got.detach(), expected.detach().double())
            self.note(error <= tolerance, f"{name}: error {error:.2e} > {tolerance:.0e}")

    def gathered(self, item):
        items = [None] * self.ranks
        dist.all_gather_object(items, item, group=self.group)
        return items

    def note_same_bytes(self, name, tensor):
        for rank, other in enumerate(self.gathered(tensor.detach())):
            self.note(same_bytes(tensor, other), f"{name}: other bytes on rank {rank}")

    def parallel(self, vocab=None, ends=None, **options):
        """The VocabParallel of this rank: the classes of rank r end at ends[r], or are divided as
        torch.chunk does."""
        if ends is not None:
            options["start"] = ends[self.rank - 1] if self.rank else 0
        return flce.VocabParallel(self.group, vocab=vocab, **options)

    def classes(self, vocab, ends=None):
        ends = ends or chunk_ends(vocab, self.ranks)
        return slice(ends[self.rank - 1] if self.rank else 0, ends[self.rank])

    def rows(self, tensor):
        """This rank's share along the first dimension, as sequence=True takes it."""
        share = tensor.shape[0] // self.ranks
        return tensor[self.rank * share : (self.rank + 1) * share]

    def divided(self, case, ends=None, sequence=False):
        classes = self.classes(case.linear_weight.shape[0], ends)
        options = dict(case.options)
        for name in SHARDED:
            if options.get(name) is not None:
                options[name] = options[name][classes]
        x = self.rows(case.input) if sequence else case.input
        return cases.Case(x, case.linear_weight[classes], case.target, options)

    def compare(
        self, case, *, ends=None, vocab_parallel=None, wants=cases.GRADIENTS,
        upstream=None, cancels=False, plan=None, **knobs,
    ):  # fmt: skip
        """Notes where the results differ from the definition's and from those of one process.
        Returns this rank's results. `plan`: of test_properties.py, for autocast."""
        how = dict(vocab_parallel or {})
        sequence, reduces = how.get("sequence", False), how.get("reduce_input_grad", True)
        vocab_parallel = self.parallel(how.pop("vocab", case.linear_weight.shape[0]), ends, **how)
        own = self.divided(case, ends, sequence)
        call = {"wants": wants, "upstream": upstream, **knobs}
        plan = plan or {"autocast": False}
        made = called(own, plan, vocab_parallel=vocab_parallel, **call)
        parts = self.gathered(made)
        results = self._joined(parts, sequence, reduces, case.dtype)
        if self.rank > 0:
            return made
        dtypes = {"logits_dtype": knobs.get("logits_dtype")}
        definition = case.with_options(**{n: knobs[n] for n in RETURNS if n in knobs})
        # Rows of padding may be NaN, and the tolerance is relative to the longest row.
        definition.linear_weight = case.linear_weight.nan_to_num()
        upstream = {"loss": None} if upstream is None else upstream
        named = {"wants": wants, "upstream": upstream, "cancels": cancels}
        try:
            cases.Yardstick(definition, **named, **dtypes).check(results)
        except AssertionError as error:
            self.failures.append(f"against the definition: {error}")
        if case.dtype == torch.float64:
            one = cases.outcome(flce.linear_cross_entropy, case, **call)
            for name, value in one.items():
                self.agree(f"{name} of one process", results[name], value, 1e-11)
        return made

    def _joined(self, parts, sequence, reduces, dtype):
        """The results of one process from those of the ranks, with the notes about their bytes."""
        first = parts[0]
        results = dict(first)
        summed = () if sequence or not reduces else ("input",)
        for name in (*OUTPUTS, *summed):
            for rank, other in enumerate(parts):
                if name in first and not same_bytes(first[name], other[name]):
                    self.failures.append(f"{name}: other bytes on rank {rank}")
        for name in ("linear_weight", "linear_bias"):
            if name in first:
                results[name] = torch.cat([part[name] for part in parts])
        if "input" in first and sequence:
            results["input"] = torch.cat([part["input"] for part in parts])
        elif "input" in first and not reduces:
            results["input"] = sum(part["input"].double() for part in parts).to(dtype)
        return results
