"""The state of flce.fuse: calls that end early, copies, memory, reports, options, other losses."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from fuse_model import BATCH, HIDDEN, IDS, LENGTH, VOCAB, Model, double, equal, flat_loss
from test_fuse_handle import Adapted
from torch import nn

import flce


def is_real(model):
    """Whether a call without labels gives real logits."""
    return type(model(IDS)[1]) is torch.Tensor


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_an_interrupted_forward_does_not_stay_on(error):
    def fails(logits):
        raise error

    model = Model(fails)
    handle = flce.fuse(model)
    with pytest.raises(error):
        model(IDS, IDS)
    model.use = lambda z: z
    assert is_real(model)
    assert type(model(IDS, IDS)[1]) is not torch.Tensor and handle.losses
    assert is_real(model)


class Outer(nn.Module):
    """A wrapper that calls the model with labels and goes on if that fails."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.lm_head = self.inner.lm_head

    def forward(self, ids, labels=None):
        try:
            self.inner(ids, labels=labels)
        except ZeroDivisionError:
            pass
        logits = self.lm_head(self.inner.embedding(ids))
        return (None if labels is None else flat_loss(logits, labels)), logits


def test_a_hook_that_raises_before_ours():
    def hook(module, args):
        raise ZeroDivisionError

    model = Model()
    flce.fuse(model)
    removable = model.register_forward_pre_hook(hook, prepend=True)
    with pytest.raises(ZeroDivisionError):
        model(IDS, IDS)
    removable.remove()
    assert is_real(model) and type(model(IDS, IDS)[1]) is not torch.Tensor
    outer = Outer()
    flce.fuse(outer)
    outer.inner.register_forward_pre_hook(hook, prepend=True)
    assert outer(IDS, IDS)[1].shape == (*IDS.shape, VOCAB) and is_real(outer)


def test_a_head_is_copied_without_its_model():
    model = Model()
    handle = flce.fuse(model, strict=True)
    alone = len(pickle.dumps(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)))
    assert len(pickle.dumps(model.lm_head)) < alone + 2000
    head = copy.deepcopy(model.lm_head)
    x = torch.ones(2, HIDDEN, dtype=torch.float64)
    equal(head(x), model.lm_head(x))
    assert head._flce_fusion.model is None and handle.model is model
    assert type(pickle.loads(pickle.dumps(model.lm_head))(x)) is torch.Tensor


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_is_fused_by_itself(copied):
    model = Model(double, flat_loss)  # functions that pickle finds by name
    model.lm_head = Adapted(model.lm_head)
    expected = model(IDS, IDS)[0]
    handle = flce.fuse(model, "lm_head", strict=True)
    other = copied(model)
    loss, _ = other(IDS, IDS)
    equal(loss, expected)
    assert not handle.losses and flce.explain(other).losses
    assert "lm_head" in [name for name, _ in flce.explain(other).heads]
    handle.remove()
    assert flce.explain(other).is_fused and not flce.explain(model).is_fused


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_model_is_freed_without_gc(when, is_adapted):
    model = Model()
    if is_adapted:
        model.lm_head = Adapted(model.lm_head)
    handle = flce.fuse(model, "lm_head", when=when)
    loss, logits = model(IDS, IDS)
    loss.backward()
    references = [weakref.ref(one) for one in (model, model.lm_head, *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        del model, loss, logits
        assert [one() for one in references] == [None] * len(references)
    finally:
        gc.enable()
    assert handle.model is None and handle.losses
    handle.remove()


def test_an_annealed_temperature_is_counted_in_few_keys():
    model = Model()
    handle = flce.fuse(model, strict=True)
    for i in range(50):
        model.use = lambda z, i=i: z / (1 + i / 50)
        model(IDS, IDS)
    assert len(handle.losses) == 17 and sum(handle.losses.values()) == 50
    assert handle.losses["other steps"] == 34
    assert "34 x loss without logits" in str(flce.explain(model))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"accum_dtype": "float32"}, TypeError, "accum_dtype: expected a torch.dtype or None"),
        ({"logits_dtype": 3}, TypeError, "logits_dtype: expected a torch.dtype or None, got 3"),
        ({"logits_dtype": torch.int64}, ValueError, "logits_dtype: expected float64, float32"),
        ({"valid_bound": 1.5}, TypeError, "valid_bound: expected an int of at least 0, got 1.5"),
        ({"valid_bound": -1}, ValueError, "valid_bound: expected an int of at least 0, got -1"),
        ({"valid_bound": "all"}, ValueError, 'valid_bound: expected an int, "count" or None'),
    ],
)
def test_options_of_a_wrong_type(options, error, message):
    with pytest.raises(error, match=message):
        flce.fuse(Model(), **options)


def test_options_of_a_right_type():
    for value in (None, "count", BATCH * LENGTH):
        flce.fuse(Model(), valid_bound=value, accum_dtype=torch.float64)


@pytest.mark.parametrize("reads_first", [False, True])
def test_cross_entropy_of_deferred_logits(reads_first):
    def loss_of(logits, labels):
        if reads_first:
            logits.sum()
        return flce.cross_entropy(logits * 2, labels, z_loss=0.1)

    model = Model(loss_of=loss_of)
    expected = model(IDS, IDS)[0]
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    with pytest.warns(UserWarning, match="is not deferred"):
        handle = flce.fuse(model)
        loss = model(IDS, IDS)[0]
    equal(loss, expected)
    for got, one in zip(
        torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True
    ):
        equal(got, one)
    assert reads_first or list(handle.fallbacks) == ["flce.cross_entropy is not deferred"]


def test_linear_cross_entropy_of_deferred_logits():
    weight = torch.randn(9, VOCAB, dtype=torch.float64)
    model = Model(loss_of=lambda z, labels: flce.linear_cross_entropy(z, weight, labels % 9))
    expected = F.cross_entropy((model(IDS)[1] @ weight.T).flatten(0, 1), IDS.flatten() % 9)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    with pytest.warns(UserWarning, match="is not deferred"):
        flce.fuse(model)
        loss = model(IDS, IDS)[0]
    for got, one in zip(
        torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True
    ):
        equal(got, one)


KINDS = {
    "adapter_input": (torch.float32, torch.float32, torch.float64, torch.float32),
    "adapter_weight": (torch.float16, torch.float64, torch.float16, torch.float16),
    "linear_weight": (torch.float16, torch.float64, torch.float16, torch.float64),
}


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("is_cast", [False, True])
def test_dtypes_of_adapters(name, is_cast):
    x, w, u, b = (torch.ones(5, 8, dtype=dtype) for dtype in KINDS[name])
    target = torch.zeros(5, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        with pytest.raises(TypeError, match=f"^{name}: expected the dtype of"):
            flce.linear_cross_entropy(x, w, target, adapter_input=u, adapter_weight=b)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.float64,) * 2])
def test_dtypes_that_autocast_serves(dtypes):
    x, w = (torch.ones(5, 8, dtype=dtype) for dtype in dtypes)
    target = torch.zeros(5, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = flce.linear_cross_entropy(x, w, target, adapter_input=x, adapter_weight=w)
    assert loss.isfinite()


def make_trainer(folder, callback, **given):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from test_fuse_trainer import Rows

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=2, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return transformers.Trainer(
        args=arguments, train_dataset=Rows(8), callbacks=[callback] if callback else [], **given
    )


def make_callback(**options):
    pytest.importorskip("transformers", minversion="5.0")
    from flce.integrations.transformers import FuseCallback

    return FuseCallback(**options)


def make_llama():
    from test_fuse_trainer import llama

    return llama()


def test_the_callback_with_model_init(tmp_path):
    callback = make_callback(strict=True)
    trainer = make_trainer(tmp_path, callback, model_init=make_llama)
    first = callback.handle
    for _ in range(2):
        trainer.train()
        assert callback.handle is not first and callback.handle.model is trainer.model
        assert sum(callback.handle.losses.values()) == 2
        assert not first.is_attached()
        first = callback.handle


def test_a_callback_that_is_added_later(tmp_path):
    callback = make_callback(strict=True)
    trainer = make_trainer(tmp_path, None, model=make_llama())
    trainer.add_callback(callback)
    trainer.train()
    assert sum(callback.handle.losses.values()) == 2


def test_a_removed_handle_stays_removed(tmp_path):
    callback = make_callback()
    trainer = make_trainer(tmp_path, callback, model=make_llama())
    callback.handle.remove()
    trainer.train()
    assert not callback.handle.losses and not flce.explain(trainer.model).is_fused


def test_the_callback_tells_that_labels_are_taken_away(tmp_path):
    def compute_loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    callback = make_callback()
    trainer = make_trainer(tmp_path, callback, model=make_llama(), compute_loss_func=compute_loss)
    with pytest.warns(UserWarning, match="called without labels in training") as caught:
        trainer.train()
    assert len([one for one in caught if "flce.fuse" in str(one.message)]) == 1


@pytest.mark.skipif(torch.__version__ < "2.5", reason="older versions break the graph")
def test_cross_entropy_of_deferred_logits_compiled():
    model = Model(loss_of=lambda z, labels: flce.cross_entropy(z, labels))
    expected = torch.autograd.grad(model(IDS, IDS)[0], list(model.parameters()))
    with pytest.warns(UserWarning, match="is not deferred"):
        flce.fuse(model)
        loss = torch.compile(model, backend="aot_eager")(IDS, IDS)[0]
    for got, one in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        equal(got, one)
