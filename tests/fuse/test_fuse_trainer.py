"""flce.fuse under transformers' Trainer: accumulated gradients, their denominators, evaluation."""

import copy

import pytest
import torch

import flce

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from flce.integrations.transformers import FuseCallback  # noqa: E402
from harness.tiny_models import TEXT_VOCAB as VOCAB  # noqa: E402
from harness.tiny_models import TRAINING, built  # noqa: E402

LENGTH, STEPS = 24, 20


class Rows(torch.utils.data.Dataset):
    """Sequences of which a different part has labels each: 1 to LENGTH tokens."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(VOCAB, (count, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for row in self.labels:
            row[int(torch.randint(1, LENGTH, (), generator=generator)) :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def trainer_of(model, folder, callbacks=(), model_init=None, **settings):
    class Recording(transformers.Trainer):
        losses = None

        def training_step(self, *arguments, **options):
            loss = super().training_step(*arguments, **options)
            self.losses = [*(self.losses or []), float(loss)]
            return loss

    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    sizes |= {"gradient_accumulation_steps": 4, "max_steps": STEPS, "learning_rate": 1e-2}
    settings = {**TRAINING, **sizes, "logging_strategy": "no", **settings}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    return Recording(
        model,
        arguments,
        train_dataset=Rows(8 * STEPS),
        eval_dataset=Rows(8),
        callbacks=list(callbacks),
        model_init=model_init,
    )


def llama():
    return built("LlamaForCausalLM")


def assert_equal(got, expected, bar):
    assert len(got) == len(expected) > 0
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
    assert worst <= bar, worst


def train(model, folder, **settings):
    trainer = trainer_of(model, folder, **settings)
    trainer.train()
    return trainer


def test_losses_and_weights(tmp_path):
    plain, fused = llama(), llama()
    expected = train(plain, tmp_path).losses
    with flce.fuse(fused, strict=True) as handle:
        got = train(fused, tmp_path).losses
    assert_equal(got, expected, 1e-6)
    assert len(got) == 4 * STEPS == sum(handle.losses.values())
    assert expected[-1] < expected[0]
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_the_callback_with_model_init(tmp_path):
    callback = FuseCallback(strict=True)
    trainer = trainer_of(None, tmp_path, [callback], model_init=llama, max_steps=2)
    first = callback.handle
    for _ in range(2):
        trainer.train()
        assert callback.handle is not first and callback.handle.model is trainer.model
        assert sum(callback.handle.losses.values()) == 8
        assert not first.is_attached()
        first = callback.handle


def test_a_callback_that_is_added_later_and_a_handle_that_is_removed(tmp_path):
    trainer = trainer_of(llama(), tmp_path, max_steps=2)
    trainer.add_callback(callback := FuseCallback(strict=True))
    trainer.train()
    assert_equal(trainer.losses, train(llama(), tmp_path, max_steps=2).losses, 1e-6)
    assert sum(callback.handle.losses.values()) == 8
    trainer = trainer_of(llama(), tmp_path, [callback := FuseCallback()], max_steps=2)
    callback.handle.remove()
    trainer.train()
    assert not callback.handle.losses and not flce.explain(trainer.model).is_fused


def test_evaluation(tmp_path):
    model = llama()
    expected = trainer_of(model, tmp_path).predict(Rows(8))
    with flce.fuse(model, strict=True) as handle:
        only_loss = trainer_of(model, tmp_path, prediction_loss_only=True).evaluate()
        assert handle.losses and not handle.reads
        found = trainer_of(model, tmp_path).predict(Rows(8))
        assert handle.reads
    assert_equal([only_loss["eval_loss"]], [expected.metrics["test_loss"]], 1e-6)
    assert (found.predictions == expected.predictions).all()


@pytest.mark.parametrize("order", [("evaluate", "predict"), ("predict", "evaluate")])
def test_evaluation_of_a_compiled_model(tmp_path, order):
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager"}

    def results(callbacks):
        torch.compiler.reset()
        trainer = trainer_of(llama(), tmp_path, callbacks, **settings)
        trainer.compute_metrics = lambda found: {"sum": float(found.predictions.sum())}
        made = {name: getattr(trainer, name) for name in order}
        made = {n: f(Rows(8)).metrics if n == "predict" else f() for n, f in made.items()}
        return [made["evaluate"][f"eval_{n}"] for n in ("loss", "sum")] + [
            made["predict"][f"test_{n}"] for n in ("loss", "sum")
        ]

    expected = results([])
    callback = FuseCallback(strict=True)
    assert_equal(results([callback]), expected, 1e-5)
    assert callback.handle.losses


def test_a_loss_function_of_the_user(tmp_path):
    """compute_loss_func takes the labels away; when="always" serves its F.cross_entropy."""

    def compute_loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    def losses(callbacks):
        trainer = trainer_of(llama(), tmp_path, callbacks, max_steps=2)
        trainer.compute_loss_func = compute_loss
        trainer.train()
        return trainer.losses

    callback = FuseCallback(when="always", strict=True)
    assert_equal(losses([callback]), losses([]), 1e-6)
    assert sum(callback.handle.losses.values()) == 8


def test_bfloat16_autocast(tmp_path):
    """accelerate runs the forward under autocast and casts the outputs to float32."""
    expected = train(llama(), tmp_path, bf16=True, max_steps=2).losses
    model = llama()
    with flce.fuse(model, strict=True) as handle:
        got = train(model, tmp_path, bf16=True, max_steps=2).losses
    assert_equal(got, expected, 2e-3)
    assert sum(handle.losses.values()) == 8 and not handle.reads


def test_data_parallel_is_refused(tmp_path):
    trainer = trainer_of(llama(), tmp_path)
    arguments = copy.copy(trainer.args)
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match="FuseCallback: .*got nn.DataParallel"):
        FuseCallback().on_init_end(arguments, None, None, model=trainer.model)
