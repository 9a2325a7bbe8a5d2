#!/usr/bin/env python3
"""Products of fp8 in prefill on one GPU: `longspan run --fp8-products` beside bf16, and the error of
both ways to use e4m3 against float64.

    python3 bench/prefill_fp8.py --machine h200

Speed: bf16, and e4m3 with the option, take turns as in prefill_features.py; the ratio is the median
of the rounds' ratios. Accuracy: inputs that are e4m3 already, so that float64 of the same numbers is
exact, through the option and without it (e4m3 widened to fp16). The last ROWS query rows of a
sequence are compared, |out - exact| / |exact| for each head; a record has the worst head as `ours`
and all of them as `by_head`. Kinds of inputs:

    order 1            q, k, v normal
    outlier dims       four dims of k and v times 20
    rare outliers      one element of a thousand of q, k, v with normal numbers times 10 added
    values in common   v is 1 with normal numbers times 1/4 added, scores are small: shows what a
                       sum that keeps few bits loses over many keys

Records go to fp8-<machine>.jsonl. Without numpy the accuracy is left out.
"""

import argparse
import pathlib
import tempfile

import longspan_command
import prefill_runs
import records
import rounds

TARGET = 1.3  # of the speed of bf16
GROUPED = (32, 8, 128, 16384)
ACCURACY_KEYS = [4096, 16384, 65536]
ACCURACY_DIMS = [64, 128, 256]
HEADS, ROWS = 8, 128
KINDS = ["order 1", "outlier dims", "rare outliers", "values in common"]


class Run(prefill_runs.Run):
    def __init__(self, case, causal, args, stored=None):
        super().__init__(case, causal, [case[-1]], TARGET if stored else None)
        if stored:
            self.shape |= {"qkv_dtype": stored, "fp8_products": args.backend == "cuda"}
            self.options += ["--qkv-dtype", stored]
            if args.backend == "cuda":  # CPUs refuse it; a trial of this script runs without
                self.options += ["--fp8-products"]

    def measure(self, args, checked):
        # `longspan run` judges by the bounds of 16 bits; the error of e4m3 is measured below.
        super().measure(args, checked and "qkv_dtype" not in self.shape)


def groups(args):
    found = []
    for *heads_and_dim, kv in prefill_runs.CASES + [GROUPED]:
        case = (*heads_and_dim, max(2, kv // args.shrink))
        for causal in (False, True):
            found.append(prefill_runs.Group("longspan, bf16", [
                Run(case, causal, args), Run(case, causal, args, "e4m3")], "fp8"))
    return found


def in_e4m3(numpy, values):
    """Rounded to nearest even, saturating."""
    least = 2.0 ** -6  # the smallest normal number; below it the steps are those of 2^-6
    exponent = numpy.floor(numpy.log2(numpy.maximum(numpy.abs(values), least)))
    step = numpy.exp2(exponent - 3)
    return numpy.clip(numpy.rint(values / step) * step, -448, 448)


def inputs(numpy, kind, dim, keys, rows):
    random = numpy.random.default_rng()
    q, k, v = (random.standard_normal((n, HEADS, dim)) for n in (rows, keys, keys))
    if kind == "outlier dims":
        for tensor in (k, v):
            tensor[..., 5::dim // 4] *= 20
    elif kind == "rare outliers":
        for tensor in (q, k, v):
            tensor += (random.random(tensor.shape) < 1e-3) * random.standard_normal(
                tensor.shape) * 10
    elif kind == "values in common":
        q /= 8
        v = 1 + v / 4
    return [in_e4m3(numpy, tensor) for tensor in (q, k, v)]


def exactly(numpy, q, k, v):
    """Every row sees all keys. -> out [rows, HEADS, dim], lse [rows, HEADS]"""
    out, lse = numpy.empty(q.shape), numpy.empty(q.shape[:2])
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head].T / numpy.sqrt(q.shape[2])
        top = scores.max(1, keepdims=True)
        weights = numpy.exp(scores - top)
        total = weights.sum(1, keepdims=True)
        out[:, head] = weights @ v[:, head] / total
        lse[:, head] = (top + numpy.log(total))[:, 0]
    return out, lse


def accuracy(args, numpy, kind, dim, keys):
    """A record of the option, with the widening path as its peer, and one of the lse."""
    q, k, v = inputs(numpy, kind, dim, keys, min(ROWS, keys))
    exact, exact_lse = exactly(numpy, q, k, v)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            numpy.save(folder / f"{name}.npy", tensor.astype(numpy.float16))
        for way in ("fp8", "widened"):
            on = ["--fp8-products"] if way == "fp8" and args.backend == "cuda" else []
            files = [x for name in ("q", "k", "v", "out", "lse")
                     for x in (f"--{name}", folder / f"{name}.npy")]
            longspan_command.run(args.command, [
                "--backend", args.backend, "--check", 0, "--warmup", 0, "--iterations", 1,
                "--qkv-dtype", "e4m3", *on, *files])
            out = numpy.load(folder / "out.npy").astype(float)
            lse = numpy.load(folder / "lse.npy").astype(float)
            found[way] = [float(numpy.linalg.norm(out[:, h] - exact[:, h]) /
                                numpy.linalg.norm(exact[:, h])) for h in range(HEADS)]
            found[way, "lse"] = float(numpy.abs(lse - exact_lse).max())
    case = {"inputs": kind, "dim": dim, "kv_len": keys, "tokens": len(q), "heads": HEADS,
            "kv_heads": HEADS, "dtype": "fp16", "qkv_dtype": "e4m3",
            "fp8_products": args.backend == "cuda"}
    widened = "longspan, e4m3 widened"
    worst = records.record("fp8", case, "relative error", float(f"{max(found['fp8']):.3g}"),
                           peer=widened, peer_value=float(f"{max(found['widened']):.3g}"),
                           less_is_better=True)
    worst["by_head"] = [float(f"{error:.3g}") for error in found["fp8"]]
    return [worst, records.record("fp8", case, "largest error of an lse",
                                  float(f"{found['fp8', 'lse']:.3g}"), peer=widened,
                                  peer_value=float(f"{found['widened', 'lse']:.3g}"),
                                  less_is_better=True)]


def measure_accuracy(args):
    try:
        import numpy
    except ImportError:
        print("# no numpy: the accuracy is left out")
        return []
    found = []
    print("# relative error by head, least to most | e4m3 widened | largest error of an lse")
    for kind in KINDS:
        for dim in ACCURACY_DIMS:
            for keys in (ACCURACY_KEYS if dim == 128 else ACCURACY_KEYS[1:2]):
                worst, lse = accuracy(args, numpy, kind, dim, max(ROWS, keys // args.shrink))
                found += [worst, lse]
                print(f"{kind:<17} dim {dim:>3} {worst['case']['kv_len']:>6} keys "
                      f"{min(worst['by_head']):.2e} to {worst['ours']:.2e} | "
                      f"{worst['peer_value']:.2e} | {lse['ours']:.1e}", flush=True)
                records.write("fp8", args.machine, found, args.results)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.add_arguments(parser, 5, 200, "of speed; 0: accuracy alone")
    parser.add_argument("--no-accuracy", action="store_true", help="speed alone")
    args = longspan_command.parse(parser)
    if not args.no_accuracy:
        measure_accuracy(args)
    rounds.take_turns(args, "fp8", groups(args), "# longspan TFLOP/s, e4m3 | bf16")


if __name__ == "__main__":
    main()
