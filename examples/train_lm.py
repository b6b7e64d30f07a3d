"""Trains a small language model twice, with the eager loss and with flce, and compares the two.

The text is the Python standard library's own source, as it lies on this machine; the vocabulary a
BPE of 32000 entries made from it. Same seed, same batches: in float32 the two loss curves have to
agree within 1e-3, else the exit status is 1. With sampled gradients nothing has to agree.

    python examples/train_lm.py                   # two CPU cores, a few minutes
    python examples/train_lm.py --device cuda     # a larger model, bfloat16 autocast
    python examples/train_lm.py --gradient sampled        # flce's gradient: an unbiased estimate
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm

import flce

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the choice of a backend that needs no display

VOCAB = 32000
SEED = 20260101
TOLERANCE = 1e-3
MIB = 2**20


@dataclass(frozen=True)
class Preset:
    text_bytes: int  # of source text to read
    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int
    steps: int
    learning_rate: float
    max_memory: str  # flce's bound for logits


PRESETS = {
    "cpu": Preset(8 * 10**6, 2, 256, 4, 8, 128, 40, 1e-3, "32MiB"),
    "cuda": Preset(24 * 10**6, 8, 1024, 16, 16, 512, 300, 3e-4, "256MiB"),
}


# ---- data ----


def read_corpus(limit):
    """The standard library's modules, in the order of their names, up to `limit` bytes."""
    root, texts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
        if size >= limit:
            break
    return texts


def train_tokenizer(texts):
    """A byte-level BPE; a corpus with fewer merges leaves the last ids of VOCAB unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=True)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokens(text_bytes, folder):
    """Token ids of the corpus, kept in `folder` with the tokenizer between runs."""
    cache = folder / f"tokens-{text_bytes}.npy"
    if not cache.exists():
        texts = read_corpus(text_bytes)
        print(f"corpus: {len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} MB; training the BPE")
        tokenizer = train_tokenizer(texts)
        tokenizer.save(str(folder / "tokenizer.json"))
        encoded = (tokenizer.encode(text).ids for text in tqdm(texts, "tokenising", unit="file"))
        numpy.save(cache, numpy.concatenate([numpy.array(ids, numpy.int32) for ids in encoded]))
    return torch.from_numpy(numpy.load(cache)).long()


def batches(tokens, preset, steps, device):
    """(input, target), both (batch, sequence), the same ones for every run."""
    generator = torch.Generator().manual_seed(SEED)
    length = preset.sequence + 1
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (preset.batch,), generator=generator)
        rows = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        yield rows[:, :-1].to(device), rows[:, 1:].contiguous().to(device)


# ---- model ----


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):  # (batch, sequence, hidden)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, sequence, hidden / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Gives the last hidden states; the head's weight (V, H) is the loss function's business."""

    def __init__(self, preset):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, preset.hidden)
        self.positions = nn.Embedding(preset.sequence, preset.hidden)
        self.blocks = nn.ModuleList(
            Block(preset.hidden, preset.heads) for _ in range(preset.layers)
        )
        self.norm = nn.RMSNorm(preset.hidden)
        self.head = nn.Linear(preset.hidden, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):  # (batch, sequence) -> (batch, sequence, hidden)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


# ---- the two losses ----


def eager_loss(hidden, weight, target, settings):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), target.flatten())


def flce_loss(hidden, weight, target, settings):
    return flce.linear_cross_entropy(hidden, weight, target, **settings)


LOSSES = {"eager": eager_loss, "flce": flce_loss}


def precision(device):
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def train(name, tokens, preset, steps, device, settings):
    """The losses of all steps, and the trained model."""
    torch.manual_seed(SEED)
    model = Transformer(preset).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), preset.learning_rate, betas=(0.9, 0.95))
    curve = []
    progress = tqdm(batches(tokens, preset, steps, device), f"training, {name}", steps)
    for ids, target in progress:
        with precision(device):
            loss = LOSSES[name](model(ids), model.head.weight, target, settings)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
        progress.set_postfix(loss=f"{curve[-1]:.4f}")
    return curve, model


# ---- measurements of a loss step: head and loss, forward and backward ----
# A loss is called as loss(hidden, weight, *others, settings). `state` are its tensors; hidden and
# weight get gradients. Names of losses are those of a report.


def loss_step(loss, state, device, settings):
    hidden, weight, *others = state
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with precision(device):
        loss(*leaves, *others, settings).backward()
    if device == "cuda":
        torch.cuda.synchronize()


def median_times(losses, state, device, settings, repeats=5):
    """Milliseconds of each loss; they take turns, so that both see the same machine."""
    times = {name: [] for name in losses}
    for repeat in tqdm(range(repeats + 1), "timing the loss step"):
        for name, loss in losses.items():
            start = time.perf_counter()
            loss_step(loss, state, device, settings)
            if repeat:  # the first one warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def process_memory(field):
    """Bytes: VmRSS what is resident now, VmHWM the most that was (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def resident_growth(loss, path, settings):
    """Bytes by which a loss step raises the peak of this process's resident memory."""
    state = torch.load(path)
    few = [one if one.shape[0] == VOCAB else one[:1, :8] for one in state]  # of the rows
    loss_step(loss, few, "cpu", settings)  # loads libraries
    gc.collect()
    before = process_memory("VmRSS")
    loss_step(loss, state, "cpu", settings)
    return process_memory("VmHWM") - before


def peak_memory(loss, state, device, settings, folder):
    """Bytes that a loss step needs at its peak in addition to its inputs, its gradients included.

    CPU: the growth of resident memory in a fresh process, which counts every library's memory.
    CUDA: the growth of torch.cuda.max_memory_allocated.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_step(loss, state, device, settings)
        return torch.cuda.max_memory_allocated() - before
    path = folder / "loss-step.pt"
    torch.save(tuple(tensor.detach().clone() for tensor in state), path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        growth = pool.apply(resident_growth, (loss, path, settings))
    path.unlink()
    return growth


def measure(losses, state, device, settings, folder):
    """{name: milliseconds of a loss step} and {name: bytes that it needs}."""
    times = median_times(losses, state, device, settings)
    named = tqdm(losses.items(), "measuring memory")
    return times, {name: peak_memory(one, state, device, settings, folder) for name, one in named}


# ---- report ----


def draw_bars(axes, values, unit, title):
    bars = axes.bar(list(values), list(values.values()), color=["C0", "C1"])
    axes.bar_label(bars, fmt=f"%.0f {unit}")
    axes.margins(y=0.1)
    axes.set(ylabel=unit, title=title)


def draw_measured(axes, times, memory):
    """Time and memory of the loss step, on two axes."""
    draw_bars(axes[0], times, "ms", "time of the loss step")
    megabytes = {name: size / MIB for name, size in memory.items()}
    draw_bars(axes[1], megabytes, "MiB", "its peak memory")


def plot(curves, times, memory, path):
    figure, (left, *right) = pyplot.subplots(
        1, 3, figsize=(13, 4.5), width_ratios=(2, 1, 1), layout="constrained"
    )
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        left.plot(range(1, len(curve) + 1), curve, style, label=name, linewidth=2)
    left.set(xlabel="step", ylabel="loss", title="training loss, same seed and batches")
    left.legend()
    left.grid(alpha=0.3)
    draw_measured(right, times, memory)
    figure.savefig(path, dpi=120)


def largest_difference(expected, got):
    """Of two loss curves, relative; NaN if there is one in them."""
    expected, got = numpy.array(expected), numpy.array(got)
    return float(numpy.max(numpy.abs(got - expected) / numpy.abs(expected)))


def report(curves, times, memory, preset, device):
    """Prints the comparison; the largest relative difference of the two curves."""
    difference = largest_difference(curves["eager"], curves["flce"])
    rows = preset.batch * preset.sequence
    print(f"\nhead: {rows} tokens x {preset.hidden} hidden x {VOCAB} entries, {device}")
    for name, curve in curves.items():
        print(
            f"{name:>6}: last loss {curve[-1]:.5f}, loss step {times[name]:.1f} ms, "
            f"peak memory {memory[name] / MIB:.0f} MiB"
        )
    print(f"largest relative difference of the loss curves: {difference:.2e}")
    return difference


def loss_settings(preset, arguments):
    """flce's options; those of the sampled gradient only where it is asked for."""
    settings = {"max_memory": preset.max_memory}
    if arguments.gradient == "sampled":
        settings |= {"gradient": "sampled", "gradient_eps": arguments.gradient_eps}
    return settings


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=PRESETS, default="cpu")
    parser.add_argument("--steps", type=int, help="training steps of each run (default: 40, 300)")
    parser.add_argument(
        "--gradient", choices=["exact", "sampled"], default="exact", help="flce's, of the loss"
    )
    parser.add_argument("--gradient-eps", type=float, default=2**-6, help="of --gradient sampled")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all results")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    device, folder = arguments.device, arguments.out
    preset = PRESETS[device]
    steps = preset.steps if arguments.steps is None else arguments.steps
    settings = loss_settings(preset, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = load_tokens(preset.text_bytes, folder)
    print(f"{len(tokens) / 1e6:.2f} million tokens, {steps} steps on {device}")

    curves = {}
    for name in LOSSES:
        curves[name], model = train(name, tokens, preset, steps, device, settings)
    ids, target = next(batches(tokens, preset, 1, device))
    with torch.no_grad(), precision(device):
        state = (model(ids), model.head.weight, target)
    times, memory = measure(LOSSES, state, device, settings, folder)

    picture = folder / "losses.png"
    plot(curves, times, memory, picture)
    difference = report(curves, times, memory, preset, device)
    print(f"picture: {picture}")
    # Sixteen-bit rounding or samples alone part two runs further than this; NaN fails.
    exact = device == "cpu" and arguments.gradient == "exact"
    if exact and not difference < TOLERANCE:
        print(f"the loss curves differ by more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
