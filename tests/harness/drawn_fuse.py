"""Drawn losses for flce.fuse: the source of a function of logits z (B, T, V) and labels y, from a
seed. It computes several results, of deferred and of real logits, of values that stay alive between
breaks of the graph of torch.compile."""

import random

import torch
import torch.nn.functional as F

# Source of what values are computed from: logits, log-probabilities and probabilities.
_OF_LOGITS = (
    "{v} * 0.5",
    "{v} / 1.5",
    "-{v}",
    "torch.tanh({v} / 3) * 3",
    "{v} + torch.linspace(-1, 1, {v}.shape[-1], dtype={v}.dtype)",
    "{v}.clone()",
    "{v}.contiguous()",
    "{v}.float()",
    "{v}.detach()",
    "written({v})",
    "{v}.exp()",
)
_TO_LOG_P = ("{v}.log_softmax(-1)", "F.log_softmax({v}, dim=-1)")
_TO_P = ("{v}.softmax(-1)", "torch.softmax({v}, -1)")
# Other rows, and the labels of these.
_ROWS = (
    ("{v}[..., :-1, :]", "{y}[..., 1:]"),
    ("{v}.reshape(-1, {v}.shape[-1])", "{y}.reshape(-1)"),
    ("{v}[{y} != 3]", "{y}[{y} != 3]"),  # breaks the graph
    ("{v}.unsqueeze(0)", "{y}.unsqueeze(0)"),
)
_RESULTS = {  # by the form of the value
    "logits": (
        "F.cross_entropy({v}.flatten(0, -2), {y}.flatten())",
        "F.cross_entropy({v}.flatten(0, -2), {y}.flatten(), reduction='sum', label_smoothing=0.1)",
        "F.cross_entropy({v}.flatten(0, -2), {y}.flatten(), reduction='none').pow(2).mean()",
        "{v}.logsumexp(-1).pow(2).mean()",
        "{v}.mean(-1).sum()",
        "{v}.gather(-1, {y}[..., None]).mean()",
        "{v}.argmax(-1).double().mean()",
        "{v}.std(-1).mean()",
        "{v}.amax(-1).mean()",
        "{v}.max(-1).values.mean()",
        "{v}.topk(3, -1).values.mean()",
        "{v}.pow(2).mean()",
        "{v}.abs().mean()",
        "{v}.detach().softmax(-1).amax(-1).mean()",
        "F.cross_entropy({v}.flatten(0, -2), {y}.flatten()) * {v}.detach().logsumexp(-1).mean()",
        "dft({v}, {y})",
    ),
    "log p": (
        "{v}.gather(-1, {y}[..., None]).squeeze(-1).mean()",
        "F.nll_loss({v}.flatten(0, -2), {y}.flatten())",
        "{v}.sum(-1).mean()",
        "({v}.exp() * {v}).sum(-1).mean()",
        "{v}.std(-1).mean()",
        "{v}.amax(-1).mean()",
    ),
    "p": (
        "{v}.gather(-1, {y}[..., None]).mean()",
        "{v}.pow(2).sum(-1).mean()",
        "{v}.amax(-1).mean()",
    ),
}
# Before all others: autograd refuses to write to what a result has kept. Not z[...] = x, for which
# torch.compile of torch 2.14 does not ask the Tensor.
_WRITES = (
    ("z.mul_(0.9)",),
    ("z[..., 0].fill_(-2.0)",),
    ("w = z[..., :-1, :]", "w.mul_(0.5)"),
    ("w = z.reshape(-1, z.shape[-1])", "w[0].fill_(1.0)"),
)
BREAKS = ("graph_break()", "print(end='')", "total = total + 0 * y[y > 3].double().sum()")


def written(values):
    """A copy of another first class."""
    copy = values.clone()
    copy[..., 0].fill_(-2.0)
    return copy


def dft(values, labels):
    """The loss of dynamic fine-tuning, with a break in the function that is called."""
    chosen = values.log_softmax(-1).gather(-1, labels[..., None])
    graph_break()
    return -(chosen.detach().exp() * chosen).mean()


def graph_break():
    torch._dynamo.graph_break()


class Drawn:
    """source: of `loss`; function: that. bar: relative error that rounding may cause."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.values = [("z", "logits", "y")]  # (name, form, its labels)
        self.lines, self.count = ["total = 0.0"], 0
        if self.draw.random() < 0.2:
            self.lines += self.draw.choice(_WRITES)
        for _ in range(self.draw.randint(2, 7)):
            self.draw.choices((self.add_value, self.add_result, self.add_break), (4, 3, 3))[0]()
        self.add_result()
        self.source = self.whole()
        self.bar = 1e-5 if ".float()" in self.source else 1e-9
        scope = {"torch": torch, "F": F, "written": written, "dft": dft, "graph_break": graph_break}
        exec(compile(self.source, f"<drawn by {seed}>", "exec"), scope)
        self.function = scope["loss"]

    def add_break(self):
        self.lines.append(self.draw.choice(BREAKS))

    def add_value(self):
        (name, form, labels), new = self.draw.choice(self.values), f"v{self.count}"
        self.count += 1
        kind = self.draw.choices(("same", "rows", "log p", "p"), (4, 3, 3, 1))[0]
        if kind == "rows":
            rows, of_labels = self.draw.choice(_ROWS)
            self.lines.append(f"{new} = {rows.format(v=name, y=labels)}")
            self.lines.append(f"y_{new} = {of_labels.format(v=name, y=labels)}")
            self.values.append((new, form, f"y_{new}"))
        elif form == "logits":
            choices = {"same": _OF_LOGITS, "log p": _TO_LOG_P, "p": _TO_P}[kind]
            self.lines.append(f"{new} = {self.draw.choice(choices).format(v=name)}")
            self.values.append((new, form if kind == "same" else kind, labels))

    def add_result(self):
        name, form, labels = self.draw.choice(self.values)
        text = self.draw.choice(_RESULTS[form]).format(v=name, y=labels)
        self.lines.append(f"total = total + {self.draw.choice((0.5, 1.0, -0.3))} * {text}")

    def whole(self):
        """The function: the last lines may be in one that it calls, with all values or by name."""
        at = self.draw.choice((None, self.draw.randrange(1, len(self.lines))))
        names = ["z", "y"]
        names += [line.split(" = ")[0] for line in self.lines[:at] if " = " in line]
        names = [name for name in dict.fromkeys(names) if name.isidentifier()]
        first, last = self.lines[:at], [] if at is None else self.lines[at:]
        if last:
            last = ["def others(total, values):"]
            last += [f"    {', '.join(names)} = {', '.join(f'values[{n!r}]' for n in names)}"]
            last += [f"    {line}" for line in self.lines[at:]] + ["    return total"]
            values = ", ".join(f"{n!r}: {n}" for n in names)
            last += [f"total = others(total, {{{values}}})"]
        lines = [*first, *last, "return total"]
        return "def loss(z, y):\n" + "".join(f"    {line}\n" for line in lines)
