#!/usr/bin/env python3
"""Checks the floors: an include line names its floor, and arrows go down only (docs/concepts/architecture.md).

    5  examples/ bench/ python/  public headers; bench/ also the launcher's and comm/transport.hpp,
                                 python/ also its own
    4  launcher/                 public headers and its own
    3  src/<room>/               the rooms of SRC below, each on those before it
    2  kernels/   comm/          floors 0 and 1 and its own; neither includes the other. The rooms of
                                 comm/ include control, nccl also cuda; none includes mpi or nccl
    1  src/base/                 what kernels/ and comm/ need too; floor 0 and its own
    0  src/longspan/             std and its own; interop headers may name their library

and habits that keep the floors clean: strategies name no library, of the library only comm/mpi and
comm/nccl include the headers of MPI and NCCL, PTX stays in
kernels/cuda/arch/, as does what only nvcc understands, kernels start by kernels/cuda/common/launch.hpp,
and only src/base/env.cpp reads the environment.

The Python modules of bench/ import each other without circles, and no script is imported.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = {".cpp", ".hpp", ".cu", ".cuh", ".h"}
# The rooms of src/, and those of them that each may include besides itself.
SRC = {
    "base": set(),
    "arguments": {"base"},
    "strategy": {"base", "arguments"},
    "agreement": {"base", "arguments", "strategy"},
    "forecast": {"base", "arguments", "strategy"},
    "layer": {"base", "arguments", "strategy", "agreement"},
    "serving": {"base", "arguments"},
    "reshard": {"base", "arguments", "agreement", "layer"},
    "communicator": {"base"},
}
INTEROP = {"mpi.hpp": {"mpi.h"}, "nccl.hpp": {"nccl.h"}, "dlpack.hpp": {"dlpack/dlpack.h"},
           "cuda.hpp": {"cuda_runtime_api.h"}}

# All kernels are launched in one way.
FOR_ALL_KERNELS = {"kernels/cuda/common/launch.hpp"}

# The time of a collective is measured without a layer around it.
FOR_BENCH = {"comm/transport.hpp"}

# The simulator's fibers switch stacks by instructions of the CPU.
FIBERS = {"kernels/simulated/fiber.cpp"}

FOREIGN = {"hwy"}  # Highway needs quotes: it includes its own files repeatedly

# comm/<room>/ is a target of its own, as are the users of MPI or NCCL: what else of comm/ it may
# include, besides the headers of comm/ itself, which are None here.
MAY_ENTER = {
    "control": {"control"},
    "tcp": {None, "control", "tcp"},
    "cuda": {None, "control", "cuda"},
    "mpi": {None, "control", "mpi"},
    "nccl": {None, "control", "cuda", "nccl"},
    None: {None, "control"},
    "communicator": {None, "control", "tcp"},
    "agreement": {None, "control"},
    "reshard": {None, "control"},
    "layer": {None},
    "serving": {None},
    "strategy": {None},
}
OWNERS = {"mpi.h": ("comm/mpi/",), "nccl.h": ("comm/nccl/", "kernels/simulated/")}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
STANDARD = re.compile(r"[a-z_]+")  # <vector>, <cstddef>: a name without a folder or a suffix
LIBRARY = re.compile(r"cuda|nccl|(\b|_)mpi", re.IGNORECASE)
ASM = re.compile(r"\basm\b\s*(volatile\b|__volatile__\b)?\s*\(")
TRIPLE = re.compile(r"<<<")
# Kernels choose by `if constexpr` (arch/target.cuh) and get memory from arch/shared.cuh, so that
# other compilers accept them unchanged. The host decides which kernels a build has.
NVCC = re.compile(r"\b__CUDA_ARCH|\b__CUDACC__|\b__shared__\b|"
                  r"^\s*#\s*(if|elif)(?!def LONGSPAN_SM90A$)")
GETENV = re.compile(r"\bgetenv\s*\(")


def floor_of(path):
    """The floor of a file, by its name: the part of the tree that it belongs to."""
    parts = path.split("/")
    if parts[0] != "src":
        return parts[0]
    return "public" if parts[1] == "longspan" else parts[1]


def room_of(path):
    """comm/mpi/transport.hpp: mpi. comm/transport.hpp: None. Other files: their floor."""
    parts = path.split("/")
    if parts[0] != "comm":
        return floor_of(path)
    return parts[1] if len(parts) > 2 else None


# What a quoted include may name, besides the public headers, which all may.
MAY_INCLUDE = {
    "public": set(),
    **{room: {room} | others | ({"kernels", "comm"} if room != "base" else set()) for room, others in SRC.items()},
    "kernels": {"base", "kernels"},
    "comm": {"base", "comm"},
    "launcher": {"launcher"},
    "examples": {"examples"},
    "bench": {"bench", "launcher"},
    "python": {"python"},
}


def judge(path, line):
    """Why this line does not belong into this file, or None."""
    floor = floor_of(path)
    if floor not in MAY_INCLUDE:
        return f"a file of src/ stands in one of its rooms: {', '.join(SRC)}"
    include = INCLUDE.match(line)
    if include:
        bracket, name = include.groups()
        if bracket == '"':
            if name.startswith("longspan/"):
                return None
            target = floor_of(name)
            if target in FOREIGN and floor in ("kernels", "communicator"):
                return None
            if target not in MAY_INCLUDE:
                return f'"{name}" does not name its floor'
            if name in FOR_ALL_KERNELS and path.endswith(".cu"):
                return None
            if name in FOR_BENCH and floor == "bench":
                return None
            if target not in MAY_INCLUDE[floor]:
                return f"{floor} may not include {target}"
            if target == "comm" and room_of(name) not in MAY_ENTER.get(room_of(path), ()):
                return f"{room_of(path) or 'comm'} may not include comm/{room_of(name) or ''}"
        elif name.startswith("longspan/"):
            return 'own headers are included in quotes' if floor != "examples" else None
        elif floor == "public" and not STANDARD.fullmatch(name):
            if name not in INTEROP.get(path.split("/")[-1], ()):
                return f"a public header includes the standard library only, not <{name}>"
        elif floor in ("kernels", "comm", *SRC) and name in OWNERS:
            if not path.startswith(OWNERS[name]):
                return f"<{name}> is included in {' and '.join(OWNERS[name])} only"
    if floor == "strategy" and LIBRARY.search(line):
        return "a strategy names no library"
    if TRIPLE.search(line):
        return "kernels start by kernels/cuda/common/launch.hpp"
    if ASM.search(line) and not path.startswith("kernels/cuda/arch/") and path not in FIBERS:
        return "PTX stands in kernels/cuda/arch/ only"
    if (path.startswith("kernels/cuda/") and not path.startswith("kernels/cuda/arch/")
            and NVCC.search(line.split("//")[0].rstrip())):
        return "what only nvcc understands stands in kernels/cuda/arch/ only"
    if GETENV.search(line) and path != "src/base/env.cpp":
        return "only src/base/env.cpp reads the environment"
    return None


# The judge is judged first: (file, line, allowed).
CASES = [
    ("src/longspan/state.hpp", "#include <cmath>", True),
    ("src/longspan/state.hpp", "#include <mpi.h>", False),
    ("src/longspan/mpi.hpp", "#include <mpi.h>", True),
    ("src/longspan/state.hpp", '#include "kernels/params.hpp"', False),
    ("src/base/trace.hpp", "#include <nvtx3/nvtx3.hpp>", True),
    ("src/base/env.hpp", '#include "comm/transport.hpp"', False),
    ("src/base/env.hpp", '#include "src/arguments/validate.hpp"', False),
    ("src/arguments/validate.cpp", '#include "src/base/env.hpp"', True),
    ("src/arguments/validate.cpp", '#include "src/layer/layer_memory.hpp"', False),
    ("src/reshard/reshard.cpp", '#include "src/layer/layer_memory.hpp"', True),
    ("src/attention.cpp", '#include "src/base/env.hpp"', False),
    ("kernels/host/attend.cpp", '#include "kernels/params.hpp"', True),
    ("kernels/host/attend.cpp", '#include "src/base/check.hpp"', True),
    ("kernels/host/attend.cpp", '#include "hwy/highway.h"', True),
    ("kernels/host/attend.cpp", '#include "comm/transport.hpp"', False),
    ("kernels/host/attend.cpp", '#include "src/strategy/strategy.hpp"', False),
    ("kernels/host/attend.cpp", '#include "params.hpp"', False),
    ("comm/mpi/mpi.cpp", '#include "kernels/params.hpp"', False),
    ("comm/mpi/mpi.cpp", "#include <mpi.h>", True),
    ("comm/mpi/mpi.cpp", '#include "comm/control/control.hpp"', True),
    ("comm/mpi/mpi.cpp", '#include "comm/nccl/link.hpp"', False),
    ("comm/mpi/mpi.cpp", "#include <nccl.h>", False),
    ("comm/nccl/link.cpp", '#include "comm/cuda/stream.hpp"', True),
    ("comm/control/control.cpp", '#include "comm/tcp/hub.hpp"', False),
    ("comm/libraries.cpp", '#include "comm/mpi/from_mpi.hpp"', False),
    ("src/communicator/communicator.cpp", '#include "comm/tcp/control.hpp"', True),
    ("src/communicator/communicator.cpp", '#include "comm/mpi/from_mpi.hpp"', False),
    ("src/communicator/info.cpp", "#include <mpi.h>", False),
    ("src/communicator/info.cpp", "#include <cuda_runtime_api.h>", True),
    ("src/strategy/ring.cpp", '#include "comm/control/control.hpp"', False),
    ("src/layer/attention.cpp", '#include "comm/transport.hpp"', True),
    ("src/layer/attention.cpp", '#include "launcher/judge/oracle.hpp"', False),
    ("src/strategy/ring.cpp", "// queued behind NCCL", False),
    ("src/strategy/ring.cpp", "// the compiler simplifies this", True),
    ("launcher/command/main.cpp", '#include "kernels/params.hpp"', False),
    ("launcher/command/main.cpp", "#include <CLI/CLI.hpp>", True),
    ("launcher/command/main.cpp", '#include "kernels/cuda/common/launch.hpp"', False),
    ("launcher/problem/growing.cu", '#include "kernels/cuda/common/launch.hpp"', True),
    ("launcher/problem/growing.cu", '#include "kernels/params.hpp"', False),
    ("kernels/cuda/cache/rows.cu", "  map_rows_kernel<<<grid, kThreads, 0, stream>>>(p);", False),
    ("kernels/cuda/cache/rows.cu", "  launch_kernel(map_rows_kernel, {grid, kThreads, stream}, p);", True),
    ("examples/01/main.cpp", '#include "launcher/judge/oracle.hpp"', False),
    ("examples/01/main.cpp", "#include <longspan/state.hpp>", True),
    ("bench/merge.cpp", '#include "src/base/check.hpp"', False),
    ("python/src/attention.cpp", '#include "python/src/arrays.hpp"', True),
    ("python/src/attention.cpp", '#include "longspan/attention.hpp"', True),
    ("python/src/attention.cpp", '#include "src/arguments/validate.hpp"', False),
    ("bench/timing.hpp", '#include "launcher/bench/graph.hpp"', True),
    ("bench/tcp_gather.cpp", '#include "comm/transport.hpp"', True),
    ("bench/tcp_gather.cpp", '#include "comm/tcp/mesh.hpp"', False),
    ("examples/01/main.cpp", '#include "comm/transport.hpp"', False),
    ("launcher/bench/graph.hpp", '#include "bench/timing.hpp"', False),
    ("kernels/cuda/attend.cuh", '  asm volatile("mma.sync ...");', False),
    ("kernels/cuda/arch/mma.cuh", '  asm volatile("mma.sync ...");', True),
    ("kernels/cuda/cache/rows.cu", "  __shared__ int sum;", False),
    ("kernels/cuda/cache/rows.cu", "  extern __shared__ std::byte memory[];", False),
    ("kernels/cuda/common/loader.cuh", "  if constexpr (__CUDA_ARCH__ >= 890)", False),
    ("kernels/cuda/common/loader.cuh", "#if SOMETHING", False),
    ("kernels/cuda/common/loader.cuh", "  # elif SOMETHING", False),
    ("kernels/cuda/common/loader.cuh", "#ifdef LONGSPAN_LOADER", False),
    ("kernels/cuda/common/view.cuh", "#if defined(__CUDACC__)", False),
    ("kernels/cuda/hopper/attend_sm90.cuh", "constexpr bool k = __CUDA_ARCH_FEAT_SM90_ALL;", False),
    ("kernels/cuda/hopper/attend_sm90.cu", "#ifdef LONGSPAN_SM90A", True),
    ("kernels/cuda/common/code.hpp", "// Device code decides by __CUDA_ARCH__, and the host too.", True),
    ("kernels/cuda/arch/target.cuh", "#if defined(__CUDA_ARCH__)", True),
    ("kernels/cuda/arch/shared.cuh", "  __shared__ T variable;", True),
    ("kernels/memory.cpp", "#if defined(LONGSPAN_HAVE_CUDA)", True),
    ("comm/mpi/mpi.cpp", 'std::getenv("RANK")', False),
    ("src/base/env.cpp", 'std::getenv("RANK")', True),
]


def bench_imports(texts):
    """{module: the modules of bench/ that it imports anywhere, also in functions}"""
    found = {}
    for module, text in texts.items():
        names = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
        found[module] = names & set(texts)
    return found


def judge_bench(texts):
    """The errors in how the modules import each other, given their texts by name."""
    imports, wrong = bench_imports(texts), []
    for module, names in sorted(imports.items()):
        wrong += [f"bench/{module}.py imports {name}, which is a script: what both need belongs into a "
                  "module of its own" for name in sorted(names)
                  if re.search(r"^if __name__ ==", texts[name], re.MULTILINE)]
    done = set()

    def walk(module, path):
        if module in path:
            wrong.append("bench/ imports in a circle: " +
                         " -> ".join([*path[path.index(module):], module]))
        elif module not in done:
            for name in sorted(imports[module]):
                walk(name, [*path, module])
            done.add(module)

    for module in sorted(imports):
        walk(module, [])
    return wrong


SCRIPT = 'if __name__ == "__main__":\n    main()\n'
BENCH_CASES = [
    ({"a": "import b, json\n", "b": "from c import x\n", "c": "", "d": "import b\n" + SCRIPT}, 0),
    ({"a": "import b\n", "b": "def f():\n    import a\n"}, 1),
    ({"a": "from b import x\n", "b": "from c import x\n", "c": "import a\n"}, 1),
    ({"a": "import a\n"}, 1),
    ({"a": "import b\n", "b": SCRIPT}, 1),
]


def main():
    for texts, count in BENCH_CASES:
        assert len(judge_bench(texts)) == count, f"floors.py misjudges {texts}"
    for path, line, allowed in CASES:
        assert (judge(path, line) is None) == allowed, f"floors.py misjudges {path}: {line}"

    files = sorted(path for folder in ("src", "kernels", "comm", "launcher", "examples", "bench",
                                                 "python")
                   for path in (ROOT / folder).rglob("*") if path.suffix in CODE)
    wrong = 0
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            why = judge(name, line)
            if why:
                wrong += 1
                print(f"{name}:{number}: {why}\n    {line.strip()}")
    scripts = {path.stem: path.read_text(encoding="utf-8")
               for path in (ROOT / "bench").glob("*.py")}
    for why in judge_bench(scripts):
        wrong += 1
        print(why)
    print(f"floors: {len(files) + len(scripts)} files, {wrong} wrong")
    return 1 if wrong or not files or not scripts else 0


if __name__ == "__main__":
    sys.exit(main())
