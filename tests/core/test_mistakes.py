"""What a mistaken call is told: what came, what was expected and what to change."""

import functools
import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import flce
from flce import validate
from flce.integrations._rebind import imports_of

TOKENS, HIDDEN, VOCAB = 6, 8, 11
X, W, Y = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.arange(TOKENS)
X3, Y2 = X.view(2, 3, HIDDEN), Y.view(2, 3)
BIAS = torch.randn(VOCAB)
LINEAR = nn.Linear(HIDDEN, VOCAB)


def call(function, *args, **options):
    return functools.partial(function, *args, **options)


loss = functools.partial(call, flce.linear_cross_entropy)
logprobs = functools.partial(call, flce.linear_logprobs)
of_logits = functools.partial(call, flce.cross_entropy)
F8 = torch.float8_e4m3fn

# Name of the mistake: (call, error, how its message begins, how it ends).
MISTAKES = {
    "bias by position": (
        loss(X, W, Y, BIAS),
        TypeError,
        "linear_cross_entropy() takes input, linear_weight, target by position, all options by "
        "name; got one more, a tensor of shape (11,)",
        "a bias is passed as linear_bias=",
    ),
    "bias by position, logprobs": (
        logprobs(X, W, Y, BIAS),
        TypeError,
        "linear_logprobs() takes input, linear_weight, target by position",
        "a bias is passed as linear_bias=",
    ),
    "bias by position, logprobs_at": (
        call(flce.linear_logprobs_at, X, W, Y[:, None], BIAS),
        TypeError,
        "linear_logprobs_at() takes input, linear_weight, ids by position",
        "a bias is passed as linear_bias=",
    ),
    "bias by position, linear_loss": (
        call(flce.linear_loss, X, W, Y, lambda p, e, r: p.sum(), BIAS),
        TypeError,
        "linear_loss() takes input, linear_weight, target, loss_fn by position",
        "a bias is passed as linear_bias=",
    ),
    "class weights by position": (
        of_logits(X @ W.T, Y, BIAS),
        TypeError,
        "cross_entropy() takes logits, target by position",
        "a factor for each class is passed as weight=",
    ),
    "a number by position": (
        loss(X, W, Y, -100),
        TypeError,
        "linear_cross_entropy() takes input, linear_weight, target by position",
        "all options by name; got one more, int",
    ),
    "swapped": (
        loss(W, X, Y),
        ValueError,
        "target: expected shape (11,), that of input without its last dimension, got (6,)",
        "input and linear_weight look swapped: the order is input (..., H), linear_weight (V, H), "
        "target (...)",
    ),
    "swapped, three dimensions": (
        loss(W, X3, Y2),
        ValueError,
        "linear_weight: expected shape (V, 8) for input of shape (11, 8), got (2, 3, 8)",
        "target (...)",
    ),
    "transposed": (
        loss(X, W.T, Y),
        ValueError,
        "linear_weight: expected shape (V, 8) for input of shape (6, 8), got (8, 11)",
        "it looks transposed, (H, V): pass linear_weight.T",
    ),
    "transposed, linear_loss": (
        call(flce.linear_loss, X, W.T, Y, lambda p, e, r: p.sum()),
        ValueError,
        "linear_weight: expected shape (V, 8) for input of shape (6, 8), got (8, 11)",
        "pass linear_weight.T",
    ),
    "transposed, teacher": (
        call(flce.linear_divergence, X, W, X, W.T),
        ValueError,
        "teacher_weight: expected shape (V, 8)",
        "pass teacher_weight.T",
    ),
    "float labels": (
        loss(X, W, Y.float()),
        ValueError,
        "target: expected shape (6, 11) for probabilities, a number for each class, got (6,)",
        "integer class labels are expected in this shape, got torch.float32: pass target.long()",
    ),
    "float labels of logits": (
        of_logits(X @ W.T, Y.double()),
        ValueError,
        "target: expected shape (6, 11) for probabilities, a number for each class, got (6,)",
        "got torch.float64: pass target.long()",
    ),
    "float labels, logprobs": (
        logprobs(X, W, Y.float()),
        TypeError,
        "target: expected class indices of dtype torch.int64 or torch.int32, got torch.float32",
        "pass target.long() if these are labels",
    ),
    "short labels": (
        loss(X, W, Y.to(torch.int16)),
        TypeError,
        "target: expected class indices of dtype torch.int64 or torch.int32, or probabilities of a "
        "floating dtype, got torch.int16",
        "pass target.long()",
    ),
    "last dimension of 1": (
        loss(X3, W, Y2[..., None]),
        ValueError,
        "target: expected shape (2, 3), that of input without its last dimension, got (2, 3, 1)",
        "pass target.squeeze(-1)",
    ),
    "float, last dimension of 1": (
        loss(X3, W, Y2[..., None].float()),
        ValueError,
        "target: expected shape (2, 3, 11) for probabilities",
        "pass target.squeeze(-1).long()",
    ),
    "one-hot": (
        loss(X, W, nn.functional.one_hot(Y, VOCAB)),
        ValueError,
        "target: expected shape (6,), that of input without its last dimension, got (6, 11)",
        "one-hot labels: pass target.argmax(-1), or target.float() as probabilities",
    ),
    "cut labels": (
        loss(X3, W, Y2[:, 1:]),
        ValueError,
        "target: expected shape (2, 3), that of input without its last dimension, got (2, 2)",
        "labels are one position shorter than input: pass the uncut labels with shift=1, or "
        "input[:, :-1]",
    ),
    "cut labels of logits": (
        of_logits(X3 @ W.T, Y2[:, 1:]),
        ValueError,
        "target: expected shape (2, 3), that of logits without its last dimension, got (2, 2)",
        "labels are one position shorter than logits: pass logits[:, :-1]",
    ),
    "labels in two dimensions": (
        loss(X, W, Y2),
        ValueError,
        "target: expected shape (6,), that of input without its last dimension, got (2, 3)",
        "pass target.flatten()",
    ),
    "flat labels": (
        loss(X3, W, Y),
        ValueError,
        "target: expected shape (2, 3), that of input without its last dimension, got (6,)",
        "pass input.flatten(0, -2)",
    ),
    "token ids as input": (
        loss(Y, W, Y),
        TypeError,
        "input: expected float64, float32, bfloat16 or float16, got torch.int64",
        "input takes hidden states (..., H), not token ids",
    ),
    "a Linear": (
        loss(X, LINEAR, Y),
        TypeError,
        "linear_weight: expected a tensor, got Linear, a Module",
        "pass linear.weight (and linear_bias=linear.bias)",
    ),
    "an Embedding": (
        loss(X, nn.Embedding(VOCAB, HIDDEN), Y),
        TypeError,
        "linear_weight: expected a tensor, got Embedding, a Module",
        "pass linear.weight",
    ),
    "float8 input": (
        loss(X.to(F8), W, Y),
        TypeError,
        "input: expected float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        "pass input.to(torch.bfloat16), times the scale that belongs to it",
    ),
    "float8 weight": (
        loss(X, W.to(torch.float8_e5m2), Y),
        TypeError,
        "linear_weight: expected float64, float32, bfloat16 or float16, got torch.float8_e5m2",
        "pass linear_weight.to(torch.bfloat16), times the scale that belongs to it",
    ),
    "int8 weight": (
        loss(X, W.to(torch.int8), Y),
        TypeError,
        "linear_weight: expected float64, float32, bfloat16 or float16, got torch.int8",
        "quantised values: pass what dequantize() of linear_weight gives "
        "(bitsandbytes.functional.dequantize_4bit for its 4-bit weights)",
    ),
    "4-bit weight": (  # as bitsandbytes packs it
        loss(X, torch.zeros(VOCAB * HIDDEN // 2, 1, dtype=torch.uint8), Y),
        TypeError,
        "linear_weight: expected float64, float32, bfloat16 or float16, got torch.uint8",
        "(bitsandbytes.functional.dequantize_4bit for its 4-bit weights)",
    ),
    "size without a unit's name": (
        loss(X, W, Y, max_memory="1g"),
        ValueError,
        'max_memory: expected a positive number of bytes or text such as "512MiB" (B, KB, MB, GB, '
        "TB of 1000, KiB, MiB, GiB, TiB of 1024, in any letter case)",
        "got '1g'",
    ),
    "loss_fn of one argument": (
        call(flce.linear_loss, X, W, Y, lambda logprobs: logprobs.sum()),
        TypeError,
        "loss_fn: expected a function of (logprobs, entropy, rows)",
        "got one of (logprobs)",
    ),
    "loss_fn of four arguments": (
        call(flce.linear_loss, X, W, Y, lambda a, b, c, d: a.sum()),
        TypeError,
        "loss_fn: expected a function of (logprobs, entropy, rows)",
        "got one of (a, b, c, d)",
    ),
    "entropy of None": (
        call(flce.linear_loss, X, W, Y, lambda p, entropy, rows: (p + 0.1 * entropy).sum()),
        TypeError,
        'loss_fn: expected no use of None, as its entropy is without entropy="differentiable", '
        '"detached", got TypeError: ',
        "",
    ),
    "entropy of None, a method": (
        call(flce.linear_loss, X, W, Y, lambda p, entropy, rows: entropy.sum()),
        TypeError,
        "loss_fn: expected no use of None, as its entropy is without entropy=",
        "got AttributeError: 'NoneType' object has no attribute 'sum'",
    ),
    "divergence of another name": (
        call(flce.linear_divergence, X, W, X, W, divergence="kl"),
        ValueError,
        "divergence: expected one of ('forward_kl', 'reverse_kl', 'jsd'), got 'kl'",
        "use 'forward_kl'",
    ),
    "reduction of another name": (
        loss(X, W, Y, reduction="average"),
        ValueError,
        "reduction: expected one of ('none', 'mean', 'sum'), got 'average'",
        "use 'mean'",
    ),
    "entropy of another name": (
        logprobs(X, W, Y, entropy="detach"),
        ValueError,
        "entropy: expected one of ('differentiable', 'detached', None), got 'detach'",
        "use 'detached'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_mistake_is_told(mistake):
    function, error, begin, end = MISTAKES[mistake]
    with pytest.raises(error) as caught:
        function()
    message = str(caught.value)
    assert message.startswith(begin), message
    assert message.endswith(end), message


# Others' name, and ours that is named.
NAMES = {
    "bias": "linear_bias",
    "lse_square_scale": "z_loss",
    "logit_softcapping": "softcap",
    "final_logit_softcapping": "softcap",
    "label_smooting": "label_smoothing",
    "ignore_idx": "ignore_index",
    "ignored_index": "ignore_index",
    "num_items_in_batch": "num_items",
    "chunk_size": "max_memory",
    "ce_weight": "weight",
    "return_predicted_tokens": "return_predictions",
    "Softcap": "softcap",
    "valid_vocabs": "valid_vocab",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_option_that_another_name_means(name):
    with pytest.raises(TypeError, match=f"'{name}'; use {NAMES[name]}; expected some of "):
        flce.linear_cross_entropy(X, W, Y, **{name: 1})


def test_no_option_is_named_that_the_function_lacks_or_that_is_far():
    for function, name in ((flce.cross_entropy, "bias"), (flce.linear_cross_entropy, "qqq")):
        operands = (X @ W.T, Y) if function is flce.cross_entropy else (X, W, Y)
        with pytest.raises(TypeError, match=f"'{name}'; expected some of "):
            function(*operands, **{name: 1})
    with pytest.raises(TypeError, match="'smoothing'; use label_smoothing; expected"):
        flce.LinearCrossEntropyLoss(HIDDEN, VOCAB, smoothing=0.1)


def test_every_name_of_ours_that_another_means_exists():
    from typing import get_args

    from flce import mistakes
    from flce.options import CHOICES, Attribute, Divergence, Options, TeacherOptions, defaults

    names = {*defaults(Options), *defaults(TeacherOptions)}
    assert set(mistakes._OUR_NAME.values()) <= names
    assert not names & mistakes._OUR_NAME.keys() - {"class_weight"}
    values = {one for choices in CHOICES.values() for one in choices}
    names_of_values = {*get_args(Divergence), *get_args(Attribute)}
    assert set(mistakes._OUR_VALUE.values()) <= values | names_of_values


def test_valid_calls_that_look_like_mistakes():
    square = torch.randn(HIDDEN, HIDDEN)
    probabilities = torch.softmax(torch.randn(TOKENS, VOCAB), -1)
    flce.linear_cross_entropy(X, W, probabilities.double())
    flce.linear_cross_entropy(X, square.T, Y)
    one = torch.softmax(torch.randn(TOKENS, 1), -1)
    flce.linear_cross_entropy(X, W[:1], one)  # (N, 1) of one class
    for text in ("64mb", "64MiB", "64 kb", "1.5GiB", "4096", "4096b"):
        flce.linear_cross_entropy(X, W, Y, max_memory=text)
    flce.linear_loss(X, W, Y, lambda *given: given[0].sum())
    flce.linear_loss(X, W, Y, lambda p, e=None, rows=None, more=3: p.sum())


def test_the_operators_and_graphs_have_the_remedies_too():
    with pytest.raises(ValueError, match=r"pass linear_weight\.T$"):
        torch.ops.flce.linear_cross_entropy(X, W.T, Y)
    meta = [tensor.to("meta") for tensor in (X, W.T, Y)]
    with pytest.raises(ValueError, match=r"pass linear_weight\.T$"):
        flce.linear_cross_entropy(*meta)


class Quantized(torch.Tensor):
    """As torchao's: a subclass with rules of its own, and none for flce's operators."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{cls.__name__} has no {function}")


def test_quantized_subclasses():
    begin = r"^linear_weight: expected a plain tensor, as dequantize\(\) makes it, got "
    with pytest.raises(TypeError, match=begin + "Quantized, which has no"):
        flce.linear_cross_entropy(X, Quantized(W), Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own are deprecated
        weight = torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=begin + r"a tensor of torch\.qint8, which has no"):
        flce.linear_cross_entropy(X, weight, Y)


# ---- warnings and the log ----


@pytest.fixture
def fresh():
    validate.warn_once.cache_clear()
    yield
    validate.warn_once.cache_clear()


EVERY = "every label is ignore_index, -100: the loss is 0"


@pytest.mark.parametrize(
    "function",
    [loss(X, W, Y * 0 - 100), of_logits(X @ W.T, Y * 0 - 100), loss(X3, W, Y2 * 0 - 100, shift=1)],
)
def test_a_mean_over_no_label_warns_once_at_the_callers_line(function, fresh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            function()
    assert [EVERY in str(one.message) for one in caught] == [True]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "function",
    [
        loss(X, W, Y * 0 - 100, reduction="sum"),
        loss(X, W, Y * 0 - 100, reduction="none"),
        loss(X, W, Y * 0 - 100, num_items=0),
        loss(X[:0], W, Y[:0]),
        loss(X, W, torch.tensor([1, *[-100] * 5])),
        loss(torch.zeros(TOKENS, HIDDEN), W[:1], Y * 0),  # a loss of 0 of valid labels
        call(flce.linear_loss, X, W, Y * 0 - 100, lambda p, e, r: p.sum(), rows=2),
    ],
)
def test_what_does_not_warn(function, fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function()


def test_a_call_by_a_hook_of_saved_tensors_takes_no_warning(fresh):
    x = X.clone().requires_grad_()

    def pack(tensor):
        flce.linear_cross_entropy(X, W, Y)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with pytest.warns(UserWarning, match=EVERY):
            flce.linear_cross_entropy(x, W, Y * 0 - 100)


def test_a_compiled_call_leaves_no_warning_to_the_next_one(fresh):
    compiled = torch.compile(flce.linear_cross_entropy, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flce: ")
        compiled(X, W, Y * 0 - 100)
        flce.linear_cross_entropy(X, W, Y)


def test_nothing_is_read_of_traced_or_fake_labels(fresh):
    from torch._subclasses.fake_tensor import FakeTensorMode

    ignored = Y * 0 - 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeTensorMode() as mode:
            flce.linear_cross_entropy(*map(mode.from_tensor, (X, W, ignored)))
        traced = torch.fx.experimental.proxy_tensor.make_fx(flce.linear_cross_entropy)
        traced(X, W, ignored)


class Model(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.lm_head = head or nn.Linear(HIDDEN, VOCAB)

    def forward(self, hidden, labels=None):
        logits = self.lm_head(hidden)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class Hooked(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_warnings_of_fuse_are_at_the_users_line():
    with pytest.warns(UserWarning, match="lm_head is not fused") as caught:
        flce.fuse(Model(Hooked(HIDDEN, VOCAB)))
    assert {one.filename for one in caught} == {__file__}


def test_the_log_says_that_a_model_is_fused_and_its_first_loss(caplog):
    with caplog.at_level(logging.INFO, logger="flce"), flce.fuse(model := Model()):
        for _ in range(2):
            model(X, Y).backward()
    assert [(one.name, one.levelname) for one in caplog.records] == [("flce", "INFO")] * 2
    attached, first = (one.getMessage() for one in caplog.records)
    assert attached == "flce.fuse: Model: head lm_head is fused, when='labels'"
    assert first == "flce.fuse: Model: first loss without logits (steps after the head: none)"


def test_the_log_is_silent_unless_asked(capfd):
    with flce.fuse(model := Model()):
        model(X, Y).backward()
    assert capfd.readouterr() == ("", "")


# ---- packages that are not installed ----


def test_a_missing_package_is_named_with_what_to_install():
    for package, what in (
        ("liger_kernel", "liger-kernel"),
        ("transformers", "flce[integrations]"),
        ("verl", "verl"),
    ):
        error = ModuleNotFoundError("No module named 'absent'", name="absent")
        expected = f"flce.integrations: {package}: no module named 'absent'; pip install \"{what}\""
        with pytest.raises(ModuleNotFoundError, match=re.escape(expected)), imports_of(package):
            raise error


def test_a_package_of_another_version():
    with pytest.raises(ModuleNotFoundError, match="the installed torch has another version than"):
        with imports_of("torch"):
            import torch.absent  # noqa: F401


@pytest.mark.parametrize("name", ["cce", "liger", "nemo", "skyrl", "torchtitan", "transformers"])
def test_every_integration_names_what_to_install(name):
    absent = ["cut_cross_entropy", "liger_kernel", "nemo_automodel", "skyrl", "torchtitan"]
    absent += ["transformers"]
    code = f"""
import sys, flce
sys.modules.update(dict.fromkeys({absent}))
try:
    getattr(flce.integrations.{name}, "install", lambda: None)()
except ModuleNotFoundError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    expected = r"flce\.integrations: \w+: no module named '\w+.*'; pip install "
    assert re.match(expected, run.stdout), run.stdout + run.stderr
