"""Ways to call a sharded vocabulary: adapters, accumulation, torch.compile, checkpoints, Modules,
operators, refusals. On ranks over gloo."""

import copy
import functools
import io
import itertools
import pickle
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_utils import CrossRefFakeMode, MetadataMismatchError
from torch.utils.checkpoint import checkpoint

import flce
from flce import reference
from flce.distributed import parallel
from harness import cases
from harness.vocab_case import HIDDEN, ROW, TOKENS, UNEVEN, VOCAB, class_weights, make
from harness.vocab_exchanges import COMPARED, comparisons, exchanges, raised
from harness.vocab_ranks import RETURNS, Ranks, on, same_bytes

# ---- options with tensors of their own ----


@on(2, 4)
def test_float32_terms(ranks):
    """The error of dX is that of one rounding to bfloat16, not of two."""
    generator = cases.generator(3)
    x = torch.randn(96, 64, generator=generator).bfloat16()
    # Logits near 1: dX is then mostly the target's row of W, and what E is rounded by averages out.
    w = torch.randn(256, 64, generator=generator).div(8).bfloat16()
    y = torch.randint(256, (96,), generator=generator)
    expected = x.double().requires_grad_()
    F.cross_entropy(expected @ w.double().T, y).backward()
    rows, errors = ranks.classes(256), {}
    for sequence in (False, True):
        for dtype in (None, torch.float32):
            own = (ranks.rows(x) if sequence else x).detach().requires_grad_()
            vp = ranks.parallel(reduce_dtype=dtype, sequence=sequence)
            flce.linear_cross_entropy(own, w[rows], y, vocab_parallel=vp).backward()
            whole = ranks.rows(expected.grad) if sequence else expected.grad
            errors[dtype] = float((own.grad.double() - whole).norm() / whole.norm())
        rounded = float((whole.bfloat16().double() - whole).norm() / whole.norm())
        narrow, wide = errors.values()
        ranks.note(wide < 1.1 * rounded, f"error {wide}, of one rounding {rounded}")
        ranks.note(narrow > 1.2 * rounded, f"bfloat16 terms have the error {narrow}")
    vp = ranks.parallel(reduce_dtype=torch.float32)
    double = [x.double().requires_grad_(), w[rows].double(), y]
    raised(
        ranks, "reduce_dtype", ValueError,
        lambda: flce.linear_cross_entropy(*double, vocab_parallel=vp),
    )  # fmt: skip


# ---- what torch does with a call ----


def leaves_of(case):
    named = {"x": case.input, "w": case.linear_weight, "linear_bias": case.options["linear_bias"]}
    return {name: value.clone().requires_grad_() for name, value in named.items()}


def loss_and_gradients(call, case):
    leaves = leaves_of(case)
    loss = call(leaves["x"], leaves["w"], case.target, leaves["linear_bias"])
    grads = torch.autograd.grad(loss.square(), list(leaves.values()))
    return [loss.detach(), *grads]


@on(2)
def test_fake_outputs(ranks):
    """The forward's outputs have the shapes, dtypes and strides that torch.compile assumes."""
    # The comparison of ranges in a group's first call has no fake in torch 2.10.
    cases.outcome(
        flce.linear_cross_entropy, ranks.divided(make()), vocab_parallel=ranks.parallel(VOCAB)
    )
    for sequence, valid_vocab, save in itertools.product((False, True), (None, 30, 9), cases.SAVES):
        own = ranks.divided(make(valid_vocab=valid_vocab), sequence=sequence)
        options = {"vocab_parallel": ranks.parallel(VOCAB, sequence=sequence), "save": save}
        x = own.input.clone().requires_grad_()
        try:
            with CrossRefFakeMode():
                flce.linear_cross_entropy(
                    x, own.linear_weight, own.target, **own.options, **options, **RETURNS
                )
        except MetadataMismatchError as error:
            ranks.note(False, f"{sequence} {valid_vocab} {save}: {error}")


@on(2)
def test_checkpoints_and_second_backwards(ranks):
    case, vp = ranks.divided(make()), ranks.parallel(VOCAB)
    for save in (*cases.SAVES, "auto"):

        def call(x, w, y, b, save=save):
            return flce.linear_cross_entropy(x, w, y, linear_bias=b, vocab_parallel=vp, save=save)

        expected = loss_and_gradients(call, case)
        x, w, b = leaves_of(case).values()
        loss = call(x, w, case.target, b).square()
        for keeps in (True, False):  # the graph, for a second backward
            grads = torch.autograd.grad(loss, (x, w, b), retain_graph=keeps)
            for got, true in zip(grads, expected[1:], strict=True):
                ranks.note(same_bytes(got, true), f"{save}, the graph kept: {keeps}")
        for reentrant in (False, True):
            leaves = leaves_of(case)
            x, w, b = leaves.values()
            loss = checkpoint(call, x, w, case.target, b, use_reentrant=reentrant)
            loss.square().backward()
            for got, true in zip([loss.detach(), x.grad, w.grad, b.grad], expected, strict=True):
                ranks.note(same_bytes(got, true), f"{save} {reentrant}")


@on(4)
def test_modules(ranks):
    """A copy and a pickle of a head call the same group; where none has its name they raise."""
    for ends in (None, UNEVEN):
        case = make(weight=True, valid_vocab=30)
        own, vp = ranks.divided(case, ends), ranks.parallel(VOCAB, ends)
        options = {"valid_vocab": 30, "vocab_parallel": vp, "dtype": torch.float64}
        size = HIDDEN, len(own.linear_weight)
        weight = case.options["weight"]
        head = flce.LinearCrossEntropyHead(*size, class_weight=weight, **options)
        module = flce.LinearCrossEntropyLoss(*size, bias=True, weight=weight, **options)
        state = {"weight": own.linear_weight, "bias": own.options["linear_bias"]}
        expected = cases.outcome(reference.linear_cross_entropy, case)["loss"]
        for one, linear in ((head, head), (module, module.linear)):
            linear.load_state_dict(state, strict=True)
            loss = one(case.input, case.target)
            ranks.agree(f"loss of {type(one)}", loss, expected)
            ranks.note(f"vocab_parallel={vp!r}" in repr(one), repr(one))
        for what, error, wrong in (
            ("class_weight: expected shape (41,)", ValueError, {"class_weight": weight[:5]}),
            ("valid_vocab: expected an int from 1 to 41", ValueError, {"valid_vocab": 42}),
            ("vocab_parallel: expected a flce.VocabP", TypeError, {"vocab_parallel": ranks.group}),
        ):
            wrong = {**options, **wrong}
            made = functools.partial(flce.LinearCrossEntropyHead, *size, **wrong)
            raised(ranks, what, error, made)
        kept = io.BytesIO()
        torch.save(head, kept)
        kept.seek(0)
        copies = copy.deepcopy(head), pickle.loads(pickle.dumps(head))
        for other in (*copies, torch.load(kept, weights_only=False)):
            ranks.note(other.vocab_parallel == vp, "a copy's vocab_parallel")
            ranks.note(same_bytes(other(case.input, case.target), loss), "a copy's loss")
    expected = f"VocabParallel(group '{dist.group.WORLD.group_name}', rank {ranks.rank} of 4, "
    expected += "start=None, vocab=41, sequence=False, reduce_input_grad=True, reduce_dtype=None)"
    ranks.note(repr(ranks.parallel(VOCAB)) == expected, repr(ranks.parallel(VOCAB)))
    other = pickle.loads(pickle.dumps(ranks.parallel(VOCAB)))
    ranks.note(hash(other) == hash(ranks.parallel(VOCAB)), "the hash of an equal VocabParallel")
    ranks.note(other != ranks.parallel(VOCAB, sequence=True), "an unequal VocabParallel")
    other.shard = other.shard._replace(group="no such group")
    which = "vocab_parallel: expected a group of this process"
    refused(ranks, which, ValueError, ranks.divided(make()), vocab_parallel=other)
    sent = [ranks.parallel(VOCAB)]
    dist.broadcast_object_list(sent, src=0)
    if ranks.rank > 0:
        which = f"vocab_parallel: expected that of rank {ranks.rank} of 4"
        refused(ranks, which, ValueError, ranks.divided(make()), vocab_parallel=sent[0])


@on(4)
def test_ranges_of_classes(ranks):
    """A group's first call compares them."""
    own, group, first = ranks.divided(make()), dist.new_group(), 11 * ranks.rank
    which = "linear_weight: expected as many rows"
    refused(ranks, which, ValueError, own, 1, vocab_parallel=flce.VocabParallel(group))
    which = "vocab_parallel: expected ranges that hold each of"
    # Overlaps; a class without a rank at the beginning, between two ranks and at the end.
    changes = (2, 21, 41), (3, 25, 33), (0, 1, 42), (3, 34, 42), (3, 33, 44)
    for rank, start, vocab in changes:
        vp = flce.VocabParallel(group, start if ranks.rank == rank else first, vocab)
        refused(ranks, which, ValueError, own, 1, vocab_parallel=vp)
    which = "vocab_parallel: expected the same vocab on all ranks, and start on all or on none"
    for given in ((None, None), (None, VOCAB), (first, VOCAB + 1)):
        vp = flce.VocabParallel(group, *(given if ranks.rank == 0 else (first, VOCAB)))
        refused(ranks, which, ValueError, own, 1, vocab_parallel=vp)
    # Rows that do not fit on one rank are refused on all.
    fewer = cases.Case(own.input, own.linear_weight[:-1], own.target, {})
    empty = cases.Case(own.input, own.linear_weight[:0], own.target, {})
    whole = cases.Case(own.input, own.linear_weight, own.target, {})
    for rank, given, changed, which in (
        (1, (None, VOCAB), fewer, "linear_weight: expected 11 rows on rank 1 of 4"),
        (0, (None, VOCAB), empty, "linear_weight: expected 11 rows on rank 0 of 4"),
        (2, (None, None), empty, "linear_weight: expected as many rows on all ranks"),
        (3, (VOCAB - 7, VOCAB), whole, "linear_weight: expected at most 7 rows"),
    ):
        mine = ranks.rank == rank
        start = given[0] if mine or given[0] is None else first
        vp = flce.VocabParallel(group, start, given[1])
        refused(ranks, which, ValueError, changed if mine else whole, 1, vocab_parallel=vp)
    which = "linear_weight: expected at least one row"
    refused(ranks, which, ValueError, empty, 1, vocab_parallel=flce.VocabParallel(group))
    vp = flce.VocabParallel(group, first, VOCAB)
    with exchanges() as begun:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(one) for one in (own.input, own.linear_weight, own.target)]
            made = flce.linear_cross_entropy(*fakes, vocab_parallel=vp)
        again = flce.linear_cross_entropy(*fakes, vocab_parallel=vp)
    ranks.note(made.shape == again.shape == (), "a call with fake tensors")
    ranks.note(not begun, "fake tensors are compared")
    for compared in (1, 0):
        with exchanges() as begun:
            made = cases.outcome(flce.linear_cross_entropy, own, vocab_parallel=vp)
        ranks.note(made["loss"].isfinite(), "a call after those refused")
        ranks.note(comparisons(begun) == compared, f"{comparisons(begun)} comparisons")


@on(2)
def test_a_compiled_first_call(ranks):
    """Ranges are not compared after it: one rank alone may fall back to eager calls."""
    own, vp = ranks.divided(make()), flce.VocabParallel(dist.new_group(), vocab=VOCAB)
    call = torch.compile(flce.linear_cross_entropy, backend="aot_eager")
    for function in (call, flce.linear_cross_entropy):
        with exchanges() as begun:
            function(own.input, own.linear_weight, own.target, vocab_parallel=vp)
        ranks.note(begun and not comparisons(begun), f"a comparison: {begun}")


@on(4)
def test_other_meshes(ranks):
    """Ranks in another order than their group's, and a mesh without this rank."""
    mesh = dist.DeviceMesh("cpu", [0, 2, 1, 3])
    which = "group: expected a DeviceMesh with the ranks [0, 1, 2, 3]"
    raised(ranks, which, ValueError, lambda: flce.VocabParallel(mesh))
    pair = dist.DeviceMesh("cpu", [0, 1])
    if ranks.rank < 2:
        flce.VocabParallel(pair)
    else:
        which = "group: expected a DeviceMesh that this rank belongs to"
        raised(ranks, which, ValueError, lambda: flce.VocabParallel(pair))


@on(2)
def test_a_group_without_others(ranks):
    """torch's "fake" backend, for dry runs of one rank, has no other ranks to compare with."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    group, own = dist.new_group(backend="fake"), ranks.divided(make())
    vp = flce.VocabParallel(group, 21 * ranks.rank, VOCAB)
    made = cases.outcome(flce.linear_cross_entropy, own, vocab_parallel=vp)
    ranks.note(made["linear_weight"].shape == own.linear_weight.shape, "the gradient's shape")


@on(2)
def test_operators(ranks):
    case, vp = ranks.divided(make()), ranks.parallel(VOCAB)
    x, w, b = leaves_of(case).values()
    wants = {"topk": 2, "return_tail_lse": True, **RETURNS}
    options = {"linear_bias": b, "vocab_parallel": vp, **wants}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        made = flce.linear_cross_entropy(x, w, case.target, **options)
    expected = torch.autograd.grad(made.loss, (x, w, b))
    shard = list(vp.shard.integers().values())
    arguments = {"linear_bias": b, "vocab_group": vp.group, "vocab_shard": shard}
    operator = torch.ops.flce.linear_cross_entropy
    loss = operator(x, w, case.target, **arguments)
    outputs = torch.ops.flce.linear_cross_entropy_outputs(x, w, case.target, **arguments, **wants)
    for name, got, true in zip(made._fields, outputs, made, strict=True):
        ranks.note(same_bytes(got, true), f"{name} of the operator")
    for result in (loss, outputs[0]):
        ranks.note(same_bytes(result, made.loss), "the operator's loss")
        for got, true in zip(torch.autograd.grad(result, (x, w, b)), expected, strict=True):
            ranks.agree("a gradient of the operator", got, true)


@on(2)
def test_a_device_mesh_and_a_group_of_one(ranks):
    mesh = dist.init_device_mesh("cpu", (2,))
    case = make(weight=True, label_smoothing=0.1)
    own = cases.outcome(
        flce.linear_cross_entropy, ranks.divided(case), vocab_parallel=ranks.parallel(VOCAB)
    )
    vp = flce.VocabParallel(mesh, vocab=VOCAB)
    made = cases.outcome(flce.linear_cross_entropy, ranks.divided(case), vocab_parallel=vp)
    ranks.note(cases.same_bits(made, own), "a DeviceMesh gives other results")
    alone = [dist.new_group([rank]) for rank in range(2)][ranks.rank]
    plain = cases.outcome(flce.linear_cross_entropy, case)
    for options in ({}, {"vocab": VOCAB}, {"vocab": VOCAB, "start": 0}, {"sequence": True}):
        vp = flce.VocabParallel(alone, **options)
        made = cases.outcome(flce.linear_cross_entropy, case, vocab_parallel=vp)
        ranks.note(cases.same_bits(made, plain), f"a group of one rank, {options}")
    for options in ({"vocab": VOCAB + 1}, {"vocab": VOCAB + 2, "start": 2}):
        vp = flce.VocabParallel(alone, **options)
        refused(ranks, "linear_weight", ValueError, case, vocab_parallel=vp)


# ---- refusals ----


def refused(ranks, what, error, case, compared=0, **options):
    """`compared`: how many times the ranks compare something before. Nothing else is exchanged."""
    leaf, options = case.input.clone().requires_grad_(), {**case.options, **options}
    with exchanges() as begun:
        raised(
            ranks, what, error,
            lambda: flce.linear_cross_entropy(leaf, case.linear_weight, case.target, **options),
        )  # fmt: skip
    ranks.note(comparisons(begun) == compared, f"{what}: {comparisons(begun)} comparisons")
    ranks.note(all(one.name == COMPARED for one in begun), f"{what}: {begun}")


@on(2, 4)
def test_refused_calls(ranks):
    """Before anything is exchanged, but the class ranges in a group's first call."""
    case, group = make(weight=True), dist.new_group()
    own, vp = ranks.divided(case), flce.VocabParallel(group, vocab=VOCAB)
    share = len(own.linear_weight)
    good = cases.Case(own.input, own.linear_weight, own.target, {**own.options, "weight": None})
    cases.outcome(flce.linear_cross_entropy, good, vocab_parallel=vp)

    def refuse(what, error, changed=own, vocab_parallel=vp, **options):
        refused(ranks, what, error, changed, vocab_parallel=vocab_parallel, **options)

    probabilities = torch.rand(TOKENS, VOCAB).double()
    refuse("target", ValueError, cases.Case(own.input, own.linear_weight, probabilities))
    refuse("target", ValueError, cases.Case(own.input, own.linear_weight, probabilities[:, :share]))
    refuse("linear_weight: expected", ValueError, case)  # all classes on each rank
    for start in (VOCAB, VOCAB - share + 1):
        beyond = flce.VocabParallel(group, start=start, vocab=VOCAB)
        refuse("linear_weight: expected at most", ValueError, vocab_parallel=beyond)
    refuse("linear_bias", ValueError, linear_bias=case.options["linear_bias"])
    refuse("weight", ValueError, weight=class_weights()[1:])
    refuse("weight", ValueError, weight=own.options["weight"].clone().requires_grad_())
    refuse("weight", ValueError, weight=class_weights()[:share])
    refuse("weight", TypeError, weight=[1.0] * VOCAB)
    refuse("vocab_parallel", TypeError, vocab_parallel=3)
    refuse("vocab_parallel", TypeError, vocab_parallel=[vp])
    refuse("vocab_parallel", TypeError, vocab_parallel=dist.group.WORLD)
    refuse("vocab_parallel", TypeError, vocab_parallel="0")
    refuse("valid_vocab", ValueError, valid_vocab=VOCAB + 1)
    refuse("gradient", ValueError, gradient="sampled")
    refuse("max_memory", ValueError, good, max_memory=1)
    for target in (VOCAB, VOCAB + 3, -1, -(2**40)):
        bad = own.target.clone()
        bad[3] = target
        bad = cases.Case(own.input, own.linear_weight, bad, good.options)
        refuse(f"target[3] is {target}", IndexError, bad)
        refuse(f"target[3] is {target}", IndexError, bad, save="grads", max_memory=4 * ROW)
    bad = own.target.clamp(max=29)
    bad[3] = 30
    bad = cases.Case(own.input, own.linear_weight, bad, good.options)
    refuse("target[3] is 30", IndexError, bad, valid_vocab=30)
    raised(
        ranks, "cross_entropy()", TypeError,
        lambda: flce.cross_entropy(torch.rand(3, VOCAB), own.target[:3], vocab_parallel=vp),
    )  # fmt: skip
    # The group is as before.
    ranks.note(ranks.gathered(ranks.rank) == list(range(ranks.ranks)), "the order of exchanges")
    ranks.compare(case)


@on(2)
def test_refused_sequences(ranks):
    vp = ranks.parallel(VOCAB, sequence=True)
    own = ranks.divided(make())

    def refuse(rows, tokens, **options):
        case = cases.Case(own.input[:rows], own.linear_weight, own.target[:tokens], own.options)
        refused(ranks, "target", ValueError, case, vocab_parallel=vp, **options)

    ranks.compare(make(), vocab_parallel={"sequence": True})  # its first call compares ranges
    refuse(10, 21)
    refuse(11, 21)
    refuse(11, 11)  # this rank's share of the target
    vector = cases.Case(own.input[0], own.linear_weight, own.target[0], own.options)
    refused(ranks, "target", ValueError, vector, vocab_parallel=vp)
    target = own.target.clone()
    target[20] = VOCAB
    bad = cases.Case(ranks.rows(own.input), own.linear_weight, target, own.options)
    refused(ranks, "target[20] is 41", IndexError, bad, vocab_parallel=vp)
    ranks.compare(make(), vocab_parallel={"sequence": True})


@on(2)
def test_refused_groups(ranks):
    world, flag, wide = dist.group.WORLD, "sequence", {"reduce_dtype": torch.float32}
    others = [dist.new_group([rank]) for rank in range(2)][1 - ranks.rank]
    plane = dist.init_device_mesh("cpu", (2, 1))
    for what, error, group, options in (
        ("group", ValueError, others, {}),
        ("group", ValueError, plane, {}),
        ("group", TypeError, None, {}),
        ("group", TypeError, "0", {}),
        ("group", TypeError, 0, {}),
        ("vocab", ValueError, world, {"start": 0}),
        ("vocab", ValueError, world, {"vocab": 0}),
        ("vocab", TypeError, world, {"vocab": 41.0}),
        ("start", ValueError, world, {"start": -1, "vocab": VOCAB}),
        ("start", ValueError, world, {"start": VOCAB + 1, "vocab": VOCAB}),
        ("start", TypeError, world, {"start": True, "vocab": VOCAB}),
        (flag, TypeError, world, {flag: 1}),
        ("reduce_input_grad", TypeError, world, {"reduce_input_grad": None}),
        ("reduce_input_grad", ValueError, world, {flag: True, "reduce_input_grad": False}),
        ("reduce_dtype", ValueError, world, {"reduce_dtype": torch.bfloat16}),
        ("reduce_dtype", ValueError, world, {"reduce_dtype": "float32"}),
        ("reduce_dtype", ValueError, world, {**wide, "reduce_input_grad": False}),
    ):
        raised(
            ranks, what, error,
            lambda group=group, options=options: flce.VocabParallel(group, **options),
        )  # fmt: skip
    ranks.note(Ranks().gathered(1) == [1, 1], "the order of exchanges")


def test_a_rank_without_classes_may_begin_anywhere():
    ranges = (0, 6), (3, 0)  # first class, number of classes
    of_ranks = [parallel.ClassRange(first, 6, rows, first, 6) for first, rows in ranges]
    parallel._check_ranges(of_ranks)
