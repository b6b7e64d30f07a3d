"""The state of a fused model: when to defer, what happened, the handle to undo it, and a report."""

import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import Self, Unpack

from .. import composite, torch_private
from ..options import FuseOptions, check_names, defaults, show_options
from ..validate import refuse, warn
from . import head as heads
from . import steps
from .reentry import enclosing_of, own_fusion

logger = logging.getLogger("flce")
_When = Literal["labels", "always"]
_OPTIONS = defaults(FuseOptions)  # the others follow from the model's own call of the loss
_MAX_RECORDS = 16  # kinds of losses counted apart: a scale that changes is another each step
_UNLABELLED = (
    'the loss is computed from all logits; flce.fuse(model, when="always") serves losses of its '
    "output"
)
_NOT_CALLED = (
    "flce computed no loss; flce.integrations.trl.install() serves a loss of TRL's trainers; if "
    f"the model multiplies by the weight itself (F.linear), {heads.BY_HAND}"
)
_NOT_COPIED = ("_model", "linears", "_hooks", "_places", "_label_stack")
_NOT_COPIED += ("last_optimizer_step",)
_fusions = weakref.WeakSet()


@register_optimizer_step_post_hook
def _note_optimizer_step(optimizer, args, kwargs):
    if not is_compiling():  # a compiled step raises the versions of the weights
        for fusion in list(_fusions):
            fusion.note_optimizer_step(optimizer)


class Fusion:
    """What `flce.fuse` returns: a handle to undo it, and a context manager that does at its end.

    model, options: as given; model is None once it is freed. losses: {steps after the head: how
    often a loss was computed without logits}; reads: {operation: how often it made real logits
    where no loss needed them}; fallbacks: {reason: how often real logits were made for a loss}.
    It holds Modules by weak references: they are freed, and heads copied, without the model.
    """

    when: _When
    options: FuseOptions
    losses: Counter[str]
    reads: Counter[str]
    fallbacks: Counter[str]
    refused: list[tuple[str, str]]  # (name, why) of heads that do not defer

    def __init__(self, model, when, strict, options):
        self.when, self._strict, self.options = when, strict, options
        self._model_name, self._is_attached = type(model).__name__, False
        self._model_was_called = self._head_is_called = self._gave_logits = False
        self._is_in_graphs = False  # a graph calls the head, which defers
        self.losses, self.reads, self.fallbacks = (Counter() for _ in range(3))
        self.refused = []
        self._reset(weakref.ref(model))

    def _reset(self, model):
        """Sets what belongs to Modules and to calls in progress, which _NOT_COPIED names."""
        self._model = model
        self.linears = weakref.WeakKeyDictionary()  # {each nn.Linear that has deferred: None}
        self._hooks = []
        self._places = []  # [(name, weak reference to the parent, name in it)] of the heads
        self._label_stack = []  # of the models being called now, from the outside in
        # A new object for each step of an optimizer on the heads' weights, compared by identity: a
        # number would be a constant of a compiled graph.
        self.last_optimizer_step = object()
        _fusions.add(self)

    def __getstate__(self):
        """A copy's heads add themselves. What is copied may be a head alone."""
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._reset(lambda: None)

    @property
    def model(self) -> nn.Module | None:
        """As given, until it is freed."""
        return self._model()

    def attached(self) -> list[tuple[str, nn.Module, list[nn.Linear]]]:
        """[(name, the head's Module, its nn.Linears)]"""
        linears_by_head = {}
        for linear in self.linears:
            if own_fusion(linear) is self:
                head = linear._flce_name, enclosing_of(linear)
                linears_by_head.setdefault(head, []).append(linear)
        return [(*head, linears) for head, linears in linears_by_head.items()]

    def is_attached(self) -> bool:
        """Whether any head of it is fused now."""
        return self._is_attached

    def attach(self, named_heads):
        for name, module in named_heads:
            if reason := heads.attach(self, name, module):
                self.refused.append((name, reason))
            else:
                self._is_attached = True
                parent, _, child = name.rpartition(".")
                self._places.append((name, weakref.ref(self.model.get_submodule(parent)), child))
        attached = {module for _, module, _ in self.attached()}
        # The model, and what contains a head and takes labels: a wrapper may call it directly.
        for caller in self.model.modules() if attached else ():
            encloses_head = bool(attached & ({*caller.modules()} - {caller}))
            may_be_called = caller is self.model or (encloses_head and _label_positions(caller))
            if may_be_called and not hasattr(caller, "_orig_mod"):
                begin = functools.partial(self._begin, _label_positions(caller))
                self._hooks.append(caller.register_forward_pre_hook(begin, with_kwargs=True))
                self._hooks.append(caller.register_forward_hook(self._end, always_call=True))

    def _fuse_replacements(self):
        """Fuses the Modules that have replaced heads: resize_token_embeddings and
        set_output_embeddings make a new nn.Linear, PEFT wraps the head, or unwraps it."""
        for place in list(self._places):
            name, module = place[0], _module_at(place)
            if module is None:
                continue
            linears = (
                [module] if isinstance(module, nn.Linear) else heads.linears_of(self.model, module)
            )
            if all(own_fusion(x) is self and enclosing_of(x) is module for x in linears):
                continue
            for other, head, before in self.attached():
                if other == name:
                    heads.detach(head, before)
            for copied in [m for m in module.modules() if own_fusion(m) is not None]:
                heads.detach(copied, [copied])  # by PEFT, with a Fusion of its own
            if reason := heads.attach(self, name, module):
                self._places.remove(place)
                self._is_attached = bool(self._places)
                self.note_fall_back(f"{name} was replaced after flce.fuse: {reason}")

    def _begin(self, positions, model, args, kwargs):
        if model is self.model and self._label_stack:
            self._label_stack.clear()  # of a call that a KeyboardInterrupt ended without `_end`
        if not self._label_stack:
            self._guard_graph()
            self._note_call()
            if not is_compiling():
                self._fuse_replacements()
            # Traced, so that a graph is guarded by the classes of the Modules in these places.
            elif not all(isinstance(_module_at(p), heads.RequestMixin) for p in self._places):
                self._fuse_replacements()
        if self._tracks_labels():
            labels = [args[i] for i in positions if i < len(args)]
            labels += [value for name, value in kwargs.items() if _is_label(name)]
            self._label_stack.append(any(value is not None for value in labels))

    def _end(self, model, args, output):
        if not self._tracks_labels():
            return
        # Empty if a pre-hook before `_begin` raised.
        had_labels = self._label_stack.pop() if self._label_stack else False
        if not had_labels or self._label_stack or output is None:  # the forward raised
            return
        self._guard_graph()
        if self._has_missed_head():
            self.note_fall_back(f"forward with labels did not call {self._heads()}", _NOT_CALLED)

    def _tracks_labels(self):
        """Whether _begin and _end push to _label_stack. With when="always" it is read for warnings
        alone, and torch.compile refuses such a side effect in a checkpoint."""
        return self.when != "always" or not is_compiling()

    def _heads(self):
        return f"the head ({', '.join([name for name, _, _ in self._places])})"

    def is_to_defer(self):
        """Whether a head that is called now defers. Counts the call."""
        is_on = self._is_attached and (self.when == "always" or any(self._label_stack))
        self._guard_graph()
        self._note_head(is_on, torch.is_grad_enabled(), is_compiling())
        return is_on

    def note_optimizer_step(self, optimizer):
        """An optimizer has stepped. A fused one does not raise the versions of its parameters."""
        weights = [p for linear in self.linears for p in linear._parameters.values()]
        weights = [p for p in weights if p is not None and (p.requires_grad or p.grad is not None)]
        # Those of ZeRO-3 (ds_id) are copied from what its optimizers step.
        if _is_updated_by(weights, optimizer) or any(hasattr(p, "ds_id") for p in weights):
            self.last_optimizer_step = object()
        model = None if self.losses else self.model
        if model is not None and _is_updated_by(model.parameters(), optimizer):
            self.tell_if_unused()

    def tell_if_unused(self) -> None:
        """After a step of training: warns if flce has computed no loss, and knows no reason."""
        if self.losses or self.fallbacks or not self._is_attached:
            return
        if self._gave_logits:
            reason = f"{self._heads()} was called without labels in training"
            self.note_fall_back(reason, _UNLABELLED)
        elif self._model_was_called:
            self.note_fall_back(f"training did not call {self._heads()}", _NOT_CALLED)

    def remove(self) -> None:
        """Gives the Modules their classes back. Deferred logits that are still held can be read."""
        for hook in self._hooks:
            hook.remove()
        for _, module, linears in self.attached():
            heads.detach(module, linears)
        self._is_attached = False
        self._hooks, self._places, self._label_stack = [], [], []

    def summary(self) -> str:
        """The counts in a phrase."""
        count = sum(self.losses.values())
        parts = [f"{count} loss{'es' * (count > 1)} without logits"] if count else []
        parts += [f"{n} from logits because {reason}" for reason, n in self.fallbacks.items()]
        parts = parts or ["no loss computed yet", *["calls without labels"] * self._gave_logits]
        return ", ".join(parts)

    def __repr__(self):
        state = "attached" if self._is_attached else "removed"
        return f"<flce.fuse of {self._model_name}: {state}, {self.summary()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def note_loss(self, key):
        """A loss was computed without logits. key: of the record."""
        self._guard_graph()
        self._count_loss(key)

    def note_read(self, name):
        self._guard_graph()
        self._count_read(name)

    def note_fall_back(self, reason, consequence="the loss is computed from all logits"):
        """Counts that flce computes no loss because of `reason`, and warns of it the first time;
        strict: raises. Returns None, which callers return as "real logits are needed"."""
        if self._strict:
            raise RuntimeError(f"flce.fuse: strict=True: {reason}")
        self._guard_graph()
        self._count_fall_back(reason, consequence)

    def _guard_graph(self):
        """Under torch.compile: lets the graph that is traced run for this Fusion alone, as `id` of
        an object guards by it. Called before each of the functions below: they run while a graph is
        traced, and not when it runs, so for another Fusion it would count and warn of nothing."""
        id(self)

    # torch.compile calls the following while it traces, and does not trace them: a count would
    # compile anew at each step, a warning would break the graph.

    def _note_call(self):
        """The model is called."""
        if not torch.compiler.is_exporting():
            self._model_was_called, self._head_is_called = True, False

    def _note_head(self, is_on, has_grad, is_traced):
        """The head is called, and defers if is_on."""
        if torch.compiler.is_exporting():
            return
        if is_on:
            self._head_is_called = True
            self._is_in_graphs = self._is_in_graphs or is_traced
        elif has_grad:
            self._gave_logits = True

    def _has_missed_head(self):
        """Whether a call with labels, at its end, has not called the head. Graphs may have."""
        is_called = self._head_is_called or self._is_in_graphs or torch.compiler.is_exporting()
        return self._is_attached and not is_called

    def _count_loss(self, key):
        name = steps.describe(key)
        if not self.losses:
            logger.info(
                "flce.fuse: %s: first loss without logits (steps after the head: %s)",
                self._model_name,
                name,
            )
        is_new = name not in self.losses and len(self.losses) >= _MAX_RECORDS
        self.losses["other steps" if is_new else name] += 1

    def _count_read(self, name):
        self.reads[name] += 1

    def _count_fall_back(self, reason, consequence):
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            warn(
                f"flce.fuse: {self._model_name}: {reason}: {consequence}; "
                "flce.explain(model) lists such reasons"
            )

    for _function in (_fuse_replacements, _note_call, _note_head, _has_missed_head):
        torch_private.call_while_tracing(_function)
    for _function in (_count_loss, _count_read, _count_fall_back):
        torch_private.call_while_tracing(_function)


def _is_updated_by(parameters, optimizer):
    known = {id(p) for p in parameters}
    return any(id(p) in known for group in optimizer.param_groups for p in group["params"])


def _module_at(place):
    """The Module that is now in a head's place, without a wrapper of torch.compile."""
    _, parent, child = place
    module = parent()
    module = module._modules.get(child) if child and module is not None else module
    return getattr(module, "_orig_mod", module)


def _is_label(name):
    return name == "labels" or name.endswith("_labels")


def _label_positions(model):
    """Where the forward of a model takes labels, if by position."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    parameters = inspect.signature(model.forward).parameters
    return [i for i, name in enumerate(parameters) if _is_label(name)]


def _are_nested(model, other):
    """Whether a model was taken from the other one, or wraps it; or the other one is freed."""
    return other is None or model in {*other.modules()} or other in {*model.modules()}


def _heads_to_fuse(model, head):
    """[(name, Module)]. Raises ValueError if there is none, or one is fused already."""
    named_heads = heads.heads_of(model, head)
    if not named_heads:
        raise ValueError(
            "flce.fuse: model: expected one with a vocabulary head (get_output_embeddings() of it "
            'or of a model in it, or an nn.Linear whose name ends in "lm_head"), got '
            f"{type(model).__name__} without; head= names another; for logits by F.linear with "
            f"the weight of an nn.Embedding {heads.BY_HAND}"
        )
    for name, module in named_heads:
        while (fusion := heads.find_fusion_in(module)) is not None:
            if fusion.model is model:
                raise ValueError(
                    f"flce.fuse: {name}: it is fused already; call remove() of that handle first"
                )
            if not _are_nested(model, fusion.model):
                warn(
                    f"flce.fuse: {name} belongs to another model, {type(fusion.model).__name__}, "
                    "too, which is not fused any more"
                )
            fusion.remove()
    return named_heads


@show_options
def fuse(
    model: nn.Module,
    head: str | nn.Module | Sequence[str | nn.Module] | None = None,
    *,
    when: _When = "labels",
    strict: bool = False,
    **options: Unpack[FuseOptions],
) -> Fusion:
    """Makes a model compute its cross entropy by flce, without its logits, in place.

    The head's call returns a Tensor without memory, which records what docs/fuse.md lists; flce
    computes losses, log-probabilities, logsumexp and entropies of it, equal up to rounding; a mean
    over no valid row is 0. Other operations make the real logits first, and so does reading
    `outputs.logits`, before the weights change. Gives a handle with `remove()`, a context manager.

    Args:
        model: an nn.Module whose head is an nn.Linear, with PEFT's adapters or without; also
            torch.compile(model). A head that replaces a fused one is fused by the next call.
        head: the head or its name, or a list of these; None asks get_output_embeddings() of the
            model and of those in it, and takes every nn.Linear whose name ends in "lm_head".
        when: "labels": in forward calls with labels (an argument `labels` or `..._labels` other
            than None). "always": in every call of the head, for loops with losses of their own.
        strict: a RuntimeError in place of each warning that logits are made for a loss.
        **options: accum_dtype, logits_dtype, save, max_memory, accumulate_into, gradient,
            gradient_eps, z_loss, valid_bound. Ignored: save="grads" where the loss is per row;
            z_loss and valid_bound for log p, lse, entropies and divergences; gradient also for lse,
            entropies and log p of several classes; for divergences also logits_dtype, and save
            unless it is "stats".

    Raises:
        TypeError: the model is no nn.Module, or an option of another name.
        ValueError: nn.DataParallel, an unknown `head` or `when`, a bad value of an option, a model
            without a head, a head that is fused, or with strict=True (else a warning) cannot be.
        RuntimeError, from later calls: with strict=True logits made for a loss, or a training step
            without a loss by flce; logits read too late or written to: docs/errors.md has all.

    >>> model = nn.ModuleDict({"lm_head": nn.Linear(8, 16)})
    >>> flce.fuse(model, when="always")
    <flce.fuse of ModuleDict: attached, no loss computed yet>
    """
    if not isinstance(model, nn.Module):
        refuse("flce.fuse: model", "an nn.Module", type(model).__name__, TypeError)
    if isinstance(model, nn.DataParallel):
        raise ValueError(f"flce.fuse: {heads.DATA_PARALLEL}")
    while hasattr(model, "_orig_mod"):  # of torch.compile(model), which is no part of its graphs
        model = model._orig_mod
    if when not in ("labels", "always"):
        refuse("flce.fuse: when", '"labels" or "always"', repr(when))
    check_names("flce.fuse", _OPTIONS, options)
    composite.check_options(options, 1 << 20)
    fusion = Fusion(model, when, strict, options)
    fusion.attach(_heads_to_fuse(model, head))
    for name, reason in fusion.refused:
        if strict:
            fusion.remove()
            raise ValueError(f"flce.fuse: strict=True: {name}: {reason}")
        warn(f"flce.fuse: {name} is not fused: {reason}")
    for name, _, _ in fusion.attached():
        logger.info("flce.fuse: %s: head %s is fused, when=%r", type(model).__name__, name, when)
    return fusion


class Explanation:
    """The report of `flce.explain`: str() of it is text.

    model: the name of its class; is_fused: whether a head of it is. heads: [(name, its parts)];
    refused: [(name, reason)]; losses, reads, fallbacks: the handle's counts; summary: in a phrase.
    """

    model: str
    is_fused: bool
    heads: list[tuple[str, str]]
    refused: list[tuple[str, str]]
    losses: dict[str, int]
    reads: dict[str, int]
    fallbacks: dict[str, int]
    summary: str

    def __init__(self, model: nn.Module) -> None:
        self.model, fusion = type(model).__name__, heads.find_fusion_in(model)
        self.is_fused = fusion is not None
        known = {module: name for name, module in heads.heads_of(model)}
        for name, module, _ in fusion.attached() if self.is_fused else ():
            known.setdefault(module, name)
        self.heads, self.refused = [], []
        for module, name in known.items():
            reason = None if heads.find_fusion_in(module) else heads.why_not(model, module)
            entries = self.refused if reason else self.heads
            entries.append((name, reason or _composition(module)))
        refused = getattr(fusion, "refused", ())  # head= may name what heads_of does not find
        self.refused += [entry for entry in refused if entry[0] not in known.values()]
        self.summary = "" if fusion is None else fusion.summary()
        for name in ("losses", "reads", "fallbacks"):
            setattr(self, name, dict(getattr(fusion, name, {})))

    def __str__(self) -> str:
        lines = [f"{self.model}: {'fused' if self.is_fused else 'not fused'}"]
        lines += [f"  head {name}: {text}" for name, text in self.heads]
        lines += [f"  head {name}: left alone: {reason}" for name, reason in self.refused]
        if self.is_fused and not self.losses and not self.fallbacks:
            lines.append(f"  {self.summary}")
        for counts, text in (
            (self.losses, "loss without logits (steps after the head: {})"),
            (self.fallbacks, "fall-back: {}"),
            (self.reads, "logits read in addition to the loss: by {}"),
        ):
            lines += [f"  {count} x {text.format(name)}" for name, count in counts.items()]
        return "\n".join(lines)


def _composition(head):
    if isinstance(head, nn.Linear):
        shape = f"nn.Linear({head.in_features}, {head.out_features})"
        return f"{shape}, {head.weight.dtype}, bias {'no' if head.bias is None else 'yes'}"
    names = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    return f"{type(head).__name__} of {', '.join(names)}"


def explain(model: nn.Module) -> Explanation:
    """The Explanation, to print, of what `flce.fuse` did with an nn.Module (else TypeError).

    >>> flce.explain(nn.ModuleDict({"lm_head": nn.Linear(8, 16)})).is_fused
    False
    """
    if not isinstance(model, nn.Module):
        refuse("flce.explain: model", "an nn.Module", type(model).__name__, TypeError)
    return Explanation(model)
