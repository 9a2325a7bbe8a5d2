#!/usr/bin/env python3
"""The added cost of a Python call over the same call in C++: small arrays, on one rank. And that of a
call that autograd records, with its backward, over the same call that it does not record.

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
RECORDED_TARGET = 40.0  # recorded, and its backward, over the forward alone
CALLS = 8  # of a graph


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


def microseconds(call, repeats, backend, clock=time.perf_counter_ns):
    begin = clock()
    for _ in range(repeats):
        call()
    spent = clock() - begin
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


def recorded_cases(q, k, v, comm):
    """{(call, path): (forward alone, recorded with its backward, a function that does nothing with its backward, calls)}.
    The path through operators is taken where something observes them."""
    import torch
    from longspan.torch import _train, scaled_dot_product_attention

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx, dout):
            return tuple(torch.empty_like(t) for t in ctx.saved_tensors)

    plain = [t.transpose(0, 1).contiguous() for t in (q, k, v)]
    learned = [t.clone().requires_grad_() for t in plain]
    dout = torch.randn_like(plain[0])

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment="lower_right", enable_gqa=True, comm=comm)

    def graph(function, tensors, calls):
        q, k, v = tensors
        for _ in range(calls):
            q = function(q, k, v)
        return q

    def trained(function, calls):
        torch.autograd.grad(graph(function, learned, calls), learned, dout)

    def by_operators(calls):
        unwatched, _train.is_unwatched = _train.is_unwatched, lambda *tensors: False
        try:
            trained(attend, calls)
        finally:
            _train.is_unwatched = unwatched

    cases = {}
    for name, calls in (("call and backward", 1), (f"call and backward, of {CALLS} in a graph", CALLS)):
        for path, run in (("autograd.Function", lambda calls=calls: trained(attend, calls)),
                          ("operators", lambda calls=calls: by_operators(calls))):
            cases[name, path] = (lambda calls=calls: graph(attend, plain, calls), run,
                                 lambda calls=calls: trained(Nothing.apply, calls), calls)
    return cases


def measure_recorded(kind, backend, machine, results):
    q, k, v = case_arrays(kind, backend)
    made = []
    for (name, path), (*calls, count) in recorded_cases(q, k, v, longspan.alone({"host": "cpu"}.get(backend, backend))).items():
        for call in calls:
            call()
        # Time of this thread, which computes all of it: the time of others on the machine is not counted.
        rounds = [[microseconds(call, 20, backend, time.thread_time_ns) / count for call in calls] for _ in range(101)]
        forward = statistics.median(r[0] for r in rounds)
        more = statistics.median(r[1] - r[0] for r in rounds)
        floor = statistics.median(r[2] for r in rounds)
        made.append(records.record("python", {"call": name, "arrays": kind, "path": path}, "us", round(more, 2),
                                   peer="an autograd.Function that does nothing", peer_value=round(floor, 2),
                                   target=RECORDED_TARGET, less_is_better=True,
                                   machine=records.host_machine() if backend == "host" else None))
        print(f"{kind:16} {name}, by {path}: forward {forward:.2f} us, {more:.2f} us more; a function that does nothing "
              f"{floor:.2f} us")
    records.write("python", machine, made, results)


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
    parser.add_argument("--recorded", action="store_true", help="only calls that autograd records")
    options = parser.parse_args()
    kinds = ["numpy float32", "numpy bfloat16"] if options.backend == "host" else []
    if importlib.util.find_spec("torch"):
        kinds += ["torch float32", "torch bfloat16"]
    else:
        print("torch is not here: its tensors are left out")
    for kind in kinds:
        if not options.recorded:
            measure(kind, options.backend, options.machine, options.results)
        if kind == "torch float32":
            measure_recorded(kind, options.backend, options.machine, options.results)


if __name__ == "__main__":
    main()
