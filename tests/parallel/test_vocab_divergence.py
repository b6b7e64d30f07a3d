"""flce.linear_divergence with a sharded vocabulary. On ranks over gloo."""

import random

import pytest
import torch

import flce
from harness import cases
from harness.divergences import KINDS, definition, draw, outcome
from harness.vocab_case import TOKENS, UNEVEN, VOCAB, make, named_of, teacher_of
from harness.vocab_ranks import on


@on(2, 4)
@pytest.mark.parametrize("part", range(4))
def test_drawn(ranks, part):
    """A whole teacher on each rank, a shard of it, its logits or a shard of these; any shards; x
    sharded by tokens."""
    for seed in range(16 * part, 16 * part + 16):
        pick, (named, options) = random.Random(seed), draw(seed, "cpu")
        truth, vocab = outcome(definition, named, options), len(named["linear_weight"])
        ends = [*sorted(pick.randint(0, vocab) for _ in range(ranks.ranks - 1)), vocab]
        classes, spreads = ranks.classes(vocab, ends), pick.random() < 0.5
        for name in ("teacher_weight", "teacher_bias", "teacher_logits") if spreads else ():
            if options.get(name) is not None:
                at = (..., classes) if name == "teacher_logits" else classes
                options[name] = options[name][at]
        own = {n: t if n == "input" else t[classes] for n, t in named.items()}
        is_even = named["input"].shape[0] % ranks.ranks == 0
        sequence = is_even and "target" in options and pick.random() < 0.7
        if sequence:
            own["input"], truth["input"] = ranks.rows(own["input"]), ranks.rows(truth["input"])
            if "teacher_input" in options:
                options["teacher_input"] = ranks.rows(options["teacher_input"])
        options["vocab_parallel"] = ranks.parallel(vocab, ends, sequence=sequence)
        made = outcome(flce.linear_divergence, own, options)
        ranks.note_same_bytes(f"{seed}: loss", made["loss"])
        for name, got in made.items():
            true = truth[name] if name in ("loss", "input") else truth[name][classes]
            size = max(truth[name].abs().max().item(), 1e-3) if truth[name].numel() else 1.0
            error = (got - true).abs().max().item() if got.numel() else 0.0
            ranks.note(error <= 1e-9 * size, f"{seed}: {name}: {error} of {size}")


def compare(ranks, case, teacher, ends=None, bars=(1e-5, 1e-3), **options):
    """Notes where the results differ from those of one process."""
    own, classes = ranks.divided(case, ends), ranks.classes(VOCAB, ends)
    for kind in KINDS:
        given = {"divergence": kind, "reduction": "sum", "target": case.target, **teacher}
        one = outcome(flce.linear_divergence, named_of(case), given)
        given |= {"vocab_parallel": ranks.parallel(VOCAB, ends), **options}
        made = outcome(flce.linear_divergence, named_of(own), given)
        for name, bar in (("loss", bars[0]), ("input", bars[1]), ("linear_weight", bars[1])):
            true = one[name][classes] if name == "linear_weight" else one[name]
            ranks.agree(f"{name} {kind}", made[name], true, bar)


@on(2)
def test_divergence_near_its_teacher(ranks):
    """In float32, with rounded statistics exchanged."""
    case = make(torch.float32, std=0.5)
    logits = case.input @ case.linear_weight.T + case.options["linear_bias"]
    noise = 1e-3 * torch.randn(TOKENS, VOCAB, generator=cases.generator(4))
    compare(ranks, case, {"teacher_logits": logits + noise}, bars=(1e-3, 1e-3))


@on(2, 4)
def test_sampled_divergences(ranks):
    """Each rank draws from its own classes; with so small an eps the sum is near the exact one."""
    drawn = {"gradient": "sampled", "gradient_eps": 2**-12, "gradient_seed": 1}
    ends = UNEVEN if ranks.ranks == 4 else None
    case = make(torch.float32)
    compare(ranks, case, teacher_of(case.dtype), ends, (1e-5, 0.05), **drawn)


@on(2)
def test_divergence_of_dtensors(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, case = init_device_mesh("cpu", (2,)), make()
    named, head = named_of(case), teacher_of(case.dtype)
    call = {"divergence": "jsd", "target": case.target}
    truth = outcome(flce.linear_divergence, named, {**call, **head})

    def shared(tensors):
        return {
            n: distribute_tensor(t, mesh, [Replicate() if n.endswith("input") else Shard(0)])
            for n, t in tensors.items()
        }

    for given in (head, shared(head)):
        made = outcome(flce.linear_divergence, shared(named), {**call, **given})
        ranks.agree("loss", made.pop("loss"), truth["loss"], 1e-11)
        for name, got in made.items():
            ranks.agree(name, got.full_tensor(), truth[name], 1e-10)
