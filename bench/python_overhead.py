#!/usr/bin/env python3
"""The added cost of a Python call over the same call in C++: small arrays, on one rank.

A step of attention over a few keys itself takes microseconds, so the difference of two such times is
the cost of the binding: to read the arrays, find the layer, and make the result. Both are measured in
this process, in turn: the extension module times the call in C++, over the same layer.

    python3 bench/python_overhead.py [--results bench/results]                on CPUs
    python3 bench/python_overhead.py --backend cuda --machine h200            on a GPU: of queueing it
"""

import argparse
import importlib.util
import os
import statistics
import time

import numpy as np

os.environ.setdefault("LONGSPAN_THREADS", "1")  # a second thread's start is noise beside such calls

import longspan
from longspan import _core

import records

TARGET = 15.0  # microseconds, on the machine of the records
OPERATOR_TARGET = 20.0  # through an operator of torch


def case_arrays(kind, backend):
    rng = np.random.default_rng(0)
    shape = (1, 2, 16), (8, 1, 16), (8, 1, 16)
    arrays = [rng.standard_normal(s, dtype=np.float32) for s in shape]
    if kind == "numpy bfloat16":
        import ml_dtypes
        arrays = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    if kind.startswith("torch"):
        import torch
        arrays = [torch.from_numpy(a) for a in arrays]
        if kind == "torch bfloat16":
            arrays = [a.to(torch.bfloat16) for a in arrays]
        arrays = [a.to({"host": "cpu"}.get(backend, backend)) for a in arrays]
    return arrays


def finish(backend):
    """Waits for queued work, so that the queue is never full."""
    if backend == "cuda":
        import torch
        torch.cuda.synchronize()


def microseconds(call, repeats, backend):
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    spent = time.perf_counter_ns() - begin
    finish(backend)
    return spent / repeats / 1000


def operator_cases(q, k, v, comm):
    """The same through torch's dispatcher, and through the functions that call it."""
    import torch
    from longspan.torch import ContextParallelAttention, scaled_dot_product_attention
    from longspan.torch._groups import name_of

    name, attend = name_of(comm, None, q.device.type), torch.ops.longspan.attend.default
    layer = ContextParallelAttention(comm=comm, causal=True)
    heads_first = [t.transpose(0, 1) for t in (q, k, v)]  # [heads, tokens, dim], as torch has them
    return {
        "operator attend": lambda: attend(q, k, v, name, causal=True),
        "torch.scaled_dot_product_attention": lambda: scaled_dot_product_attention(
            *heads_first, is_causal=True, causal_alignment="lower_right", enable_gqa=True, comm=name),
        "torch.ContextParallelAttention": lambda: layer(*heads_first),
    }


def measure(kind, backend, machine, results):
    q, k, v = case_arrays(kind, backend)
    comm = longspan.alone({"host": "cpu"}.get(backend, backend))
    out = longspan.attend(q, k, v, comm=comm, causal=True)
    layer = longspan.Attention(comm, heads=2, kv_heads=1, head_dim=16,
                               dtype="bfloat16" if "bfloat16" in kind else "float32", causal=True)
    cases = {
        "attend": lambda: longspan.attend(q, k, v, comm=comm, causal=True),
        "attend, out given": lambda: longspan.attend(q, k, v, comm=comm, causal=True, out=out),
        "attend, return_lse": lambda: longspan.attend(q, k, v, comm=comm, causal=True, return_lse=True),
        "Attention": lambda: layer(q, k, v),
    }
    targets = dict.fromkeys(cases, TARGET)
    if kind.startswith("torch"):
        operators = operator_cases(q, k, v, comm)
        targets |= dict.fromkeys(operators, OPERATOR_TARGET)
        cases |= operators
    made = []
    for name, call in cases.items():
        call()
        python, cpp = [], []
        for _ in range(101):  # in turn, so that other work of the machine affects both
            python.append(microseconds(call, 100, backend))
            cpp.append(_core.time_attend(q=q, k=k, v=v, out=out, repeats=100))
        more = statistics.median(a - b for a, b in zip(python, cpp))
        made.append(records.record("python", {"call": name, "arrays": kind}, "us", round(more, 2),
                                   target=targets[name], less_is_better=True,
                                   machine=records.host_machine() if backend == "host" else None))
        print(f"{kind:16} {name:20} Python {statistics.median(python):7.2f} us, C++ "
              f"{statistics.median(cpp):6.2f} us: {more:6.2f} us more")
    records.write("python", machine, made, results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    records.add_arguments(parser)
    parser.add_argument("--backend", default="host", choices=["host", "cuda"])
    parser.add_argument("--machine", default="cpu", help="name for the records")
    options = parser.parse_args()
    kinds = ["numpy float32", "numpy bfloat16"] if options.backend == "host" else []
    if importlib.util.find_spec("torch"):
        kinds += ["torch float32", "torch bfloat16"]
    else:
        print("torch is not here: its tensors are left out")
    for kind in kinds:
        measure(kind, options.backend, options.machine, options.results)


if __name__ == "__main__":
    main()
