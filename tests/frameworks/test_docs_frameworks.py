"""The pages of the site that need a framework: their code blocks, each page in a process of its
own, because frameworks change torch and each other.

Pages that need transformers are children of one process that has imported it, which takes longer
than most pages."""

import importlib.util
import os
import subprocess
import sys

import pytest

from harness import pages

FRAMEWORKS = [page for page in pages.PAGES if pages.needs_of(page)]
SHARED = ("transformers", "peft", "trl", "datasets", "accelerate")
FAMILY = [page for page in FRAMEWORKS if set(pages.needs_of(page)) & {"transformers", "trl"}]
PROGRAM = """
import importlib, os, pathlib, sys, traceback
from harness import pages
found, paths = sys.argv[1].split(), list(map(pathlib.Path, sys.argv[2:]))
for name in found:
    importlib.import_module(name)
failed = []
for path in paths:
    if not (child := os.fork()):
        try:
            pages.run(path, {"__name__": "page"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # a normal exit would run what the parent has registered
    if os.waitpid(child, 0)[1]:
        failed.append(pages.name_of(path))
sys.exit(f"failed: {failed}" if failed else 0)
"""


# What README.md's blocks of trainers have at hand.
README = """
import transformers, trl
from datasets import Dataset
from harness import pages
from harness.tiny_models import PROMPTS, TRAINING, tiny_llama, tiny_tokenizer
import flce
data = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
tiny_llama().save_pretrained("model")
tiny_tokenizer().save_pretrained("model")
prompts = Dataset.from_dict({"prompt": PROMPTS})
reward = lambda completions, **_: [float(len(text)) for text in completions]
settings = {
    "Trainer": transformers.TrainingArguments("out", max_steps=2, **TRAINING),
    "GRPOTrainer": trl.GRPOConfig(
        "out", max_steps=2, bf16=False, num_generations=2, max_completion_length=4, **TRAINING
    ),
}
install, handles = flce.integrations.trl.install, []
flce.integrations.trl.install = lambda: handles.append(install())
own = "tested by tests/frameworks/test_docs_frameworks.py"
blocks = [b for b in pages.blocks_of(pages.ROOT / "README.md") if b.reason == own]
assert len(blocks) == 2
for block in blocks:
    (name,) = [name for name in settings if f" {name}(" in block.code.replace(".", " ")]
    names = {"model": transformers.AutoModelForCausalLM.from_pretrained("model"), "data": data}
    names |= {"arguments": settings[name], "prompts": prompts, "reward": reward}
    exec(block.code, names)
    names["trainer"].train()
    if name == "Trainer":
        found = flce.explain(names["model"])
        assert found.losses and not found.fallbacks, found
(handle,) = handles
assert handle.calls["flce"] >= 2 and not handle.calls.get("trl"), handle
"""


def run(paths, imported, folder):
    program(PROGRAM, folder, " ".join(imported), *paths)


def program(code, folder, *arguments):
    places = [str(pages.ROOT / "tests"), str(pages.ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def is_there(page):
    return all(importlib.util.find_spec(name.split(".")[0]) for name in pages.needs_of(page))


def test_pages_with_transformers(tmp_path):
    pytest.importorskip("transformers")
    found = [name for name in SHARED if importlib.util.find_spec(name)]
    there = [page for page in FAMILY if is_there(page)]
    assert there
    run(there, found, tmp_path)


def test_readmes_trainers(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("trl")
    program(README, tmp_path)


@pytest.mark.parametrize("page", [p for p in FRAMEWORKS if p not in FAMILY], ids=pages.name_of)
def test_other_pages(page, tmp_path):
    if not is_there(page):
        pytest.skip(f"without {pages.needs_of(page)}")
    run([page], [], tmp_path)
