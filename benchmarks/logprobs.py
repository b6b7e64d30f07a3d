"""Losses of log-probabilities: time of a step as a ratio to the three bare GEMMs, peak memory in
addition to the operands, and errors against float32 (CUDA) or float64.

    python benchmarks/logprobs.py head 8192x4096x151936 --json record.json
    python benchmarks/logprobs.py head --peers FOLDER   # others too, see rl_peers.py

policy: PPO's clipped loss; entropy: the mean entropy times 0.01 is subtracted; classes: a sum over
the log-probabilities of K classes of each row, given or the largest. `sampled` estimates its
gradients, so its errors are those of one draw.
"""

import argparse
import functools
import json
import pathlib

import measure
import problem as problems
import rl_peers
import torch
import torch.nn.functional as F

import flce

REFERENCE_ROWS = 256
KINDS = ("policy", "entropy", "classes")
COUNT = 64  # classes of a row


def policy_loss(problem, logprobs, entropy, rows=slice(None)):
    """The loss of some rows; `upstream` serves as the advantages."""
    old = -torch.full_like(logprobs, problem.w.shape[0]).log()  # of a uniform policy
    ratio, advantage = (logprobs - old).clamp(max=3.0).exp(), problem.upstream[rows]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    loss = loss if entropy is None else loss - 0.01 * entropy.sum()
    return loss / problem.y.numel()


def eager(x, w, y, entropy):
    """(log-probabilities, entropies or None) from all logits."""
    log_p = F.linear(x, w).float().log_softmax(-1)
    logprobs = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1) if entropy else None


def of_logprobs(function, **options):
    def loss(problem):
        return policy_loss(problem, *function(problem.x, problem.w, problem.y, **options))

    return loss


def of_chunks(**options):
    def loss(problem):
        loss_fn = functools.partial(policy_loss, problem)
        return flce.linear_loss(problem.x, problem.w, problem.y, loss_fn, **options)

    return loss


def ids_of(problem):
    """The target's class and random others."""
    generator = torch.Generator(problem.y.device).manual_seed(1)
    classes, rows = problem.w.shape[0], problem.y.numel()
    ids = torch.randint(classes, (rows, COUNT), device=problem.y.device, generator=generator)
    ids[:, 0] = problem.y
    return ids


def class_loss(logprobs):
    """With weights that fall from class to class of a row."""
    weights = 1.0 / torch.arange(1, COUNT + 1, device=logprobs.device)
    return -(logprobs * weights).sum() / logprobs.shape[0]


def of_classes(problem):
    return class_loss(flce.linear_logprobs_at(problem.x, problem.w, ids_of(problem)))


def of_largest(problem):
    made = flce.linear_logprobs(problem.x, problem.w, problem.y, entropy=None, return_topk=COUNT)
    return class_loss(made[2].logprobs)


def with_largest(problem):
    """The policy loss; the largest log-probabilities are values."""
    made = flce.linear_logprobs(problem.x, problem.w, problem.y, entropy=None, return_topk=COUNT)
    return policy_loss(problem, *made[:2])


def contestants(kind, peers):
    """(loss, what its gradients are compared with) by name."""
    if kind == "classes":
        plain = of_logprobs(flce.linear_logprobs, entropy=None)
        return {
            "linear_logprobs": (plain, "policy"),
            f"at {COUNT} ids": (of_classes, "ids"),
            f"top {COUNT}": (with_largest, "policy"),
            f"top {COUNT}, differentiated": (of_largest, "largest"),
        }
    entropy = kind == "entropy"
    wants = "differentiable" if entropy else None
    made = {
        "eager": of_logprobs(eager, entropy=entropy),
        "compile": of_logprobs(torch.compile(eager), entropy=entropy),
        "linear_logprobs": of_logprobs(flce.linear_logprobs, entropy=wants),
        "linear_loss": of_chunks(entropy=wants),
        "linear_loss 512MiB": of_chunks(entropy=wants, max_memory="512MiB"),
    }
    made["linear_logprobs sampled"] = of_logprobs(
        flce.linear_logprobs, entropy=wants, gradient="sampled"
    )
    if peers:
        for name, function in rl_peers.functions(peers).items():
            made[name] = of_logprobs(function, entropy=entropy)
        if not entropy:
            made["Liger's GRPO"] = rl_peers.liger_grpo(peers)
    return {name: (loss, kind if name != "Liger's GRPO" else None) for name, loss in made.items()}


def step(loss_of):
    def run(problem):
        loss = loss_of(problem)
        return loss.detach(), *torch.autograd.grad(loss, (problem.x, problem.w))

    return run


def loss_of_rows(problem, kind, log_p, rows):
    """The part of the loss of some rows, from all their log-probabilities."""
    if kind in ("ids", "largest"):
        ids = ids_of(problem)[rows] if kind == "ids" else log_p.detach().topk(COUNT).indices
        return class_loss(log_p.gather(-1, ids)) * len(log_p) / problem.y.numel()
    logprobs = log_p.gather(-1, problem.y[rows].unsqueeze(-1)).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1) if kind == "entropy" else None
    return policy_loss(problem, logprobs, entropies, rows)


def truth(problem, kind, wide):
    loss, dx = 0.0, torch.empty_like(problem.x, dtype=wide)
    w = problem.w.detach().to(wide).requires_grad_()
    dw = torch.zeros_like(w)
    with problems.exact_products():
        for begin in range(0, len(dx), REFERENCE_ROWS):
            rows = slice(begin, begin + REFERENCE_ROWS)
            x = problem.x.detach()[rows].to(wide).requires_grad_()
            part = loss_of_rows(problem, kind, F.linear(x, w).log_softmax(-1), rows)
            dx[rows], grad_w = torch.autograd.grad(part, (x, w))
            dw += grad_w
            loss += part.detach().double()
    return loss, dx, dw


def bench(name, shape, kind, options):
    upstream = torch.empty(shape.tokens, device=options.device)
    problem = problems.make_problem(shape, options.device, options.dtype, upstream=upstream)
    problem.refresh()
    floor = functools.partial(problems.bare_products, pass_name="step")
    runs, rows, of_kind = {"GEMMs": floor}, [{"contestant": "GEMMs"}], {}
    for label, (loss, compared) in contestants(kind, options.peers).items():
        runs[label] = step(loss)
        rows.append({"contestant": label})
        of_kind.setdefault(compared, []).append(rows[-1])
    for row in rows:
        runs[row["contestant"]](problem)
        run = runs[row["contestant"]]
        row["peak_bytes"] = measure.peak_extra_bytes(run, problem, options.device)
    for compared, group in of_kind.items():
        if compared is None:
            continue
        exact = truth(problem, compared, problems.wide_dtype(options.device))
        for row in group:
            row["errors"] = problems.errors(runs[row["contestant"]](problem), exact)
        del exact
    measure.time_rows(rows, runs, problem, options.device, options.rounds)
    for row in rows:
        row |= {"shape": name, "kind": kind}
        print(line(row), flush=True)
    return rows


def line(row):
    text = f"{row['shape']:18} {row['kind']:8} {row['contestant']:24}"
    text += f" {row['ms']:8.2f} ms {row['over_gemms']:6.3f}x {row['peak_bytes'] / 1e9:6.2f} GB"
    return text + problems.error_columns(row)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("shapes", nargs="*", default=["head" if cuda else "cpu-small"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--peers", type=pathlib.Path, help="a folder with unpacked wheels")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    options.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    facts = measure.machine(options.device)
    facts |= {"dtype": str(options.dtype).removeprefix("torch."), "rounds": options.rounds}
    print(measure.described(facts))
    rows = []
    for text in options.shapes:
        for kind in options.kinds:
            rows += bench(*problems.named_shape(text), kind, options)
            if options.json:
                record = json.dumps({"machine": facts, "rows": rows}, indent=1)
                options.json.write_text(record + "\n")


if __name__ == "__main__":
    main()
