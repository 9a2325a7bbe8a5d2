#!/usr/bin/env python3
"""Do the distributed tests notice a rank that computes by local instead of global positions?

    tests/mutation.py [--work DIR] [--only NAME]

Breaks one thing at a time in a copy of the sources (host kernels), builds dist_serving_test and runs
it on 1 and on 2 ranks. On one rank local and global are the same, so the broken code passes there;
on two ranks it must fail. Prints a Markdown table; exits with 1 if a mutant survives. Takes minutes
for each mutant, so it is not part of the test suite.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

VISIBLE = "kernels/host/visible.hpp"
BIAS = "kernels/host/bias-inl.hpp"

# The row's visible keys if the rank's keys were the whole sequence.
LOCAL_SIGHT = """const Interval local = p_.visible(
        s.index, s.keys - s.query_len + token(row), s.keys);
    const auto as_it_is = [&](std::int64_t key) {
      return std::clamp(key, tile_.keys.begin, tile_.keys.end);
    };
    const Interval sight = in_shard(seen, s.shard, s.kv_len, tile_.keys).hull();
    """
SIGHT = "return in_shard(seen, s.shard, s.kv_len, tile_.keys);"
LOCAL_COLUMN = "const std::int64_t local_context = tile_.sequence.keys - tile_.sequence.query_len;\n"


def replaced(old, new):
    def change(text):
        if text.count(old) != 1:
            sys.exit(f"mutation: the sources no longer hold once: {old}")
        return text.replace(old, new)

    return change


def local_qq(text):
    """find_qq with columns counted from the rank's own context."""
    start = text.index("bool find_qq(")
    end = text.index("/// Positions past 2^31", start)
    body = text[start:end].replace("column_[", "local_column[")
    body = body.replace(
        "{\n",
        "{\n    std::int32_t local_column[kSegment];\n    " + LOCAL_COLUMN +
        "    for (int j = 0; j < kSegment; ++j)\n"
        "      local_column[j] = static_cast<std::int32_t>(\n"
        "          segment_.first + std::min(j, segment_.keys - 1) - local_context);\n"
        "    consecutive_ = false;\n", 1)
    return text[:start] + body + text[end:]


MUTANTS = [
    ("window by local position", VISIBLE,
     replaced(SIGHT, LOCAL_SIGHT + "return {{{as_it_is(local.begin), sight.end}}};")),
    ("causal bound by local position", VISIBLE,
     replaced(SIGHT, LOCAL_SIGHT + "return {{{sight.begin, as_it_is(local.end)}}};")),
    ("ALiBi by local position", BIAS,
     replaced("auto distance = hn::Load(integer, column_ + j);",
              LOCAL_COLUMN +
              "      auto distance = hn::Iota(integer, static_cast<std::int32_t>("
              "segment_.first + j - local_context));")),
    ("qq_bias by local position", BIAS, local_qq),
    ("sink added on every rank", "kernels/host/merge.cpp",
     replaced("  if (p.sinks) {",
              "  for (int again = 0; p.sinks && again < p.states.slots; ++again) {")),
]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **options)


def build(tree, jobs):
    done = run(["cmake", "--build", tree / "build", "--target", "dist_serving_test", "-j", jobs])
    if done.returncode != 0:
        sys.exit(done.stdout[-4000:])


def failures(tree, ranks):
    """Names of the tests that fail. Each runs alone: a crash must not hide the others."""
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                       LONGSPAN_THREADS="1", LONGSPAN_DEADLINE_S="10")
    program = tree / "build/tests/dist/dist_serving_test"
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]
    tests = re.findall(r"^  (\w+)", run(command + ["1", program, "--gtest_list_tests"],
                                        env=environment).stdout, re.M)
    if not tests:
        sys.exit("mutation: dist_serving_test lists no tests")
    return [test for test in tests
            if run(command + [str(ranks), program, f"--gtest_filter=*.{test}"], env=environment,
                   timeout=600).returncode != 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=pathlib.Path, help="keep the copy here")
    parser.add_argument("--only", help="the mutant with this in its name")
    parser.add_argument("--jobs", default=str(os.cpu_count()))
    options = parser.parse_args()
    tree = options.work or pathlib.Path(tempfile.mkdtemp(prefix="longspan-mutation-"))

    names = run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"]).stdout.split("\n")
    for name in filter(None, names):
        source, copy = ROOT / name, tree / name
        if not source.is_file() or (copy.is_file() and copy.read_bytes() == source.read_bytes()):
            continue  # an unchanged file keeps its time, so that little is built again
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    cache = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    done = run(["cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja", "-DLONGSPAN_CUDA=OFF"] +
               cache)
    if done.returncode != 0:
        sys.exit(done.stdout[-4000:])

    print("| broken | 1 rank | 2 ranks: tests that fail |\n|---|---|---|", flush=True)
    survivors = 0
    for name, path, change in [("nothing", VISIBLE, lambda text: text)] + MUTANTS:
        if options.only and options.only not in name and name != "nothing":
            continue
        original = (tree / path).read_text()
        (tree / path).write_text(change(original))
        build(tree, options.jobs)
        alone, both = failures(tree, 1), failures(tree, 2)
        (tree / path).write_text(original)
        if alone or bool(both) == (name == "nothing"):
            survivors += 1
        shown = "none" if not both else f"{len(both)}: " + ", ".join(both)
        print(f"| {name} | {'fails' if alone else 'passes'} | {shown} |", flush=True)
    if not options.work:
        shutil.rmtree(tree)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
