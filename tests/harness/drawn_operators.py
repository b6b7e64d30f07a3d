"""Calls of the operators of torch.ops.flce with damaged arguments, in a process that has to survive
them. Run by test_drawn_operators.py: drawn_operators.py FILE FIRST COUNT writes the seed of each
call to FILE before it, and prints what an exception says that is not the refusal of an argument.

A call is drawn that is right, then up to three of its arguments are dropped, replaced, resized, or
changed in type, device, layout or value.
"""

import math
import os
import random
import re
import sys

import torch

from flce.options import CHOICES
from flce.packing import INTEGERS, replaced
from harness import cases, raw

OPS = torch.ops.flce
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2)
INTS = (0, 1, -1, 2, 3, 4, 5, 7, 64, 1000, -100, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
OF_LOSSES = ("wants_statistics", "wants_entropy", "wants_predictions", "wants_lse")
OF_LOSSES += ("entropy_gradient", "class_gradient", "accumulates")
REALS = (0.0, 1.0, -1.0, 0.5, 2.5, 2**-12, 1e-30, 1e30, 1e308, math.inf, -math.inf, math.nan)


class Draw:
    """The choices of a seed, and the sizes of its call."""

    def __init__(self, seed):
        self.pick, self.generator = random.Random(seed), cases.generator(seed)
        self.tokens, self.hidden = self.pick.choice([0, 1, 2, 5, 9]), self.pick.choice([1, 8, 33])
        self.vocab, self.dtype = self.pick.choice([1, 2, 9, 40, 70]), self.pick.choice(FLOATS)
        self.stat = torch.float64 if self.dtype == torch.float64 else torch.float32

    def maybe(self, chance=0.3):
        return self.pick.random() < chance

    def some(self, chance, **values):
        return {name: value for name, value in values.items() if self.maybe(chance)}

    def floats(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def classes(self, *shape):
        made = torch.randint(self.vocab, shape, generator=self.generator)
        return made.to(self.pick.choice([torch.int64, torch.int32]))

    def target(self):
        y = self.classes(self.tokens)
        if self.maybe() and self.tokens:
            y[self.pick.randrange(self.tokens)] = -100
        return y

    # ---- right calls: each returns the arguments by position, or None ----

    def settings(self, **given):
        how = self.some(0.15, **dict.fromkeys(OF_LOSSES, True))
        how |= self.some(0.15, label_smoothing=0.1, softcap=3.0, z_loss=0.01, logit_scale=-0.5)
        how |= self.some(0.15, temperature=2.0, valid_vocab=1, rows=self.tokens, autocast=2)
        how |= self.some(0.15, frozen_hidden=8 * (self.hidden > 8), traced=True)
        how |= {"reduction": self.pick.choice(CHOICES["reduction"]), **given}
        if self.dtype != torch.float64 and self.maybe(0.15):
            how.setdefault("gradient", "sampled")
        if how.get("gradient") == "sampled":
            how["gradient_eps"] = self.pick.choice([2**-12, 2**-6, 0.5, 1.0])
        return {**how, "max_memory": self.pick.choice([1 << 20, 512])}

    def forward(self, **given):
        x, w = self.floats(self.tokens, self.hidden), self.floats(self.vocab, self.hidden)
        target = self.floats(self.tokens, self.vocab) if self.maybe(0.1) else self.target()
        tensors = {"bias": self.floats(self.vocab), "weight": self.floats(self.vocab)}
        tensors |= {"token_weight": self.floats(self.tokens)}
        tensors = self.some(0.3, **tensors, classes=self.classes(self.tokens, 3))
        if "classes" not in tensors and self.maybe(0.2):
            tensors["topk"] = 1
        given = self.settings(**{"save": self.pick.choice(CHOICES["save"]), **given})
        given["grads"] = *(self.maybe(0.8) for _ in range(2)), "bias" in tensors
        return list(raw.forward(x, w, target, seed=torch.tensor(3), **{**tensors, **given}))

    def backward(self):
        """Of what a forward has saved, if it has saved anything."""
        sampled = self.maybe(0.4) and self.dtype != torch.float64
        save = "auto" if sampled else self.pick.choice(["logits", "stats", "auto"])
        arguments = self.forward(save=save, gradient="sampled" if sampled else "exact")
        made = made_by(OPS.forward, arguments)
        if made is None or made[1] is None:
            return None
        kept = "stats"
        if made[4] is not None:
            kept = "logits" if made[4].is_floating_point() else "samples"
        at, classes = raw.TENSORS + 2, arguments[raw.TENSORS - 1]
        arguments[at] = replaced(arguments[at], save=CHOICES["save"].index(kept))
        changed = {"classes": classes if made[-1] is None else made[-1]}
        if changed["classes"] is not None and self.maybe(0.5):
            changed["grad_classes"] = torch.ones(changed["classes"].shape, dtype=made[0].dtype)
        stats = torch.ones_like(made[1]) if self.maybe(0.4) else None
        return list(raw.backward(arguments, made, torch.ones_like(made[0]), stats, **changed))

    def backward_into(self):
        arguments = self.backward()
        return arguments and [torch.zeros_like(arguments[4]), *arguments]

    def divergence(self):
        none = {**dict.fromkeys(OF_LOSSES, False), "label_smoothing": 0.0, "z_loss": 0.0, "topk": 0}
        save = self.pick.choice(["auto", "stats", "nothing"])
        arguments = self.forward(save=save, **none)
        x, w, _, bias, _, *others, _, _, rows, integers, numbers, _ = arguments
        factor, temperature, items, seed = others
        teacher = self.floats(self.tokens, 5), self.floats(self.vocab, 5), None, None
        if self.maybe():
            teacher = self.floats(self.tokens, self.vocab), None, None, None
        kind, hard = self.pick.choice([1.0, 2.0, 3.0]), self.pick.choice([0.0, 0.0, 0.3])
        tensors = x, w, self.target(), bias, factor, temperature, items, seed
        of_teacher = [kind, 0.4, hard, 0.0, 1.0, 1.0]
        return [*tensors, *teacher, of_teacher, None, rows, integers, numbers, None]

    def scale_(self):
        grads = [self.floats(4, 3) if self.maybe(0.7) else None for _ in range(3)]
        scalars = torch.ones(7, dtype=self.stat) if self.maybe() else None
        return [*grads, torch.tensor(2.0, dtype=self.stat), scalars]

    def scaled(self):
        *_, factor, scalars = self.scale_()
        return [self.floats(4, 3), factor, scalars, self.pick.choice(FLOATS)]

    def cross_entropy_forward(self):
        given = self.some(0.3, weight=self.floats(self.vocab), label_smoothing=0.1)
        given["reduction"] = self.pick.choice(CHOICES["reduction"])
        logits = self.floats(self.tokens, self.vocab)
        return list(raw.cross_entropy_forward(logits, self.target(), **given))

    def cross_entropy_backward(self):
        arguments = self.cross_entropy_forward()
        made = made_by(OPS.cross_entropy_forward, arguments)
        return made and list(raw.cross_entropy_backward(arguments, made, torch.ones_like(made[0])))

    def of_schema(self, op):
        """Of any operator, by the types of its arguments; defaults where there are any."""
        return [
            one.default_value if one.has_default_value() else self.of_type(str(one.real_type))
            for one in op._schema.arguments
        ]

    def of_type(self, kind):
        if "Tensor" in kind:
            made = self.floats(self.tokens, self.hidden), self.floats(self.vocab, self.hidden)
            return self.pick.choice([*made, self.target(), self.floats(self.vocab)])
        lists = raw.settings("auto", **self.settings())[2:4]
        known = {"List[int]": lists[0], "List[float]": lists[1], "str": "h100", "float": 1.0}
        known["ScalarType"] = self.dtype
        return known.get(kind, self.pick.choice(INTS))


def made_by(op, arguments):
    try:
        return op(*arguments)
    except Exception:
        return None


# ---- damage ----


def of_another_shape(draw, tensor):
    ways = [
        lambda: tensor[..., None],
        lambda: tensor.flatten(),
        lambda: tensor[:-1],
        lambda: tensor[..., :-1],
        lambda: tensor[:0],
        lambda: tensor.new_zeros(()),
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor.t().contiguous().t(),
        lambda: tensor.new_zeros(1).expand(tensor.shape),
        lambda: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape),
    ]
    return draw.pick.choice(ways)()


def of_other_values(draw, tensor):
    made = tensor.clone()
    if not made.numel():
        return made
    at = draw.pick.randrange(made.numel())
    if made.dtype in (torch.int64, torch.int32):
        bits = torch.iinfo(made.dtype)
        wrong = [bits.min, bits.max, -1, -2, 2**20, draw.vocab, draw.vocab - 1, 0, 1, 2]
        made.view(-1)[at if draw.maybe(0.5) else 0] = draw.pick.choice(wrong)
    else:
        made.view(-1)[at] = draw.pick.choice(REALS)
    return made


def damaged_tensor(draw, tensor):
    ways = [
        lambda: None,
        lambda: [1.0, 2.0],
        lambda: tensor.to(draw.pick.choice([*FLOATS, *OTHERS])),
        lambda: of_another_shape(draw, tensor),
        lambda: of_another_shape(draw, tensor),
        lambda: of_other_values(draw, tensor),
        lambda: of_other_values(draw, tensor),
        lambda: tensor.to("meta"),
        lambda: tensor.to_sparse(),
        lambda: tensor.clone().requires_grad_(),
    ]
    try:
        return draw.pick.choice(ways)()
    except (RuntimeError, IndexError):  # not of this tensor
        return None


def damaged_list(draw, values, others):
    values, how = list(values), draw.pick.randrange(8)
    if how == 0 or not values:
        return [*values, draw.pick.choice(others)]
    if how == 1:
        return values[:-1]
    if how == 2:
        return draw.pick.choice([[], None, 3, "text"])
    # Not the last slot of the integers, the layout, without which nothing else is read.
    for _ in range(draw.pick.randint(1, 4)):
        at = draw.pick.randrange(max(len(values) - (len(values) > len(INTEGERS)), 1))
        values[at] = draw.pick.choice(others)
    return values


def damaged(draw, value, kind):
    if isinstance(value, torch.Tensor):
        return damaged_tensor(draw, value)
    if isinstance(value, (list, tuple)):
        return damaged_list(draw, value, REALS if "float" in kind else INTS)
    if "Tensor" in kind:  # None of it
        return draw.of_type(kind)
    if "str" in kind:
        return draw.pick.choice([None, "", "no group", "%s%n", 3])
    if "ScalarType" in kind:  # not a number beyond torch's own table, which it does not check
        return draw.pick.choice([None, 0.5, *FLOATS, *OTHERS])
    return draw.pick.choice([None, draw.pick.choice(INTS), 0.5])


def drawn(seed):
    """(operator, arguments) of a seed, or (None, None)."""
    draw = Draw(seed)
    name = draw.pick.choice([*RIGHT] * 3 + NAMES)
    op = getattr(OPS, name)
    op = getattr(op, op.overloads()[0])
    right = getattr(draw, name.removeprefix("graph_"), None)
    arguments = right() if right else draw.of_schema(op)
    if arguments is None:
        return None, None
    kinds = [str(argument.real_type) for argument in op._schema.arguments]
    for _ in range(draw.pick.choice([0, 1, 1, 1, 2, 3])):
        if arguments:
            at = draw.pick.randrange(len(arguments))
            arguments[at] = damaged(draw, arguments[at], kinds[at])
    return op, arguments


NAMES = sorted(
    name.removeprefix("flce::").partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("flce::")
)
RIGHT = [name for name in NAMES if hasattr(Draw, name.removeprefix("graph_"))]
# What a refusal begins with: that of flce has the argument's name and what was expected, those of
# torch are of a value that the schema has no type for, and of a group that it does not know.
_REFUSALS = re.compile(
    r"(flce: [a-z ]+: )?\w.*expected |flce: unsupported: no CUDA library"
    r"|flce::\w+(\(\)|: attempted to run) |Could not run '?flce::|There were no tensor arguments"
    r"|Could not resolve the process group"
)


def called(op, arguments):
    pairs = list(zip(op._schema.arguments, arguments, strict=False))
    named = {one.name: value for one, value in pairs if one.kwarg_only}
    return op(*(value for one, value in pairs if not one.kwarg_only), **named)


def run(path, first, count):
    texts = {}
    with open(path, "wb", buffering=0) as file:
        for seed in range(first, first + count):
            os.pwrite(file.fileno(), b"%20d" % seed, 0)
            op, arguments = drawn(seed)
            try:
                op and called(op, arguments)
            except Exception as error:
                if not _REFUSALS.match(str(error)):
                    text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    texts.setdefault(f"{op} {text}", seed)
    for text, seed in texts.items():
        print(seed, text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], *map(int, sys.argv[2:]))
