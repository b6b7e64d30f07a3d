"""Drawn calls of the functions that give log-probabilities, and their definition on whole logits in
float64. A case follows from (function, dtype, seed) alone, on every rank alike."""

import dataclasses
import math
import random
import zlib

import torch

import flce
from flce import reference
from harness import cases
from harness.drawn_losses import LOSSES, OF_SEQUENCES, linear

FUNCTIONS = ("logprobs", "at", "topk", "classes", "sparse", "loss", "loss_at")
VOCABS = (1, 2, 3, 5, 8, 17, 33, 61, 61, 130)
SHAPES = ((0,), (1,), (5,), (17,), (2, 3), (3, 1, 4), (2, 0), (33,), (2, 2, 6), (12,))
ACCUMULATE = ("classes", "sparse", "loss", "loss_at")  # which take accumulate_into
OF_ROWS = ("input", "adapter_input")
OF_CLASSES = ("linear_weight", "linear_bias", "adapter_weight")
# Rounding to nearest, relative: of the operands' dtype, and of the logits as the CPU has them.
ROUNDING = {
    torch.float64: (2.0**-53, 2.0**-53),
    torch.float32: (2.0**-24, 2.0**-24),
    torch.bfloat16: (2.0**-9, 2.0**-9),
    torch.float16: (2.0**-11, 2.0**-24),
}


@dataclasses.dataclass
class Call:
    """One call. `leaves`: tensors by name, in the dtype of the call; `options` of the call, of
    which `meant` are those that the definition reads; `upstream` by output, None for an output that
    is not differentiated."""

    function: str
    dtype: torch.dtype
    seed: int
    leaves: dict
    needs: set
    target: torch.Tensor
    ids: torch.Tensor | None
    options: dict
    meant: dict
    upstream: dict = dataclasses.field(default_factory=dict)
    loss_fn: object = None
    bounds: list | None = None
    grad_output: torch.Tensor | None = None  # of loss_fn's
    kind: str = "normal"
    ends: list | None = None  # of the ranks' classes
    how: dict = dataclasses.field(default_factory=dict)  # options of VocabParallel

    @property
    def name(self):
        named = {k: v for k, v in self.options.items() if not isinstance(v, torch.Tensor)}
        shapes = {k: tuple(v.shape) for k, v in self.leaves.items()}
        return f"{self.function} {self.dtype} seed {self.seed}: {self.kind} {shapes} {named}"


class Draw:
    """`vocabs`: the numbers of classes to draw from."""

    def __init__(self, function, dtype, seed, ranks=1, vocabs=VOCABS):
        text = f"{function} {dtype} {seed} {ranks}"
        self.random = random.Random(text)
        self.generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        self.function, self.dtype, self.seed, self.ranks = function, dtype, seed, ranks
        self.vocabs = vocabs
        self.is_loss = function.startswith("loss")

    def pick(self, *values):
        return self.random.choice(values)

    def chance(self, share):
        return self.random.random() < share

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.generator)

    def strided(self, tensor):
        """The same values, sometimes in another layout."""
        way = self.pick("plain", "plain", "transposed", "padded", "spread")
        if way == "spread":
            return torch.stack([tensor, tensor], -1)[..., 0]
        if way == "transposed" and tensor.dim() == 2:
            return tensor.t().contiguous().t()
        if way == "padded" and tensor.dim() >= 1:
            return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
        return tensor

    def call(self):
        shape = self.pick(*SHAPES)
        if self.ranks == 1 and not self.is_loss and self.chance(0.03):
            shape = ()
        vocab = self.pick(*self.vocabs)
        self.shape, self.rows = shape, math.prod(shape)
        self.vocab = vocab = max(vocab, self.pick(1, self.ranks))
        self.hidden, self.options, self.meant = self.pick(1, 3, 8, 24), {}, {}
        self.kind = self.pick("normal", "normal", "flat", "ties", "extreme")
        self._options()
        self.valid = self.meant.get("valid_vocab", vocab)
        leaves = self._leaves()
        target, ids = self._target()
        self._hide(leaves, target, ids)
        call = Call(self.function, self.dtype, self.seed, leaves, set(), target, ids,
                    {**self.meant, **self.options}, self.meant, kind=self.kind)  # fmt: skip
        accumulates = "accumulate_into" in self.options
        call.needs = {name for name in leaves if self.chance(0.8)} or {"input"}
        call.needs |= {"linear_weight"} if accumulates else set()
        self._upstream(call)
        if self.ranks > 1:
            self._divide(call)
        return call

    def _divide(self, call):
        """Where the ranks' classes end: some have none, or padding alone."""
        ends = sorted(self.random.randint(0, self.vocab) for _ in range(self.ranks - 1))
        call.ends, ways = [*ends, self.vocab], [{}, {}, {"reduce_input_grad": False}]
        if call.dtype.itemsize == 2:
            ways.append({"reduce_dtype": torch.float32})
        if not self.is_loss and self.shape[0] % self.ranks == 0:
            ways.append({"sequence": True})
        call.how = self.pick(*ways)

    def _options(self):
        """Sets `meant`, what the definition reads, and `options`, the others."""
        meant, options = self.meant, self.options
        if self.chance(0.35):
            meant["softcap"] = self.pick(0.7, 3.0, 30.0)
        if self.chance(0.35):
            meant["logit_scale"] = self.pick(-1.5, 0.25, 2.0)
        if self.chance(0.5):
            rows = 0.5 + torch.rand(self.shape, generator=self.generator, dtype=torch.float64)
            meant["temperature"] = self.pick(0.7, 1.9, rows)
        if self.vocab > 1 and self.chance(0.2):
            meant["valid_vocab"] = self.random.randint(1, self.vocab)
        meant["ignore_index"] = self.pick(-100, -100, -100, -1, 0, self.vocab + 3)
        if self.function in ("logprobs", "loss") and len(self.shape) >= 2 and self.chance(0.3):
            meant["shift"] = self.pick(1, 2)
        if self.chance(0.5):
            options["max_memory"] = self.vocab * 16 * self.pick(1, 4) * 16
        if not self.is_loss:
            reduced = self.function == "classes"
            saves = ("auto", "logits", "stats", "grads")
            meant["reduction"] = self.pick("none", "mean", "sum") if reduced else "none"
            grads = reduced and meant["reduction"] != "none"
            options["save"] = self.pick(*saves[: 4 if grads else 3])
            options["valid_bound"] = self.pick(None, "count", self.rows)
        elif self.chance(0.6):
            options["rows"] = self.pick(1, 2, 7, 100)
        if self.dtype.itemsize == 2 and self.chance(0.3):
            options["accum_dtype"] = torch.float32
        self.bounds = self._bounds()

    def _bounds(self):
        """cu_seqlens: of a shift, or of a loss of sequences."""
        if not self.chance(0.5) or "shift" not in self.meant and not self.is_loss:
            return None
        at = sorted(self.random.randint(0, self.rows) for _ in range(self.pick(2, 3, 6)))
        kind = self.pick(torch.int32, torch.int64)
        self.options["cu_seqlens"] = torch.tensor(at, dtype=kind)
        return at

    def _leaves(self):
        shape, vocab, hidden = self.shape, self.vocab, self.hidden
        x, w = self.normal(*shape, hidden), self.normal(vocab, hidden) / math.sqrt(hidden)
        made = {"input": 2.0 * x, "linear_weight": w}
        if self.kind == "flat":
            made["input"] = 1e-3 * x
        if self.kind == "ties":
            w[:] = w[self.integers(max(vocab // 3, 1), vocab)]
        if self.kind == "extreme":  # one-hot rows: the products are exact in every dtype
            hot = torch.nn.functional.one_hot(self.integers(hidden, *shape), hidden)
            made = {"input": hot.double(), "linear_weight": (1e4 * w).clamp(-1e4, 1e4)}
        if self.chance(0.4):
            made["linear_bias"] = self.normal(vocab)
        takes = "valid_vocab" not in self.meant and "accum_dtype" not in self.options
        takes = takes and not (self.is_loss and self.dtype == torch.float16)
        if takes and self.kind != "extreme" and self.chance(0.25):
            rank = self.pick(1, 4)
            made["adapter_input"] = self.normal(*shape, rank)
            made["adapter_weight"] = self.normal(vocab, rank)
        elif self.function in ACCUMULATE and self.chance(0.3):
            if self.options.get("save") != "grads":
                self.options["accumulate_into"] = self.pick("grad", "main_grad")
        made = {name: self.strided(tensor.to(self.dtype)) for name, tensor in made.items()}
        if "accumulate_into" in self.options:
            made["linear_weight"] = made["linear_weight"].contiguous()
        return made

    def _target(self):
        """Targets (...) and, for the functions of K classes, ids (..., K)."""
        ignored, shape = self.meant["ignore_index"], self.shape
        target = self.integers(self.valid, *shape)
        absent = torch.rand(shape, generator=self.generator) < self.pick(0.0, 0.3, 0.3, 1.0)
        target[absent] = ignored
        ids = None
        if self.function in ("at", "sparse", "loss_at", "classes"):
            count = self.pick(1, 2, 5, 40)
            ids = self.integers(self.pick(1, self.valid), *shape, count)
            none = torch.rand(ids.shape, generator=self.generator) < self.pick(0.0, 0.3)
            ids[none] = ignored
            if self.function != "classes":
                ids[absent] = ignored
                target = ids.amax(-1)
                rows = (ids == ignored).all(-1)
                target[~rows] = self.valid  # of the definition: not ignored
                target[rows] = ignored
            ids = ids.int() if self.chance(0.2) else ids
        elif self.chance(0.2):
            target = target.int()
        if self.function == "topk" or self.function == "classes" and self.chance(0.3):
            self.options["topk"] = self.pick(1, self.valid, self.random.randint(1, self.valid))
            ids = None
        return self.strided(target), None if ids is None else self.strided(ids)

    def _hide(self, leaves, target, ids):
        """NaN where nothing may be read, and a bias of -inf. Classes with a target keep theirs
        finite where the loss has no gradient at -inf."""
        ignored = target == self.meant["ignore_index"]
        if self.chance(0.5) and "shift" not in self.meant:
            for name in OF_ROWS:
                if name in leaves:
                    leaves[name][ignored] = math.nan
            temperature = self.meant.get("temperature")
            if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
                temperature[ignored] = math.nan
        leaves["linear_weight"][self.valid :] = math.nan
        if "linear_bias" in leaves and self.chance(0.5):
            bias = leaves["linear_bias"]
            hidden = torch.rand(self.vocab, generator=self.generator) < self.pick(0.2, 0.9)
            hidden[self.random.randrange(self.valid)] = False  # a class that every row has
            if self.is_loss or self.function == "sparse":
                for given in (target, ids):
                    if given is not None:
                        used = given[(given >= 0) & (given < self.valid)]
                        hidden[used.long()] = False
            # NaN = inf - inf, in the definition too, without a softcap and a negative scale
            if self.meant.get("logit_scale", 1.0) > 0 or "softcap" in self.meant:
                bias[hidden] = -math.inf

    def _upstream(self, call):
        """Upstream gradients: other than 1, some rows 0, some outputs without one."""
        shape, options = self.shape, call.options
        function, topk = self.function, options.get("topk", 0)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        count = topk or (call.ids.shape[-1] if call.ids is not None else 0)
        shapes = {"logprobs": (*shape, count) if function in ("at", "loss_at") else shape}
        if function in ("logprobs", "topk", "loss"):
            options["entropy"] = self.pick(None, "detached", "differentiable")
            shapes["entropy"] = shape
        if function == "topk":
            shapes |= {"top": (*shape, topk), "lse": shape}
        if function in ("classes", "sparse"):
            scalar = call.meant["reduction"] != "none"
            shapes = {"loss": () if scalar else shape, "lse": shape, "entropy": shape}
            shapes |= {"class_logits": (*shape, count)} if function == "classes" else {}
            options |= {"return_lse": True, "return_entropy": True}
        if function == "classes" and not topk:
            options["classes"] = call.ids
        if function == "sparse":
            self._sparse(call, shapes)
        if function in ("at", "topk", "classes") and self.chance(0.5):
            options["return_tail_lse" if function == "classes" else "tail"] = True
            shapes["tail_lse" if function == "classes" else "tail"] = shape
        size = self._size()
        for name, own in shapes.items():
            grad = size * self.normal(*own).to(wide)
            if own and self.chance(0.3):
                grad[torch.rand(own, generator=self.generator) < 0.4] = 0.0
            call.upstream[name] = self.pick(grad, grad, grad, grad * 0.0, None)
        if all(grad is None for grad in call.upstream.values()):
            call.upstream[next(iter(shapes))] = self.normal(*next(iter(shapes.values()))).to(wide)
        if options.get("entropy", 0) in (None, "detached"):
            call.upstream["entropy"] = None
        if self.is_loss:
            self._loss_fn(call)
        if function == "classes" and not topk and not self.chance(0.8):
            call.upstream["class_logits"] = None
        call.bounds = self.bounds

    def _size(self):
        """float16 has to hold a rank's part of dX too, of which another's may be the negative."""
        return 2.0**-7 if self.dtype == torch.float16 and self.kind == "extreme" else 1.0

    def _sparse(self, call, shapes):
        meant = call.meant
        meant["reduction"] = self.pick("none", "mean", "sum")
        shapes["loss"] = self.shape if meant["reduction"] == "none" else ()
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        meant["probabilities"] = torch.rand(call.ids.shape, generator=self.generator).to(wide)
        if self.chance(0.4):
            meant["z_loss"] = 0.1 * self._size() ** 2
        if self.chance(0.4):
            meant["token_weight"] = self.normal(*self.shape).to(wide)
        if meant["reduction"] == "mean" and self.chance(0.4):
            meant["num_items"] = self.pick(0.25, 7.5)
        call.options |= meant
        del call.options["probabilities"]

    def _loss_fn(self, call):
        """A loss of the rows; the gradient of a ratio is finite also at extreme logits."""
        a, b = (self.normal(max(self.rows, 8)) for _ in range(2))  # of rows, and of sequences
        share = 1.0 / max(self.rows, 1)
        if call.ids is not None or self.dtype != torch.float64:
            grad = self.normal(self.rows, *(call.ids.shape[-1:] if call.ids is not None else ()))
            call.upstream = {"logprobs": grad, "entropy": a[: self.rows]}
            call.loss_fn = linear
            if call.options.get("entropy", 0) in (None, "detached"):
                call.upstream["entropy"] = None
        else:
            call.upstream = {}
            call.loss_fn = self.pick(*LOSSES, *(OF_SEQUENCES if self.bounds else ()))
        call.grad_output = self.normal()
        call.options["share"] = share
        call.options["data"] = a, b


# ---- the definition ----


def case_of(call, leaves):
    """The call as a cases.Case with these leaves. What is ignored is -100 in it."""
    meant, leaves = call.meant, dict(leaves)
    target = call.target.long()
    target = torch.where(target == meant["ignore_index"], -100, target)
    if call.ids is not None and call.function != "classes":  # the rows have no target of their own
        target = target.clamp(max=0)
    of_logits = ("softcap", "logit_scale", "temperature", "valid_vocab", "shift")
    options = {name: meant[name] for name in of_logits if name in meant}
    if options.get("shift") and call.bounds:
        options["cu_seqlens"] = torch.tensor(call.bounds)
    operands = leaves.pop("input"), leaves.pop("linear_weight"), target
    return cases.Case(*operands, {**options, **leaves}).to(torch.float64)


def definition(call, leaves, found=None):
    """Outputs by name, of flce.reference. `found`: the classes that a call with topk gave."""
    meant, case = call.meant, case_of(call, leaves)
    ids, none = (call.ids, meant["ignore_index"]) if found is None else (found, -1)
    wants = {"reduction": "none", "return_lse": True, "return_entropy": True}
    if ids is not None:
        wants["classes"] = ids.long().masked_fill(ids == none, -100)
        wants["return_tail_lse"] = True
    operands = case.input, case.linear_weight, case.target
    rows = reference.linear_cross_entropy(*operands, **case.options, **wants)
    made, cut = rows._asdict(), cases.final_logits(case)[1]
    made |= {"logprobs": -rows.loss, "top": None}
    if ids is not None:
        absent = (ids == none) | cut.unsqueeze(-1)
        at = (rows.class_logits - rows.lse.unsqueeze(-1)).masked_fill(absent, 0.0)
        made["tail"] = rows.tail_lse - rows.lse
        made |= {"top": at} | ({"logprobs": at} if call.function in ("at", "loss_at") else {})
    if call.function == "classes":
        made["loss"] = reduced(rows.loss, cut, meant)
    if call.function == "sparse":
        losses = (meant["probabilities"].double() * -at).sum(-1)
        losses = losses + meant.get("z_loss", 0.0) * rows.lse.square()
        losses = losses * meant.get("token_weight", torch.ones(())).double()
        made["loss"] = reduced(losses, cut, meant)
    if call.loss_fn:
        return definition_of_loss(call, made)
    return {name: made[name] for name in call.upstream}


def reduced(rows, cut, meant):
    if meant["reduction"] == "none":
        return rows
    count = meant.get("num_items", (~cut).sum().item()) if meant["reduction"] == "mean" else 1.0
    return rows.sum() / count if count else 0.0 * rows.nan_to_num().sum()


def definition_of_loss(call, made):
    rows = call.target.numel()
    begin, end = (call.bounds[0], call.bounds[-1]) if call.bounds else (0, rows)
    logprobs = made["logprobs"]
    logprobs = logprobs.reshape(rows, *logprobs.shape[call.target.dim() :])
    entropy, mode = made["entropy"].reshape(-1), call.options.get("entropy")
    call.options.setdefault("base", logprobs.detach())
    if mode is None:
        entropy = None
    elif mode == "detached":
        entropy = entropy.detach()
    part = slice(begin, end)
    given = logprobs[part], entropy if entropy is None else entropy[part]
    if not call.upstream:
        call.upstream = gradients_of_loss(call, *given, part)
    return {"loss": call.loss_fn(call, *given, part, call.options["base"])}


def gradients_of_loss(call, logprobs, entropy, part):
    """Those of the log-probabilities and the entropy, for the bounds of the errors."""
    rows, made = call.target.numel(), {}
    leaves = [t if t is None else t.detach().requires_grad_() for t in (logprobs, entropy)]
    loss = call.loss_fn(call, *leaves, part, call.options["base"])
    if loss.requires_grad:  # without a sequence it is 0
        loss.backward()
    for name, leaf in zip(("logprobs", "entropy"), leaves, strict=True):
        if leaf is not None and leaf.grad is not None:
            made[name] = leaf.grad.new_zeros(rows)
            made[name][part] = leaf.grad
    return made


# ---- flce ----


def run(call, leaves, **parallel):
    """The outputs of flce by name, and the classes found by topk."""
    options = {**call.options, **parallel}
    options |= {name: leaves[name] for name in leaves if name not in ("input", "linear_weight")}
    operands, function = (leaves["input"], leaves["linear_weight"]), call.function
    if function.startswith("loss"):
        base, options = options.pop("base"), _without(options, "data", "share")
        target = call.target if call.ids is None else call.ids
        wide = base.to(torch.float64 if call.dtype == torch.float64 else torch.float32)

        def loss_fn(logprobs, entropy, rows):
            return call.loss_fn(call, logprobs, entropy, rows, wide)

        return {"loss": flce.linear_loss(*operands, target, loss_fn, **options)}, None
    if function == "at":
        options = _without(options, "reduction")
        made, count = flce.linear_logprobs_at(*operands, call.ids, **options), call.ids.shape[-1]
        tail = {"tail": made[..., count]} if options.get("tail") else {}
        return {"logprobs": made[..., :count], **tail}, None
    if function in ("logprobs", "topk"):
        options = _without(options, "reduction")
        count = options.pop("topk", 0)
        made = flce.linear_logprobs(*operands, call.target, return_topk=count, **options)
        named = {"logprobs": made[0], "entropy": made[1]}
        if not count:
            return named, None
        tail = {} if made[2].tail is None else {"tail": made[2].tail}
        return {**named, "top": made[2].logprobs, "lse": made[2].lse, **tail}, made[2].ids
    target = call.target
    if function == "sparse":
        target = call.ids, call.meant["probabilities"]
    made = flce.linear_cross_entropy(*operands, target, **options)
    found = made.classes if options.get("topk") else None
    return {name: getattr(made, name) for name in call.upstream}, found


def _without(options, *names):
    return {name: value for name, value in options.items() if name not in names}
