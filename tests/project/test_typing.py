"""What type checkers are told: a user's script passes them, overloads are those of their function,
and values, options and attributes have the types that are stated."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import types
import typing

import pytest
import torch
import torch.distributed as dist
import typed_user
import typing_extensions

import flce
from flce.integrations import cce, liger
from flce.integrations._rebind import Installation
from flce.options import RETURNS, ModuleOptions, Option, Options, TeacherOptions, defaults, types_of
from harness import ROOT

SCRIPT = ROOT / "tests/project/typed_user.py"
# torch's other modules take mypy 10 s more. A framework may be missing.
CONFIG = """
[mypy]
strict = true
follow_imports = skip
[mypy-flce.*,torch,torch._tensor,torch.nn,torch.nn.modules.*,torch.nn.parameter,torch.distributed.*]
follow_imports = silent
[mypy-flce.integrations.*]
disable_error_code = import-not-found, misc
"""


def test_mypy_accepts_a_users_script(tmp_path):
    pytest.importorskip("mypy")
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", config, SCRIPT]
    command += ["--cache-dir", ROOT / ".mypy_cache"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright, and it Node.js")
def test_pyright_finds_nothing_unknown(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    settings["reportUnnecessaryTypeIgnoreComment"] = "error"
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--pythonpath", sys.executable, "--project", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def conforms(value, stated):
    """Whether a value is of a type, as far as values tell."""
    origin, inner = typing.get_origin(stated), typing.get_args(stated)
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, one) for one in inner)
    if origin is tuple and Ellipsis not in inner:
        pairs = zip(value, inner, strict=True)
        return type(value) is tuple and all(conforms(one, its) for one, its in pairs)
    if origin is typing.Literal:
        return value in inner
    if origin is dict:
        return all(conforms(k, inner[0]) and conforms(v, inner[1]) for k, v in value.items())
    return isinstance(value, types.NoneType if stated is None else origin or stated)


RUN = ["losses", "logprobs", "chunked_losses", "modules", "plans", "fusion", "replacements"]
RUN.append("definitions")


@pytest.mark.parametrize("name", RUN)
def test_values_have_the_stated_types(name, monkeypatch):
    stated = []

    def check(value, kind):
        assert conforms(value, kind), f"{kind} expected, {value!r} came"
        stated.append(kind)
        return value

    monkeypatch.setattr(typed_user, "assert_type", check)
    getattr(typed_user, name)()
    assert stated


# ---- the options of a function ----

X, W, Y = torch.randn(4, 8), torch.randn(16, 8), torch.arange(4)
CALLS = {
    flce.linear_cross_entropy: (X, W, Y),
    flce.cross_entropy: (X, Y),
    flce.linear_logprobs: (X, W, Y),
    flce.linear_logprobs_at: (X, W, Y[:, None]),
    flce.linear_loss: (X, W, Y, lambda logprobs, _, rows: -logprobs.sum()),
    flce.linear_divergence: (X, W, X, W),
    flce.plan: (4, 8, 16),
    flce.fuse: (torch.nn.Sequential(torch.nn.Linear(8, 16)), "0"),
    flce.LinearCrossEntropyLoss: (8, 16),
    flce.LinearCrossEntropyHead: (8, 16),
}
OF_REFERENCE = [
    flce.reference.linear_cross_entropy,
    flce.reference.cross_entropy,
    flce.reference.linear_logprobs,
]


def options_of(function):
    """The TypedDict of the **options of a function, of its last overload or of a class."""
    function = function.__init__ if inspect.isclass(function) else function
    function = [function, *typing_extensions.get_overloads(function)][-1]
    code = function.__code__
    is_variadic = bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + is_variadic]
    (options,) = typing.get_args(function.__annotations__[name])
    return options


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_a_function_takes_the_options_of_its_typed_dict(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcaps'") as refusal:
        function(*CALLS[function], softcaps=1.0)
    listed = str(refusal.value).partition("expected some of ")[2].split(", ")
    assert listed == [*defaults(options_of(function))]


@pytest.mark.parametrize("function", OF_REFERENCE, ids=lambda function: function.__name__)
def test_the_reference_takes_the_options_of_its_typed_dict(function):
    operands = CALLS[getattr(flce, function.__name__)]
    expected = function(*operands)
    torch.testing.assert_close(function(*operands, **defaults(options_of(function))), expected)


SHOWN = [one for one in CALLS if not inspect.isclass(one)]


@pytest.mark.parametrize("function", SHOWN, ids=lambda function: function.__name__)
def test_a_signature_shows_options_with_their_types(function):
    parameters = inspect.signature(function).parameters
    hints = hints_of(options_of(function))
    for name, default in defaults(options_of(function)).items():
        shown = parameters[name]
        assert shown.kind is shown.KEYWORD_ONLY and shown.default == default
        if name != "vocab_parallel":  # its type is text: flce.options does not import it
            assert shown.annotation == hints[name]
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


CORE_MODULES = [flce.functional, flce.logprobs, flce.chunked_loss, flce.reference, flce.modules]
OVERLOADED = {
    (module.__name__, name): getattr(module, name)
    for module in CORE_MODULES
    for name, one in vars(module).items()
    if inspect.isfunction(one)
    and one.__module__ == module.__name__
    and typing_extensions.get_overloads(one)
}
for _module in (flce.LinearCrossEntropyLoss, flce.LinearCrossEntropyHead):
    _call = inspect.get_annotations(_module)["__call__"]
    OVERLOADED["flce.modules", f"{_call.__name__}.__call__"] = _module.forward
OVERLOADED["flce.modules", "LinearCrossEntropyHead.forward"] = flce.LinearCrossEntropyHead.forward
# Those of other packages' signatures, whose last overload has every argument.
OF_PACKAGES = [cce.linear_cross_entropy, cce.LinearCrossEntropy.__init__]
OF_PACKAGES += [liger.liger_fused_linear_cross_entropy]
OF_PACKAGES += [liger.LigerFusedLinearCrossEntropyLoss.__init__]
OVERLOADED |= {(one.__module__, one.__qualname__): one for one in OF_PACKAGES}


def parameters_of(definitions):
    """(names by position, all names, [{name: default} of each]) of a function's overloads."""
    positional, every, defaults = [], set(), []
    for one in definitions:
        own = inspect.signature(one).parameters.values()
        by_position = [p.name for p in own if p.kind == p.POSITIONAL_OR_KEYWORD]
        longer = max(positional, by_position, key=len)
        assert longer[: len(by_position)] == by_position
        assert longer[: len(positional)] == positional
        positional = longer
        for parameter in own:
            if parameter.kind == parameter.VAR_KEYWORD:
                (options,) = typing.get_args(parameter.annotation)
                every |= set(options.__annotations__)
        by_name = {p.name: p.default for p in own if p.kind not in VARIADIC}
        every |= by_name.keys()
        defaults.append(by_name)
    return positional, every, defaults


VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def check_overloads(name, overloads, real, others):
    """Compares overloads with their function. `others`: what it takes as **options and its
    signature does not tell."""
    positional, every, defaults = parameters_of(overloads)
    found = inspect.signature(real).parameters
    own = {n: p for n, p in found.items() if p.kind not in VARIADIC}
    by_position = [n for n, p in own.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == by_position, name
    assert every == own.keys() | others, name
    for by_name in defaults:
        for parameter in by_name.keys() & own.keys():
            default, expected = by_name[parameter], own[parameter].default
            # An overload may require what the function does not.
            is_narrower = default is inspect.Parameter.empty
            assert is_narrower or default == expected, (name, parameter)


@pytest.mark.parametrize("name", OVERLOADED, ids=".".join)
def test_overloads_are_those_of_the_function(name):
    known = types.SimpleNamespace(__module__=name[0], __qualname__=name[1])
    overloads = typing_extensions.get_overloads(known)
    assert len(overloads) > 1
    others = {*defaults(Options)} if name[0] == "flce.modules" else set()
    if name[0] == "flce.reference":
        others = {*options_of(OVERLOADED[name]).__annotations__}
    check_overloads(name, overloads, OVERLOADED[name], others)


@pytest.mark.parametrize("function", OF_PACKAGES, ids=lambda function: function.__qualname__)
def test_overloads_of_other_packages_narrow_the_outputs_alone(function):
    """Each argument has the type of the last overload; return_* of the others a Literal."""
    *others, last = typing_extensions.get_overloads(function)
    every = typing.get_type_hints(last)
    assert len(others) == 2 and inspect.signature(function) == inspect.signature(last)
    for overload in others:
        stated = typing.get_type_hints(overload)
        (options,) = typing.get_args(stated.pop("options"))
        for name, kind in {**stated, **typing.get_type_hints(options)}.items():
            is_output = name.startswith("return_") and typing.get_origin(kind) is typing.Literal
            assert kind == every[name] or is_output or name in ("self", "return"), name


@pytest.mark.parametrize(
    "module", [cce.LinearCrossEntropy, liger.LigerFusedLinearCrossEntropyLoss], ids=str
)
def test_modules_of_other_packages_state_the_types_of_their_attributes(module):
    parameters = inspect.signature(module).parameters
    expected = {name: one.annotation for name, one in parameters.items()}
    assert inspect.get_annotations(module) == expected


def hints_of(options):
    return typing.get_type_hints(options, vars(flce.options) | vars(flce))


def test_defaults_have_the_types_of_their_options():
    hints = hints_of(Options)
    for name, default in defaults().items():
        assert conforms(default, hints[name]), name
    for name, annotated in types_of(Options).items():
        assert isinstance(*annotated.__metadata__, Option), name


# That an overload narrows.
NARROWER = {"classes", "topk", *RETURNS}


def test_an_option_has_one_type():
    """In all TypedDicts; those of overloads narrow it, without a default."""
    table = hints_of(Options) | hints_of(TeacherOptions)
    for options in (*vars(flce.options).values(), *vars(flce.overloads).values()):
        if typing_extensions.is_typeddict(options):
            for name, hint in hints_of(options).items():
                is_narrower = not hasattr(options.__annotations__[name], "__metadata__")
                assert hint == table[name] or (is_narrower and name in NARROWER), (options, name)


def test_objects_have_the_attributes_that_their_classes_state():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        shards = flce.VocabParallel(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16))
    with flce.fuse(model, "0") as fusion:
        explanation = flce.explain(model)
    objects = [shards, flce.LinearCrossEntropyHead(8, 16), flce.LinearCrossEntropyLoss(8, 16)]
    objects += [fusion, explanation, cce.LinearCrossEntropy(), Installation("nothing", [])]
    objects += [liger.LigerFusedLinearCrossEntropyLoss()]
    objects += [flce.integrations.torch.LinearCrossEntropyLoss(8, 16)]
    for made in objects:
        classes = [one for one in type(made).__mro__ if one.__module__.startswith("flce")]
        stated = set().union(*map(inspect.get_annotations, classes))
        assert stated
        for attribute in stated:
            assert hasattr(made, attribute), (type(made), attribute)


def test_modules_state_the_types_of_their_attributes():
    table = hints_of(Options)
    stated = typing.get_type_hints(flce.modules._Settings, vars(flce.modules) | vars(flce))
    assert stated == {name: table[name] for name in defaults(ModuleOptions)}
