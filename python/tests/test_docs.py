"""Runs the examples of docstrings and documentation; compares stubs and __all__ with the module."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

import longspan

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(longspan.__file__).parent


PEERS = ["longspan.flash_attn", "longspan.flashinfer", "longspan.sglang", "longspan.vllm"]  # with the names of other projects


def documented():
    for module in [longspan, *map(importlib.import_module, PEERS)]:
        for name in module.__all__:
            what = getattr(module, name)
            if getattr(what, "__doc__", None) and not isinstance(what, str):
                yield name if module is longspan else f"{module.__name__}.{name}", what


@pytest.mark.parametrize("name, what", list(documented()))
def test_examples_in_docstrings(name, what):
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(what.__doc__), {}, name, None, None)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.failures == 0
    if inspect.isfunction(what) and name not in ("from_mpi4py", "reduce_segments"):
        assert test.examples, f"{name} has no example"


def test_everything_is_documented():
    for name in longspan.__all__:
        assert getattr(longspan, name).__doc__, name
    for module in map(importlib.import_module, PEERS):
        assert module.__doc__ and all(getattr(module, name).__doc__ for name in module.__all__)
    for what in (longspan.Attention, longspan.Communicator, longspan.Reshard, longspan.Sharding, longspan.Shard):
        for name, member in vars(what).items():
            if not name.startswith("_") and name not in ("layout", "block", "rank", "ranks"):
                assert member.__doc__, f"{what.__name__}.{name}"


def test_stubs_are_what_there_is():
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    named = set()
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            named.add(node.name)
            theirs = {n for n in vars(getattr(longspan._core, node.name)) if not n.startswith("_")}
            ours = {f.name for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")}
            assert ours == theirs, node.name
        elif isinstance(node, ast.FunctionDef):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            named.add(node.target.id)
    there = {n for n in dir(longspan._core) if not n.startswith("__") or n == "__version__"}
    assert named == there
    assert (PACKAGE / "py.typed").exists()


def python_blocks(path):
    """Blocks of a page that are to be run: ```python. Blocks cut from an example run there."""
    return re.findall(r"(?<!-->\n)```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


PAGES = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
         if path.exists() and python_blocks(path)]


def missing(block):
    """The imports of a block that are missing here."""
    for name in re.findall(r"^(?:import|from) ([\w.]+)", block, re.MULTILINE):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of the package that would contain it
            found = None
        if found is None or name == "longspan.torch" and not importlib.util.find_spec("torch"):
            return name
    return None


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="installed without the repository")
@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_the_documentation(page, tmp_path):
    """As a reader would: copied into a file, and run."""
    blocks = python_blocks(ROOT / page)
    ran = 0
    for number, block in enumerate(blocks):
        if missing(block):
            continue
        script = tmp_path / f"snippet{number}.py"
        script.write_text(block)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60,
                              cwd=tmp_path)
        assert done.returncode == 0, block + done.stderr
        ran += 1
    if not ran:
        pytest.skip("it needs what is not installed")


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="installed without the repository")
def test_pages_with_snippets_are_found():
    assert {"README.md", "docs/start/python.md", "docs/guides/decode.md"} <= set(PAGES)


def test_importing_is_light():
    """Neither torch nor NumPy nor typing is imported; below is the time on CI's machine."""
    script = ("import sys, time; before = set(sys.modules); begin = time.perf_counter(); import longspan; "
              "print(time.perf_counter() - begin, *(set(sys.modules) - before))")
    times = []
    for _ in range(5):
        took, *modules = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True,
                                        check=True).stdout.split()
        times.append(float(took))
        assert not {"torch", "numpy", "mpi4py", "jax", "ml_dtypes"} & {m.split(".")[0] for m in modules}
    print(f"importing longspan takes {min(times) * 1e3:.1f} ms", file=sys.stderr)


def test_a_process_ends_cleanly():
    """With communicators, layers and results alive at its end, however it ends."""
    script = ("import numpy as np, longspan; comm = longspan.alone(); q = np.ones((3, 2, 16), np.float32)\n"
              "layer = longspan.Attention(comm, heads=2, head_dim=16, dtype='float32', max_queries=4)\n"
              "kept = [layer(q, q, q), longspan.attend(q, q, q)]\n")
    for end in ("", "raise SystemExit(0)", "comm.close()", "del comm", "import sys; sys.modules.clear()"):
        done = subprocess.run([sys.executable, "-c", script + end], capture_output=True, text=True, timeout=60,
                              env=os.environ)
        assert done.returncode == 0 and not done.stderr, (end, done.stderr)
