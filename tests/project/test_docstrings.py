"""Every public name has an example in its docstring, and it gives what it says."""

import doctest
import inspect

import pytest
import torch
import torch.distributed as dist

import flce


def examples_of(name):
    """The examples of a public name itself: not of a class's methods, nor of a module's names."""
    found = getattr(flce, name)
    globs = {"flce": flce, "torch": torch, "nn": torch.nn}
    parser, text = doctest.DocTestParser(), inspect.getdoc(found) or ""
    return parser.get_doctest(text, globs, f"flce.{name}", None, 0)


CALLABLE = [name for name in flce.__all__ if callable(getattr(flce, name))]
RESULTS = {"LinearCrossEntropyOutput", "Plan", "TopLogprobs"}  # which no user makes


@pytest.mark.parametrize("name", sorted({*CALLABLE} - RESULTS))
def test_what_it_raises(name):
    text = inspect.getdoc(getattr(flce, name))
    assert "Raises" in text or "Error" in text


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", flce.__all__)
def test_example(name, one_rank, capsys):
    test = examples_of(name)
    assert test.examples, f"flce.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
