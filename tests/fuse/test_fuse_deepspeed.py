"""flce.fuse and flce's Module under DeepSpeed's ZeRO-3, in two processes over gloo."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flce
from harness import cases
from harness.processes import run_on_ranks
from harness.tiny_models import HIDDEN, VOCAB, Model, flat_loss, tiny_llama

LENGTH, STEPS = 8, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def capped():
    return Model(lambda z: torch.tanh(z / 5) * 5, dtype=torch.float32)


class Loss(nn.Module):
    """The loss in Modules, whose hooks act on the logits too; one of them under no_grad."""

    def __init__(self):
        super().__init__()
        self.entropy, self.same = nn.CrossEntropyLoss(), nn.Identity()

    def forward(self, logits, labels):
        loss = self.entropy(logits.view(-1, VOCAB), labels.view(-1))
        with torch.no_grad():
            constant = self.same(logits)
        return loss + constant.sin().mean()


def made_partitioned():
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        return capped()


def llama(**options):
    return tiny_llama(vocab_size=VOCAB, **options)


def adapted_llama():
    import peft

    settings = peft.LoraConfig(
        target_modules=["q_proj", "lm_head"], init_lora_weights=False, r=4, lora_alpha=8
    )
    return peft.get_peft_model(llama(), settings)


class WithHead(nn.Module):
    """A model that calls its head with the labels where that is flce's."""

    def __init__(self, head):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCAB, HIDDEN), head(HIDDEN, VOCAB)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        if isinstance(self.lm_head, flce.LinearCrossEntropyHead):
            return self.lm_head(x, labels), self.lm_head(x)
        logits = self.lm_head(x)
        return flat_loss(logits, labels), logits


class Scaled(nn.Module):
    """Around the head, with a parameter that the hook of its output gathers for the backward."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.rand(HIDDEN)), nn.Linear(HIDDEN, VOCAB)

    def forward(self, x):
        return self.linear(x.sin() * self.scale)


class Enclosed(WithHead):
    """Its head is not a Module that ends with the nn.Linear."""

    def __init__(self):
        super().__init__(lambda *sizes: Scaled())

    def get_output_embeddings(self):
        return self.lm_head.linear


PLAIN = {
    "capped": capped,
    "loss in Modules": lambda: Model(loss_of=Loss(), dtype=torch.float32),
    "made partitioned": made_partitioned,
    "flce's Module": lambda: WithHead(nn.Linear),
}
FRAMEWORKS = {
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "adapted llama": adapted_llama,
}


def trained(rank, make, fuse, strict=True):
    """(what the steps made: the losses and the last step's logits; what training added to each
    parameter; the handle). fuse: "before" or "after" DeepSpeed takes the model, or None."""
    import deepspeed

    torch.manual_seed(0)
    model = make()
    handle = flce.fuse(model, strict=strict) if fuse == "before" else None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    if fuse == "after":
        handle = flce.fuse(model, strict=strict)
    assert all(parameter.numel() == 0 for parameter in trainable)
    start, made = whole(trainable), []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        loss, logits = loss_and_logits(engine, ids)
        if step == 1:  # its gradient and the loss's have to reach DeepSpeed at once
            loss = loss + logits.cos().mean()
        made.append(loss.detach())
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        made += [value.detach() for value in loss_and_logits(engine, ids)]
    return made, [new - old for new, old in zip(whole(trainable), start, strict=True)], handle


def loss_and_logits(engine, ids):
    output = engine(ids, labels=ids)
    return output if isinstance(output, tuple) else (output.loss, output.logits)


def whole(parameters):
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def compare(rank, make, other_make, fuse, **options):
    expected, added, _ = trained(rank, make, None, **options)
    got, other_added, handle = trained(rank, other_make, fuse, **options)
    for one, other in zip((*got, *other_added), (*expected, *added), strict=True):
        assert cases.relative_error(one, other.double()) <= 1e-5
        assert other.abs().max() > 1e-3, "nothing to compare"
    return handle


def compare_all(names):
    rank = open_deepspeed()
    for name in names:
        make = (PLAIN | FRAMEWORKS)[name]
        if name == "flce's Module":
            compare(rank, make, lambda: WithHead(flce.LinearCrossEntropyHead), None)
            continue
        for fuse in ("before", "after"):
            handle = compare(rank, make, make, fuse)
            assert sum(handle.losses.values()) == STEPS + 1 and not handle.fallbacks, name
            # By this test, once each, and by a Module that reads them under no_grad.
            reads = {f"torch.Tensor.{read}": 1 for read in ("cos", "sin", "double", "detach")}
            reads["torch.Tensor.sin"] = STEPS + 1 if name == "loss in Modules" else 1
            assert all(count <= reads[key] for key, count in handle.reads.items()), handle.reads


def compare_enclosed(rank):
    """A hook of a Module around the head, which the gradient has to pass."""
    handle = compare(rank, Enclosed, Enclosed, "before")
    assert sum(handle.losses.values()) == STEPS + 1 and not handle.fallbacks


def refuse_outside(rank):
    """A weight that was passed outside of its Module's hooks, and the remedy that is named."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Linear(HIDDEN, VOCAB)
    expected = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    x, y = torch.randn(6, HIDDEN), torch.arange(6)
    with pytest.raises(ValueError, match=r"linear_weight: expected shape \(V, 16\).*got \(0,\)"):
        flce.linear_cross_entropy(x, model.weight, y)
    with deepspeed.zero.GatheredParameters([model.weight]):
        with pytest.raises(ValueError, match=r"linear_bias: .*got \(0,\), as DeepSpeed's ZeRO-3"):
            flce.linear_cross_entropy(x, model.weight, y, linear_bias=model.bias)
    for weight, bias, is_partitioned in ((*expected, False), (model.weight, model.bias, True)):
        with deepspeed.zero.GatheredParameters([weight, bias], enabled=is_partitioned):
            loss = flce.linear_cross_entropy(x, weight, y, linear_bias=bias, save="stats")
            (engine.backward if is_partitioned else torch.Tensor.backward)(loss)
    engine.step()
    for got, one in zip(whole(list(model.parameters())), expected, strict=True):
        assert cases.relative_error(got, (one - 0.1 * one.grad).detach().double()) <= 1e-6


def open_deepspeed():
    rank = dist.get_rank()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "DS_ACCELERATOR": "cpu"}
    os.environ.update({name: str(value) for name, value in variables.items()})
    import deepspeed

    # It would be compiled, for a minute; gloo serves in its stead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return rank


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="no deepspeed"
)


def plain_models():
    compare_all(list(PLAIN))
    refuse_outside(dist.get_rank())
    compare_enclosed(dist.get_rank())


# In fresh processes, because DeepSpeed keeps a group that it has seen.
@needs_deepspeed
def test_plain_models_train_as_unfused():
    run_on_ranks(2, plain_models, fresh=True)


@needs_deepspeed
def test_models_of_transformers_train_as_unfused():
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("peft")
    run_on_ranks(2, compare_all, fresh=True, names=list(FRAMEWORKS))
