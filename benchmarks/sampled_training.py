#!/usr/bin/env python3
"""Trains a decoder-only transformer with exact and with sampled gradients of the loss, on one GPU.

A run is GRADIENT:SEED, GRADIENT is `exact` or the gradient_eps of gradient="sampled". Runs of one
seed have the same initial weights and the same batches. The validation loss is exact in every run.

    python benchmarks/sampled_training.py --make-corpus --corpus corpus.npy
    python benchmarks/sampled_training.py --corpus corpus.npy --runs exact:0,2^-6:0 --json new.json
    python benchmarks/sampled_training.py --table new.json
    python benchmarks/sampled_training.py --plot new.json other.json --out training.svg

With --finetune STEPS the model of each seed is trained with exact gradients first. A run continues
from it for STEPS steps on --other, text of another kind, at a fifth of the learning rate, with the
gradient of its name; its record has the validation losses on both texts.

    python benchmarks/sampled_training.py --make-corpus --corpus corpus.npy --other other.npy
    python benchmarks/sampled_training.py --corpus corpus.npy --other other.npy --finetune 300 \
        --runs exact:0,2^-8:0,2^-6:0,exact:1,2^-8:1,2^-6:1 --json finetuned.json

The record is written after every run; a run that it already holds is skipped, so a command that
was stopped, or that --budget stopped (exit status 3), continues when it is repeated.

On CUDA the first steps run as they are, then one step is captured as a CUDA graph: batch, forward,
backward, clipping, optimizer and the next learning rate, all read from tables on the device.
"""

import argparse
import copy
import gc
import json
import math
import pathlib
import statistics
import sys
import time

import measure
import torch
import torch.nn.functional as F
import training_plots
from corpus import Corpus, make_corpus
from decoder import Transformer, precision
from torch import nn
from training_plots import described, final, load_runs

import flce

EAGER_STEPS = 3  # before the capture: they make the optimizer's state and load every kernel
WINDOW = 50  # steps; the training curve holds the means of windows
FINAL_RATE = 0.1  # the learning rate at the end, over its peak
FINETUNING_RATE = 0.2  # that of --finetune, over --lr
BINS = (0, 1, 10, 100, 1000, 10000)  # lower ends, in occurrences of a class in the training tokens
KEPT = (4, 6, 8)  # entries a row are computed for 2^-4, 2^-6, 2^-8
KEPT_ROWS = 2048
SAVED_ROWS = 8192
DEFAULTS = {"adamw": {"lr": 1e-3, "weight_decay": 0.1}, "sgd": {"lr": 0.3, "weight_decay": 0.0}}
DEFAULTS["shared-moment"] = DEFAULTS["adamw"]
WIDTHS = {False: 512, True: 640}  # untied and tied: 51.9M and 50.3M parameters


# ---- training ----


def rates(options):
    """The learning rate of every step: linear warm-up times cosine."""
    steps = torch.arange(options.steps, dtype=torch.float64)
    cosine = 0.5 * (1 + torch.cos(math.pi * steps / options.steps))
    warmup = torch.clamp((steps + 1) / options.warmup, max=1)
    return (options.lr * warmup * (FINAL_RATE + (1 - FINAL_RATE) * cosine)).float()


def make_optimizers(options, model, rate):
    cuda, betas = options.device == "cuda", (0.9, 0.95)
    common = {"lr": rate, "weight_decay": options.weight_decay}
    parameters, heads = list(model.parameters()), []
    if options.optimizer == "sgd":
        return [torch.optim.SGD(parameters, momentum=0.9, fused=cuda or None, **common)]
    if options.optimizer == "shared-moment":
        parameters = [one for one in parameters if one is not model.head]
        heads = [SharedMomentAdamW(model.head, betas=betas, **common)]
    fused = {"fused": cuda or None, "capturable": cuda}
    return [torch.optim.AdamW(parameters, betas=betas, **fused, **common), *heads]


class SharedMomentAdamW(torch.optim.Optimizer):
    """AdamW of one matrix (classes, width) whose second moment is the mean over the classes, as in
    Coupled Adam (arXiv 2502.08441)."""

    def __init__(self, matrix, lr, weight_decay, betas, eps=1e-8):
        super().__init__([matrix], {"lr": lr})
        self.matrix, self.weight_decay, self.betas, self.eps = matrix, weight_decay, betas, eps
        self.count = torch.zeros((), device=matrix.device)
        moments = {"exp_avg": torch.zeros_like(matrix)}
        self.mean_square = torch.zeros_like(matrix[0])
        self.state[matrix] = moments | {"exp_avg_sq": self.mean_square.expand_as(matrix)}

    @torch.no_grad()
    def step(self):
        lr, first = self.param_groups[0]["lr"], self.state[self.matrix]["exp_avg"]
        self.count += 1
        first.lerp_(self.matrix.grad, 1 - self.betas[0])
        self.mean_square.lerp_(self.matrix.grad.square().mean(0), 1 - self.betas[1])
        corrected = self.mean_square / (1 - self.betas[1] ** self.count)
        scale = lr / ((1 - self.betas[0] ** self.count) * (corrected.sqrt() + self.eps))
        self.matrix.mul_(1 - lr * self.weight_decay).sub_(first * scale)


class Training:
    """One run: model, optimizer, and the tables that a step reads at its index."""

    def __init__(self, options, corpus, eps, seed):
        self.options, self.corpus = options, corpus
        device = options.device
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = Transformer(options)
            self.index = torch.zeros(1, dtype=torch.int64)
            self.losses, self.norms = torch.zeros(options.steps), torch.zeros(options.steps)
            self.span = torch.arange(options.sequence + 1)
            # Incremented after every backward: each micro-batch has a draw of its own.
            self.gradient_seed = torch.tensor(seed << 32)
        sampled = {"gradient": "sampled", "gradient_eps": eps, "gradient_seed": self.gradient_seed}
        self.settings = {} if eps is None else sampled
        generator = torch.Generator().manual_seed(seed)
        shape = (options.steps, options.accumulate, options.batch)
        last = len(corpus.train) - options.sequence - 1
        self.starts = torch.randint(last, shape, generator=generator).to(device)
        self.rates = rates(options).to(device)
        self.rate = self.rates[0].clone()
        self.optimizers = make_optimizers(options, self.model, self.rate)
        self.graph, self.done = None, 0

    def loss(self, ids, target, **settings):
        with precision(self.options.device):
            hidden = self.model(ids)
            return flce.linear_cross_entropy(hidden, self.model.head, target, **settings)

    def clip(self):
        """The norm of all gradients, which have norm 1 afterwards if it was larger."""
        if self.options.clip:
            return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return nn.utils.get_total_norm([one.grad for one in self.model.parameters()])

    def step(self):
        """Reads and writes tensors of fixed addresses only, without synchronisation."""
        self.rate.copy_(self.rates.index_select(0, self.index)[0])
        starts = self.starts.index_select(0, self.index)[0]  # (accumulate, batch)
        total = torch.zeros_like(self.losses[:1])
        for micro in range(self.options.accumulate):
            batch = self.corpus.train[starts[micro, :, None] + self.span].long()
            loss = self.loss(batch[:, :-1], batch[:, 1:], **self.settings) / self.options.accumulate
            loss.backward()
            total += loss.detach()
            self.gradient_seed += 1
        norm = self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.losses.index_copy_(0, self.index, total)
        self.norms.index_copy_(0, self.index, norm.detach().view(1))
        self.index += 1

    def advance(self, steps):
        for _ in range(steps):
            if self.options.device == "cuda" and self.done == EAGER_STEPS:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                    self.step()
            if self.graph:
                self.graph.replay()
            else:
                self.step()
            self.done += 1


def synchronised(device):
    """The host's clock, with the device's work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(training):
    """The record of one run."""
    options = training.options
    begin = synchronised(options.device)
    validation, times = [], []
    while training.done < options.steps:
        # The eager steps and the capture are a part of their own: it is not timed.
        stop = min(options.evaluate * (training.done // options.evaluate + 1), options.steps)
        stop = min(EAGER_STEPS + 1, stop) if training.done <= EAGER_STEPS else stop
        start, first = synchronised(options.device), training.done
        training.advance(stop - first)
        if first > EAGER_STEPS:
            times.append((synchronised(options.device) - start) / (stop - first))
        if stop % options.evaluate == 0 or stop == options.steps:
            losses = evaluate(training)
            validation.append({"step": stop, "loss": losses.double().mean().item()})
            validation[-1]["kept"] = kept_entries(training)
    seconds = statistics.median(times)
    row = {
        "parameters": sum(one.numel() for one in training.model.parameters()),
        "validation": validation,
        "window": WINDOW,
        "train": windows(training.losses),
        "gradient_norm": windows(training.norms),
        "clipped_share": (training.norms > 1).double().mean().item(),
        "classes": by_frequency(training, losses),
        "step_ms": 1e3 * seconds,
        "tokens_per_s": training.starts[0].numel() * options.sequence / seconds,
    }
    row["wall_s"] = synchronised(options.device) - begin
    if options.save_operands:
        save_operands(training, options.save_operands)
    return row


class Finetuning:
    """The runs of --finetune: the exactly trained model of a seed, and what continues from it."""

    def __init__(self, options, first, other):
        self.options, self.first, self.other = options, first, other
        self.tuned = copy.copy(options)
        self.tuned.steps, self.tuned.lr = options.finetune, FINETUNING_RATE * options.lr
        self.tuned.warmup = max(1, min(options.warmup, options.finetune // 10))
        self.seed = self.weights = self.trained = None

    def prepare(self, seed):
        if self.seed == seed:
            return
        self.weights = None
        training = Training(self.options, self.first, None, seed)
        row = train(training)
        self.trained = {"wall_s": row["wall_s"], "first": final(row)}
        self.trained["other"] = mean_loss(training, self.other)
        state = training.model.state_dict()
        self.seed, self.weights = seed, {name: one.clone() for name, one in state.items()}

    def run(self, eps, seed):
        """The record of one run; "trained": losses of the model that it continues from; "first":
        its own loss on the first text. "validation" is on the other text."""
        self.prepare(seed)
        gc.collect()  # the graph of the training before
        training = Training(self.tuned, self.other, eps, seed)
        training.model.load_state_dict(self.weights)
        row = train(training)
        return row | {"trained": self.trained, "first": mean_loss(training, self.first)}


def windows(values):
    return [part.mean().item() for part in values.double().cpu().split(WINDOW)]


# ---- figures of a model ----


def mean_loss(training, corpus):
    return evaluate(training, corpus).double().mean().item()


@torch.no_grad()
def evaluate(training, corpus=None):
    """The exact loss of every held-out token of the training's corpus, or of another."""
    size, corpus = 4 * training.options.batch, corpus or training.corpus
    pairs = zip(corpus.ids.split(size), corpus.targets.split(size), strict=True)
    losses = [training.loss(ids, target, reduction="none").flatten() for ids, target in pairs]
    return torch.cat(losses)


@torch.no_grad()
def save_operands(training, path):
    """The loss's operands of SAVED_ROWS held-out tokens, for bench.py --operands."""
    count = SAVED_ROWS // training.options.sequence
    with precision(training.options.device):
        hidden = training.model(training.corpus.ids[:count]).flatten(0, 1)
    target = training.corpus.targets[:count].flatten()
    torch.save({"input": hidden, "weight": training.model.head.detach(), "target": target}, path)


@torch.no_grad()
def kept_entries(training):
    """The expected number of classes that a row keeps without its target, for each of KEPT."""
    rows = max(1, KEPT_ROWS // training.options.sequence)
    target = training.corpus.targets[:rows].reshape(-1, 1)
    with precision(training.options.device):
        hidden = training.model(training.corpus.ids[:rows])
        logits = F.linear(hidden, training.model.head).flatten(0, 1)
    p = logits.float().softmax(1).scatter_(1, target, 0.0)
    return {f"2^-{k}": (p * 2**k).clamp_(max=1.0).sum(1).mean().item() for k in KEPT}


@torch.no_grad()
def by_frequency(training, losses):
    """Means over the classes of each bin of BINS: the head's rows, Adam's moments of them, and the
    validation loss of their targets.

    `common_norm` is the norm of the rows' mean: what a push of all rows in one direction adds up
    to. `update` is the mean of |exp_avg| / sqrt(exp_avg_sq): Adam's step over the learning rate.
    """
    counts, weight, bins = training.corpus.counts, training.model.head, []
    state = next(one.state[weight] for one in training.optimizers if weight in one.state)
    targets = training.corpus.targets.flatten()
    for lower, upper in zip(BINS, (*BINS[1:], math.inf), strict=True):
        chosen = (counts >= lower) & (counts < upper)
        if not chosen.any():
            continue
        rows, mine = weight[chosen].double(), chosen[targets]
        row = {
            "at_least": lower,
            "classes": int(chosen.sum()),
            "heldout_targets": int(mine.sum()),
            "row_norm": rows.norm(dim=1).mean().item(),
            "common_norm": rows.mean(0).norm().item(),
        }
        if mine.any():
            row["validation"] = losses[mine].double().mean().item()
        if "exp_avg_sq" in state:
            first, second = (state[name][chosen].double() for name in ("exp_avg", "exp_avg_sq"))
            row["second_moment"] = second.mean().item()
            row["second_moment_root"] = second.sqrt().mean().item()
            row["first_moment_norm"] = first.norm(dim=1).mean().item()
            row["update"] = (first.abs() / (second.sqrt() + 1e-8)).mean().item()
        bins.append(row)
    return bins


# ---- record ----


def parse_runs(text):
    """[(gradient, eps or None, seed)] of a list such as exact:0,2^-6:1."""
    runs = []
    for part in text.split(","):
        gradient, _, seed = part.partition(":")
        base, power, exponent = gradient.partition("^")
        try:
            eps = None if gradient == "exact" else float(base) ** int(exponent if power else 1)
            runs.append((gradient, eps, int(seed)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected as exact:0,2^-6:1, got {part!r}") from None
    return runs


def configuration(options, corpus, other):
    names = "layers width heads vocab tied batch sequence accumulate steps warmup optimizer lr"
    names += " weight_decay clip heldout evaluate"
    chosen = {name: getattr(options, name) for name in names.split()}
    if other:
        chosen |= {"finetune": options.finetune, "other": other.digest}
    return chosen | {"corpus": corpus.digest}


def store(path, runs):
    """Writes a new file and renames it: a process killed in between leaves the old record."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    fresh.replace(path)


def expected_seconds(runs, chosen, facts, trains):
    """The longest of the runs of this configuration on this GPU, 0 without one. `trains`: with the
    training that precedes a fine-tuning."""
    gpu = facts.get("gpu")
    same = (r for r in runs if r["configuration"] == chosen and r["machine"].get("gpu") == gpu)
    before = (run["trained"]["wall_s"] if trains and "trained" in run else 0.0 for run in runs)
    return max((run["wall_s"] for run in same), default=0.0) + max(before, default=0.0)


def one_line(run):
    kept = run["validation"][-1]["kept"].get(run["gradient"])
    entries = f"  {kept:.1f} entries a row" if kept else ""
    if "first" in run:
        entries += f"  first text {run['trained']['first']:.4f}, then {run['first']:.4f}"
    return (
        f"{run['gradient']:>6}:{run['seed']}  validation {final(run):.4f}  "
        f"training {run['train'][-1]:.4f}  step {run['step_ms']:.2f} ms  "
        f"{run['tokens_per_s']:.0f} tokens/s  {run['wall_s']:.1f} s  "
        f"norm above 1 in {run['clipped_share']:.0%} of steps{entries}"
    )


def run_all(options):
    """Makes the runs that the record does not hold; False if the budget ended before the last."""
    begin = time.perf_counter()
    corpus = Corpus(options, options.corpus)
    other = Corpus(options, options.other) if options.finetune else None
    finetuning = Finetuning(options, corpus, other) if other else None
    chosen, facts = configuration(options, corpus, other), measure.machine(options.device)
    print(f"{measure.described(facts)}\n{described(chosen)}", flush=True)
    runs = load_runs([options.json]) if options.json and options.json.exists() else []
    for gradient, eps, seed in options.runs:
        key = {"gradient": gradient, "eps": eps, "seed": seed, "configuration": chosen}
        if any(key.items() <= run.items() for run in runs):
            print(f"{gradient:>6}:{seed}  is in {options.json}")
            continue
        trains = not finetuning or finetuning.seed != seed
        needed = 1.05 * expected_seconds(runs, chosen, facts, trains)
        if options.budget and time.perf_counter() - begin + needed > options.budget:
            print(f"budget of {options.budget:g} s: not started from {gradient}:{seed} on")
            return False
        run = key | {"machine": measure.machine(options.device)}
        if finetuning:
            run |= finetuning.run(eps, seed)
        else:
            run |= train(Training(options, corpus, eps, seed))
        runs.append(run)
        if options.json:
            store(options.json, runs)
        print(one_line(run), flush=True)
        gc.collect()  # the graph's memory, before the next run takes its own
    return True


# ---- command ----


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    path, add = pathlib.Path, parser.add_argument
    add("--corpus", type=path, help="tokens, uint16 or int32 in a .npy file")
    add("--other", type=path, help="other text, of --finetune")
    add("--finetune", type=int, default=0, metavar="STEPS", help="on --other, from a trained model")
    add("--make-corpus", action="store_true", help="write these files, by the package tokenizers")
    add("--corpus-tokens", type=int, default=13_400_000, help="at most, of --make-corpus")
    add("--runs", type=parse_runs, default="exact:0,2^-6:0", help="GRADIENT:SEED, by commas")
    add("--json", type=path, help="the record: runs are added to it")
    add("--save-operands", type=path, help="hidden states and head of the last run: torch.save")
    add("--budget", type=float, help="seconds: start no run that would end after them")
    add("--table", type=path, nargs="+", metavar="JSON", help="print the tables of these records")
    add("--plot", type=path, nargs="+", metavar="JSON", help="the same, and draw them")
    add("--out", type=path, default=path("sampled-training.svg"), help="the picture of --plot")
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    shared = "shared-moment: AdamW, the head's second moment a mean over the classes"
    add("--optimizer", choices=list(DEFAULTS), default="adamw", help=shared)
    add("--lr", type=float, help="at its peak; default 1e-3, sgd 0.3")
    add("--weight-decay", type=float, help="default 0.1, sgd 0")
    add("--no-clip", dest="clip", action="store_false", help="do not clip gradients at norm 1")
    add("--tied", action="store_true", help="one table for the tokens and the head")
    add("--accumulate", type=int, default=1, help="micro-batches a step")
    add("--steps", type=int, default=3500)
    add("--warmup", type=int, default=100, help="steps in which the learning rate rises")
    add("--evaluate", type=int, default=500, help="steps between validations")
    add("--heldout", type=int, default=2**18, help="tokens of the validation")
    add("--layers", type=int, default=6)
    add("--width", type=int, help="default 512, tied 640: 50M parameters or more")
    add("--heads", type=int, help="default: of 64 columns each")
    add("--vocab", type=int, default=32000)
    add("--batch", type=int, default=16, help="sequences of a micro-batch")
    add("--sequence", type=int, default=512)
    return parser


def parse_options(arguments=None):
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.corpus is None and not (options.plot or options.table):
        parser.error("--corpus: expected a file")
    if options.finetune and options.other is None:
        parser.error("--other: expected a file with --finetune")
    for name, value in DEFAULTS[options.optimizer].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, steps in (("--steps", options.steps), ("--finetune", options.finetune or math.inf)):
        if steps <= EAGER_STEPS + 1:
            parser.error(f"{name}: expected more than {EAGER_STEPS + 1}, got {steps}")
    if options.tied and options.optimizer == "shared-moment":
        parser.error("--optimizer shared-moment: for a head of its own, not with --tied")
    options.width = options.width or WIDTHS[options.tied]
    options.heads = options.heads or options.width // 64
    return options


def main(arguments=None):
    options = parse_options(arguments)
    if options.table:
        return training_plots.print_tables(training_plots.groups(load_runs(options.table)))
    if options.plot:
        return training_plots.plot(options.plot, options.out)
    if options.make_corpus:
        limit = options.corpus_tokens
        return make_corpus(options.corpus, options.other, options.vocab, limit)
    if options.device == "cpu":
        return 0 if run_all(options) else 3
    with torch.cuda.stream(torch.cuda.Stream()):  # a capture refuses the default stream
        return 0 if run_all(options) else 3


if __name__ == "__main__":
    sys.exit(main())
