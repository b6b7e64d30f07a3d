"""flce.linear_divergence with a sharded vocabulary. On ranks over gloo."""

import cases
import torch
from test_vocab_cases import HIDDEN, TOKENS, UNEVEN, VOCAB, make
from vocab_ranks import on

import flce

KINDS = ("forward_kl", "reverse_kl", "jsd")
# Options that vocab_cases.make makes tensors of, or that change the case.
MADE = ("softcap", "logit_scale", "temperature", "token_weight", "ignored", "valid_vocab")
OPTIONS = (
    {"reduction": "sum", "beta": 0.3},
    {"softcap": 3.0, "temperature": "rows", "teacher_temperature": 2.0, "ignored": 4},
    {"reduction": "none", "token_weight": True, "save": "stats"},
    {"hard_weight": 0.3, "logit_scale": -0.5, "ignored": 3, "num_items": 5.0},
    {"valid_vocab": 30, "teacher_softcap": 2.0, "max_memory": 5000},
)


def teacher_of(tokens, dtype):
    """The operands of a teacher of another hidden size, and its logits."""
    case = cases.make_case(tokens, HIDDEN // 2, VOCAB, dtype=dtype, std=2.0, bias=True, seed=9)
    bias = case.options["linear_bias"]
    named = {
        "teacher_input": case.input,
        "teacher_weight": case.linear_weight,
        "teacher_bias": bias,
    }
    return named, {"teacher_logits": case.input @ case.linear_weight.T + bias}


def outcome(input, linear_weight, target, *, upstream, linear_bias, **options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (input, linear_weight)]
    bias = linear_bias.detach().clone().requires_grad_()
    loss = flce.linear_divergence(*leaves, target=target, linear_bias=bias, **options)
    grads = torch.autograd.grad(loss, (*leaves, bias), upstream.to(loss.dtype).reshape(loss.shape))
    return loss.detach(), *grads


@on(2, 4)
def test_divergences(ranks):
    """A whole teacher on each rank, a shard of it, its logits; uneven shards, one without classes;
    x sharded by tokens."""
    uneven = UNEVEN if ranks.ranks == 4 else (0, VOCAB)
    calls = [(None, False), (uneven, False), (None, True)]
    for number, options in enumerate(OPTIONS):
        for kind, (ends, sequence) in zip(
            KINDS, calls[number % 3 :] + calls[: number % 3], strict=True
        ):
            tokens = 24 if sequence else TOKENS
            case = make(tokens=tokens, **{k: v for k, v in options.items() if k in MADE})
            rest = {k: v for k, v in options.items() if k not in MADE}
            rest |= {"divergence": kind, **case.options}
            rest.pop("ignore_index", None)
            head, logits = teacher_of(tokens, case.dtype)
            many = tokens if options.get("reduction") == "none" else 1
            upstream = torch.linspace(-1.0, 2.0, many).double()
            call = {"upstream": upstream, **rest}
            truth = outcome(case.input, case.linear_weight, case.target, **call, **head)
            own, classes = ranks.divided(case, ends, sequence), ranks.classes(VOCAB, ends)
            call |= {"linear_bias": own.options["linear_bias"]}
            call["vocab_parallel"] = ranks.parallel(VOCAB, ends, sequence=sequence)
            part = {n: t[classes] for n, t in head.items() if n != "teacher_input"}
            shard = {**part, "teacher_input": head["teacher_input"]}
            teachers = {"whole": dict(head), "shard": shard, "logits": logits}
            teachers["columns"] = {"teacher_logits": logits["teacher_logits"][:, classes]}
            for how, given in teachers.items():
                if sequence and "teacher_input" in given:
                    given["teacher_input"] = ranks.rows(given["teacher_input"])
                loss, *grads = outcome(own.input, own.linear_weight, own.target, **call, **given)
                dx = ranks.rows(truth[1]) if sequence else truth[1]
                expected = dx, truth[2][classes], truth[3][classes]
                ranks.agree(f"{options} {kind} {how} loss", loss, truth[0], 1e-11)
                ranks.note_same_bytes("loss", loss)
                for name, got, true in zip(cases.GRADIENTS, grads, expected, strict=True):
                    ranks.agree(f"{options} {kind} {how} {name}", got, true, 1e-10)


@on(2)
def test_divergence_near_its_teacher(ranks):
    """In float32, with rounded statistics exchanged."""
    case = make(torch.float32, std=0.5)
    logits = case.input @ case.linear_weight.T + case.options["linear_bias"]
    noise = 1e-3 * torch.randn(TOKENS, VOCAB, generator=cases.generator(4))
    teacher, call = logits + noise, {"upstream": torch.ones(1), "reduction": "sum"}
    own, classes = ranks.divided(case), ranks.classes(VOCAB)
    for kind in KINDS:
        how = {**call, "divergence": kind, "teacher_logits": teacher}
        one = outcome(case.input, case.linear_weight, case.target, **how, **case.options)
        vp = {"vocab_parallel": ranks.parallel(VOCAB), **own.options}
        made = outcome(own.input, own.linear_weight, own.target, **how, **vp)
        ranks.agree(f"dX {kind}", made[1], one[1], 1e-3)
        ranks.agree(f"dW {kind}", made[2], one[2][classes], 1e-3)


@on(2, 4)
def test_sampled_divergences(ranks):
    """Each rank draws from its own classes; with so small an eps the sum is near the exact one."""
    case, ends = make(torch.float32), UNEVEN if ranks.ranks == 4 else None
    head, _ = teacher_of(TOKENS, case.dtype)
    own, classes = ranks.divided(case, ends), ranks.classes(VOCAB, ends)
    vp = {"vocab_parallel": ranks.parallel(VOCAB, ends), **own.options}
    drawn = {"gradient": "sampled", "gradient_eps": 2**-12, "gradient_seed": 1}
    for kind in KINDS:
        call = {"upstream": torch.ones(1), "divergence": kind, **head}
        one = outcome(case.input, case.linear_weight, case.target, **call, **case.options)
        made = outcome(own.input, own.linear_weight, own.target, **call, **vp, **drawn)
        ranks.agree(f"loss {kind}", made[0], one[0], 1e-5)
        ranks.agree(f"dX {kind}", made[1], one[1], 0.05)
        ranks.agree(f"dW {kind}", made[2], one[2][classes], 0.05)


@on(2)
def test_divergence_of_dtensors(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, case = init_device_mesh("cpu", (2,)), make()
    head, _ = teacher_of(TOKENS, case.dtype)
    bias = case.options["linear_bias"]
    call = {"upstream": torch.ones(1), "divergence": "jsd"}
    truth = outcome(case.input, case.linear_weight, case.target, linear_bias=bias, **call, **head)

    def shared(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement])

    spread = {
        n: shared(t, Replicate() if n == "teacher_input" else Shard(0)) for n, t in head.items()
    }
    operands = shared(case.input, Replicate()), shared(case.linear_weight, Shard(0)), case.target
    for given in (head, spread):
        loss, *grads = outcome(*operands, linear_bias=shared(bias, Shard(0)), **call, **given)
        ranks.agree("loss", loss, truth[0], 1e-11)
        for name, got, true in zip(cases.GRADIENTS, grads, truth[1:], strict=True):
            ranks.agree(name, got.full_tensor(), true, 1e-10)
