"""TRL's generalized_jsd_loss and GKDTrainer with and without flce."""

import pytest
import torch

import flce
from harness.tiny_models import TRAINING, LogitsMade, recorded, tiny_llama, tiny_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
GKDTrainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer

from flce.integrations import trl_distillation as ours  # noqa: E402

IDS = torch.randint(19, (4, 11), generator=torch.Generator().manual_seed(3))
LABELS = torch.where(IDS % 4 > 0, IDS, -100)
CASES = [{"beta": beta, "temperature": 0.7} for beta in (0, 1, 0.5, 0.9)]
CASES += [{"labels": LABELS}, {"labels": LABELS, "reduction": "sum", "beta": 0.3}]
CASES += [{"labels": LABELS, "num_items_in_batch": torch.tensor(17), "beta": 1}]


def models():
    torch.manual_seed(0)
    return tiny_llama().double(), tiny_llama(hidden_size=24, num_attention_heads=3).double()


def step(student, teacher, options):
    student.zero_grad()
    with torch.no_grad():
        taught = teacher(IDS).logits
    loss = GKDTrainer.generalized_jsd_loss(student(IDS).logits, taught, **options)
    loss.backward()
    return [loss.detach(), *[p.grad for p in student.parameters()]]


@pytest.mark.parametrize("options", CASES)
def test_the_same_loss_without_logits(options):
    student, teacher = models()
    expected = step(student, teacher, options)
    with flce.fuse(student, when="always", strict=True), flce.fuse(teacher, when="always"):
        with ours.install(GKDTrainer) as handle, LogitsMade(IDS.numel(), 19) as made:
            got = step(student, teacher, options)
    assert handle.calls == {"flce": 1} and not made.found
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_a_hook_on_the_logits():
    """It gets the gradient of the logits, which is made for it."""
    student, teacher = models()

    def step():
        seen = []
        logits = student(IDS).logits
        logits.register_hook(lambda gradient: seen.append(gradient + 0))
        with torch.no_grad():
            taught = teacher(IDS).logits
        GKDTrainer.generalized_jsd_loss(logits, taught, labels=LABELS, temperature=0.7).backward()
        return seen

    expected = step()
    with flce.fuse(student, when="always", strict=True), flce.fuse(teacher, when="always"):
        with ours.install(GKDTrainer) as handle:
            got = step()
    assert handle.calls == {"flce": 1}
    torch.testing.assert_close(got, expected)


def test_what_remains_trls():
    student, teacher = models()
    expected = [step(student, teacher, {}), step(student, teacher, {"labels": LABELS})]
    with ours.install(GKDTrainer) as handle:
        got = [step(student, teacher, {}), step(student, teacher, {"labels": LABELS})]
    assert handle.calls == {"trl_distillation": 2}
    torch.testing.assert_close(got, expected)


def test_another_class_is_refused():
    with pytest.raises(ImportError, match=r"int\.generalized_jsd_loss .* no such function"):
        ours.install(int)
    before = vars(GKDTrainer)["generalized_jsd_loss"]
    with ours.install(GKDTrainer), pytest.raises(RuntimeError, match="an earlier install"):
        ours.install(GKDTrainer)
    assert vars(GKDTrainer)["generalized_jsd_loss"] is before


def train(folder, fused):
    """GKDTrainer's logs and gradients, without generation."""
    from trl.experimental.gkd import GKDConfig

    student, teacher = (model.float() for model in models())
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    texts = [("abc", "dcb"), ("bb", "acda"), ("cad", "b"), ("dd", "cab")]
    rows = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": two}]
        for one, two in texts
    ]
    sizes = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "max_length": 16,
        "bf16": False,
    }
    args = GKDConfig(str(folder), lmbda=0.0, beta=0.5, **sizes, **TRAINING)
    data = datasets.Dataset.from_dict({"messages": rows})
    trainer = GKDTrainer(
        student, teacher, args=args, train_dataset=data, processing_class=tokenizer
    )
    if not fused:
        return recorded(trainer)
    with flce.fuse(student, when="always", strict=True), flce.fuse(teacher, when="always"):
        with ours.install(GKDTrainer) as handle:
            made = recorded(trainer)
    assert handle.calls == {"flce": 3}
    return made


def test_gkd_trainer(tmp_path):
    (logs, gradients), (fused_logs, fused_gradients) = (
        train(tmp_path / name, name == "fused") for name in ("own", "fused")
    )
    for one, other in zip(fused_logs, logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-3, atol=1e-5)
