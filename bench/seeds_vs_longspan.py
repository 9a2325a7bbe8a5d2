#!/usr/bin/env python3
"""One GPU: the serving kernels beside the Triton kernels that serving engines use, in one run.

    python3 bench/seeds_vs_longspan.py --machine h200 --seeds FOLDER/seeds_triton.py

runs bench_serving, the script of the Triton kernels (which is not part of this project; it writes
its figures to $OUT/seeds_triton.jsonl), and bench_serving again. Ours is the mean of the two
medians, so that neither side gains from its place in time. The script measures the peers: the kernel
as it ships, at the best tile and number of segments that it tries, and cuDNN and FlashAttention-2 on
contiguous keys. A wrong result or a failed case is reported and leaves no record.

    merge     TB/s read and written; target: of a copy's bandwidth in the same run
    seeds     segmented decode, TB/s of keys and values
    chunked   chunked prefill over pages of 16, TFLOP/s

Records go to {merge,seeds,chunked}-<machine>.jsonl. `--sweep` adds decode over other pages, fp8,
several new tokens and a window (no peer).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import records
import serving_command

MERGE_OF_COPY = 0.85  # from 4,096 tokens x 32 heads on
MERGE_SMALL_US = 2.5  # 256 tokens x 16 heads
DECODE_BEST, DECODE_SHIPPED = 1.0, 1.5
SHIPPED, BEST = "seed (as shipped)", "seed (best)"
SHIPPED_VARIANT = (16, 16)  # tile, segments
SWEEP = [["--page", "1", "256"], ["--identity"], ["--kv-dtype", "e4m3"],
         ["--kv-dtype", "e4m3", "--layout", "x-packed"], ["--tokens", "4"], ["--tokens", "16"],
         ["--window", "4096"]]


def chunked_target(new, sequences):
    """TFLOP/s: 250 where the seed gives 125 or more (2,048 queries or more in all), else 200."""
    return 250 if new * sequences >= 2048 else 200


def run_seeds(script, python, folder):
    """Records of the Triton kernels' script."""
    env = dict(os.environ) | {"OUT": folder}
    done = subprocess.run([python, script], env=env, capture_output=True, text=True)
    path = pathlib.Path(folder) / "seeds_triton.jsonl"
    if done.returncode != 0 or not path.exists():
        raise SystemExit(f"{script} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    print("".join(f"# {text}\n" for text in done.stdout.splitlines()
                  if "ERROR" in text or "skipped" in text or "summary" in text), end="")
    return read_seeds(path)


def read_seeds(path):
    return [json.loads(text) for text in pathlib.Path(path).read_text().splitlines() if text.strip()]


IDENTITY = ("section", "dtype", "kv_dtype", "heads", "kv_heads", "dim", "batch", "tokens", "kv_len",
            "page", "layout", "table", "window")


def identity(line):
    return tuple(line.get(key) for key in IDENTITY)


def both(runs):
    """Each case with the mean time of its runs, and their spread."""
    cases = {}
    for line in (line for lines in runs for line in lines):
        cases.setdefault(identity(line), []).append(line)
    for lines in cases.values():
        times = [line["us"] for line in lines]
        line = lines[0] | {"us": statistics.mean(times), "apart": max(times) / min(times) - 1}
        for rate in ("tb_s", "tflop_s"):
            if rate in line:
                line[rate] *= times[0] / line["us"]
        yield line


class Table:
    """Prints cases and keeps their records."""

    def __init__(self):
        self.records = {}
        self.missed = 0

    def add(self, bench, case, metric, ours, peer=None, theirs=None, **how):
        ratio = None if theirs is None else round(ours / theirs, 3)
        r = records.record(bench, case, metric, round(ours, 3), peer=peer,
                           peer_value=None if theirs is None else round(theirs, 3), ratio=ratio,
                           **how)
        self.records.setdefault(bench, []).append(r)
        self.missed += r["met"] is False
        asked = "" if r["target"] is None else f"  target {r['target']}" + (
            " NOT MET" if r["met"] is False else "")
        beside = "" if peer is None else f" | {peer} {theirs:.3f} ratio {ratio:.2f}"
        shape = " ".join(str(v) for v in case.values())
        print(f"{bench:<8}{shape:<48}{ours:10.3f} {metric}{beside}{asked}", flush=True)


def torch_copy():
    """TB/s of PyTorch's copy kernel, or None where there is no PyTorch or no GPU."""
    try:
        import torch_gpu
        return torch_gpu.copy_bandwidth()
    except (ImportError, RuntimeError, AssertionError):
        return None


def merge(table, line, copy, seeds):
    tokens, heads, dtype = line["tokens"], line["heads"], line["dtype"]
    case = {"tokens": tokens, "heads": heads, "dim": line["dim"], "dtype": dtype, "ranks": 1}
    seed = [r for r in seeds if r["kind"] == "A" and r["ok"] and
            (r["T"], r["H"], r["D"], r["dtype"]) == (tokens, heads, line["dim"], dtype)]
    if (tokens, heads) == (256, 16):
        table.add("merge", case, "us", line["us"], target=MERGE_SMALL_US, less_is_better=True)
    if copy is not None and tokens * heads >= 4096 * 32:
        table.add("merge", case, "TB/s", line["tb_s"], "copy", copy, target=MERGE_OF_COPY)
    for r in seed:
        table.add("merge", case, "TB/s", line["tb_s"], SHIPPED, r["bytes"] / r["graph_us"] / 1e6)


def decode(table, line, seeds):
    case = {key: line[key] for key in ("heads", "kv_heads", "dim", "dtype", "kv_dtype", "batch",
                                       "tokens", "kv_len", "page", "layout", "table", "window")}
    case["ranks"] = 1
    mine = line["tb_s"]
    same = (line["heads"], line["kv_heads"], line["batch"], line["kv_len"])
    plain = (line["kv_dtype"], line["tokens"], line["page"], line["layout"], line["table"],
             line["window"]) == ("bf16", 1, 16, "rows", "permuted", 0)
    found = [r for r in seeds if r["kind"] in ("B", "Bcudnn") and r["ok"] and plain and
             (r["Hq"], r["Hkv"], r["batch"], r["ctx"]) == same]
    shipped = [r["both_us"] for r in found if r["kind"] == "B" and
               (r["tile"], r["segs"]) == SHIPPED_VARIANT]
    tried = [r["both_us"] for r in found if r["kind"] == "B"]
    for peer, times, target in ((SHIPPED, shipped, DECODE_SHIPPED), (BEST, tried, DECODE_BEST),
                                ("cuDNN", [r["best_us"] for r in found if r["kind"] == "Bcudnn"],
                                 None)):
        if times:
            table.add("seeds", case, "TB/s", mine, peer, line["bytes"] / min(times) / 1e6,
                      target=target)
    if not found:
        table.add("seeds", case, "TB/s", mine)


def chunked(table, line, seeds):
    new, sequences = line["tokens"], line["batch"]
    case = {key: line[key] for key in ("heads", "kv_heads", "dim", "dtype", "batch", "tokens",
                                       "kv_len", "page", "layout")} | {"ranks": 1}
    mine = line["tflop_s"]
    table.add("chunked", case, "TFLOP/s", mine, target=chunked_target(new, sequences))
    peers = {"seed": SHIPPED, "cudnn2": "cuDNN (two parts)", "flash": "FlashAttention-2"}
    for r in seeds:
        same = r["kind"] == "C" and (r["q"], r["ctx"], r["seqs"]) == (new, line["kv_len"] - new,
                                                                      sequences)
        if same and r["ok"] and r["key"] in peers:
            table.add("chunked", case, "TFLOP/s", mine, peers[r["key"]], r["tflops"])


def compare(runs, seeds, sweep):
    table = Table()
    lines = list(both(runs))
    copy = max((line["tb_s"] for line in lines if line["section"] == "copy"), default=None)
    kernel = torch_copy()  # TMA is slower than a kernel: the better of both is the ceiling
    copy = max(filter(None, (copy, kernel)), default=None)
    if copy is not None:
        print(f"# copy {copy:.3f} TB/s read + written")
    for line in lines:
        if line["section"] == "merge":
            merge(table, line, copy, seeds)
        elif line["section"] == "decode":
            decode(table, line, seeds)
        elif line["section"] == "chunked":
            chunked(table, line, seeds)
    for line in sweep:
        decode(table, line, [])
    apart = [line["apart"] for line in lines if "apart" in line]
    print(f"# ours, before and after: at most {100 * max(apart, default=0):.1f} % apart; "
          f"{table.missed} targets not met")
    return table.records


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    serving_command.add_program(parser)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--seeds", required=True, help="the script of the Triton kernels, or a "
                        "folder that holds it, or the .jsonl that it wrote in this run")
    parser.add_argument("--python", default=sys.executable, help="with PyTorch and Triton")
    parser.add_argument("--sweep", action="store_true", help="decode over other caches too")
    parser.add_argument("--device", default="cuda", choices=["cuda", "host"], help="for a try")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a try")
    records.add_arguments(parser)
    args = serving_command.parse(parser)

    begin = time.monotonic()
    common = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    ours = [*common, "--section", "copy", "--section", "merge", "--section", "decode"]
    chunks = [*common, "--section", "chunked", "--layout", "rows", "x-packed"]
    once = [serving_command.run(args.program, *ours) + serving_command.run(args.program, *chunks)]
    script = pathlib.Path(args.seeds)
    if script.is_dir():
        script = script / "seeds_triton.py"
    with tempfile.TemporaryDirectory() as folder:
        seeds = (read_seeds(script) if script.suffix == ".jsonl"
                 else run_seeds(str(script), args.python, folder))
    once.append(serving_command.run(args.program, *ours) + serving_command.run(args.program, *chunks))
    sweep = []
    for options in SWEEP if args.sweep else []:
        sweep += serving_command.run(args.program, *common, "--section", "decode", "--row", "0", "2", *options)
    for bench, found in compare(once, seeds, sweep).items():
        path = records.write(bench, args.machine, found, args.results)
        print(f"# records: {path}")
    print(f"# {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
