"""Steps whose allocations, or GEMMs, fail one after the other, in a process with
tests/c/failing_torch.c. Run by test_faults.py; prints a line for each failure. With the argument
`second`: what a second backward does after such a failure of the first."""

import ctypes
import itertools
import re
import sys

import torch

import flce

TOKENS, HIDDEN, VOCAB = 24, 16, 50
LEAVES = ("input", "linear_weight", "linear_bias")
# What flce says; else torch says it in its own operations, those of autograd among them.
OURS = re.compile(r'\d+ bytes for (buffer|a contiguous copy of) "([^"]+)"')

PARTIAL = "; with accumulate_into the weight's gradient may hold a part of this backward's sum"

preloaded = ctypes.CDLL(None)
for name in ("memory_watch", "gemm_watch"):
    getattr(preloaded, name).argtypes = [ctypes.c_int64]
for name in ("memory_count", "memory_alive", "gemm_count"):
    getattr(preloaded, name).restype = ctypes.c_int64


def tensors(dtype=torch.float32):
    x, w = torch.randn(TOKENS, HIDDEN, dtype=dtype), torch.randn(VOCAB, HIDDEN, dtype=dtype)
    leaves = x, w, torch.randn(VOCAB, dtype=dtype)
    given = dict(zip(LEAVES, (leaf.requires_grad_() for leaf in leaves), strict=True))
    return {**given, "target": torch.randint(VOCAB, (TOKENS,))}


def strided(tensor):
    wide = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
    return wide.select(-1, 0).copy_(tensor.detach())


def copied():
    """Every argument has to be copied. Half a row of a wider tensor is one torch.Tensor.copy_
    that needs no memory of its own."""
    given = tensors()
    for name in LEAVES:
        given[name] = strided(given[name]).requires_grad_()
    given["target"] = given["target"].int()
    vectors = {name: strided(torch.rand(TOKENS) + 0.5) for name in ("token_weight", "temperature")}
    return {**given, **vectors, "weight": strided(torch.rand(VOCAB) + 0.5)}


def loss_of(call, options):
    def step(given):
        made = call(**{**given, **options})
        return (
            made
            if isinstance(made, torch.Tensor)
            else sum(part.sum() for part in made if part is not None and part.requires_grad)
        )

    return step


def of_logits(given):
    logits = given["input"] @ given["linear_weight"].detach().T
    return flce.cross_entropy(logits, given["target"], return_entropy=True).loss


def of_any_loss(given):
    operands = [given[name] for name in ("input", "linear_weight", "target")]

    def loss_of_rows(logprobs, entropy, rows):
        return (logprobs * entropy).sum()

    return flce.linear_loss(*operands, loss_of_rows, entropy="detached", max_memory=7 * VOCAB * 4)


def of_adapter(given):
    """The weight is frozen; the bias is the adapter's weight, of rank one."""
    x, w, bias = (given[name] for name in LEAVES)
    pair = {"adapter_input": x.detach()[:, :1], "adapter_weight": bias[:, None]}
    return flce.linear_cross_entropy(x, w.detach(), given["target"], **pair)


def of_divergence(given, **options):
    teacher = {
        "teacher_input": given["input"].detach() / 2,
        "teacher_weight": strided(given["linear_weight"]),
    }
    return flce.linear_divergence(**given, **teacher, divergence="jsd", **options)


head = flce.linear_cross_entropy
ADDED = {"save": "stats", "accumulate_into": "grad", "max_memory": 7 * VOCAB * 4}
SAMPLED = {"gradient": "sampled", "gradient_seed": torch.tensor(7)}
STEPS = {
    **{save: (tensors, loss_of(head, {"save": save})) for save in ("grads", "logits", "stats")},
    "chunks": (tensors, loss_of(head, {"save": "stats", "max_memory": 7 * VOCAB * 4})),
    "sampled": (tensors, loss_of(head, SAMPLED)),
    "copied": (copied, loss_of(head, {"save": "stats"})),
    "outputs": (tensors, loss_of(head, {"reduction": "sum", "return_lse": True, "topk": 2})),
    "predictions": (tensors, loss_of(head, {"return_predictions": True})),
    "twice": (tensors, loss_of(head, {"save": "grads", "return_lse": True})),
    "half": (lambda: tensors(torch.float16), loss_of(head, {"save": "grads"})),
    "logits given": (tensors, of_logits),
    "rows' losses": (tensors, of_any_loss),
    "adapter": (tensors, of_adapter),
    "accumulate": (tensors, loss_of(head, ADDED)),
    "divergence": (tensors, of_divergence),
    "sampled divergence": (tensors, lambda given: of_divergence(given, **SAMPLED)),
}
AGAIN = ("stats", "chunks", "half", "twice", "sampled")  # whose backward may run again


def attempt(given, step, begin, what, fails_at):
    """(what a failure raises, or None; the gradients; the calls of `what`: memory or gemm)."""
    leaves = [given[name] for name in LEAVES]
    for leaf, grad in zip(leaves, begin, strict=True):
        leaf.grad = None if grad is None else grad.clone()
    getattr(preloaded, f"{what}_watch")(fails_at)
    try:
        step(given).backward()
        text = None
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    count = getattr(preloaded, f"{what}_count")()
    getattr(preloaded, f"{what}_watch")(-1)
    preloaded.memory_count()
    return text, [leaf.grad for leaf in leaves], count


def same(ours, theirs):
    return all(
        a is b is None or a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def check_memory(name, where, text, grads, begin):
    found = OURS.search(text)
    if found:
        assert text.startswith("OutOfMemoryError: "), where
        print(f"{found[1]} {found[2]}")
    else:
        assert "DefaultCPUAllocator: can't allocate memory" in text, where
    # AccumulateGrad of torch copies a gradient whose layout is not the leaf's.
    assert name == "copied" or same(grads, begin), f"{where}: .grad was touched"
    assert PARTIAL not in text, where
    return found is not None


def check_gemm(name, where, text, grads, begin):
    assert text.startswith("RuntimeError: flce: matrix product failed: torch's product of"), where
    assert same(grads, begin) or PARTIAL in text, f"{where}: .grad was touched"
    # linear_loss adds to a gradient of its own in the forward.
    assert name in ("accumulate", "rows' losses") or PARTIAL not in text, where
    print(f"{name}: {'untouched' if same(grads, begin) else 'partial'}")
    return True


def forget(given):
    for name in LEAVES:
        given[name].grad = None


def sweep(name, what, check):
    make, step = STEPS[name]
    given = make()
    begin = [None] * 3
    if name == "accumulate":
        begin[1] = torch.randn(VOCAB, HIDDEN)
    _, grads, _ = attempt(given, step, begin, what, -1)
    expected = [grad if grad is None else grad.clone() for grad in grads]
    del grads
    forget(given)
    for number in range(1000):
        text, grads, count = attempt(given, step, begin, what, number)
        where = f"{name}, {what} {number}: {text}"
        if text is None:
            assert count == number > 0, (where, count)
            return
        ours = check(name, where, text, grads, begin)
        del grads
        forget(given)
        # After a failure of a C++ node torch's engine keeps a few tensors until its next run.
        assert preloaded.memory_alive() == 0 or not ours, f"{where}: stay allocated"
        _, grads, _ = attempt(given, step, begin, what, -1)
        assert same(grads, expected), f"{where}: the next step"
        del grads
        forget(given)
        assert preloaded.memory_alive() == 0, f"{where}: stay allocated"
    raise AssertionError("no end")


def second_backwards(name, what):
    """Prints what a second backward does after one that has failed in flce: "right", with the bits
    of a first one, or "refused"."""
    make, step = STEPS[name]
    given = make()
    leaves = [given[leaf] for leaf in LEAVES]
    loss = step(given)
    upstream = torch.full_like(loss, 0.5)
    expected = torch.autograd.grad(loss, leaves, upstream)
    for number in range(1000):
        loss = step(given)
        getattr(preloaded, f"{what}_watch")(number)
        try:
            torch.autograd.grad(loss, leaves, upstream)
            text = ""
        except RuntimeError as error:
            text = str(error)
        getattr(preloaded, f"{what}_watch")(-1)
        preloaded.memory_count()
        if not text:
            return
        if not (OURS.search(text) or "flce: matrix product failed" in text):
            continue  # an operation of torch between the loss and flce
        try:
            grads = torch.autograd.grad(loss, leaves, upstream)
            assert same(grads, expected), f"{name}, {what} {number}: the second backward"
            print(f"{name}: right")
        except RuntimeError as error:
            assert "run the forward again" in str(error), error
            print(f"{name}: refused")
    raise AssertionError("no end")


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "second":
        for name, one in itertools.product(("grads", "logits", *AGAIN), ("memory", "gemm")):
            second_backwards(name, one)
        sys.exit()
    check = {"memory": check_memory, "gemm": check_gemm}[what]
    for name in STEPS:
        if what == "memory" or name != "logits given":  # it has no GEMM of flce
            torch.manual_seed(0)
            sweep(name, what, check)
