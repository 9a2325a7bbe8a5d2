#!/usr/bin/env python3
"""The decode step over a growing sharded cache, by `longspan bench decode`: on each number of
ranks, beside the same step on one rank alone.

    python3 bench/decode_step.py --machine h200x4                       the rows that have targets
    python3 bench/decode_step.py --machine h200x4 --batch 8 64          larger batches
    python3 bench/decode_step.py --machine h200x4 --scaling weak --kv 1048576
    python3 bench/decode_step.py --backend host --kv 16384 --ranks 1 2 -- --layers 4    on CPUs

    efficiency   strong: time(1 rank) / (n time(n ranks)); weak: time(1 rank) / time(n ranks)

Each length is measured twice, the second time with one key more, which leaves the shards uneven.
Times are those of one of the model's layers: a step / its layers. Records go to
decode_step-<machine>.jsonl; arguments after `--` go to the command.
"""

import argparse

import longspan_command
import records

LENGTHS = [1 << 17, 1 << 19, 1 << 20, 1 << 22]
# Efficiency on 4 GPUs, for the shape below, by keys before the first step.
TARGETS = dict(zip(LENGTHS, [0.75, 0.93, 0.96, 0.985]))
TARGET_CASE = {"ranks": 4, "scaling": "strong", "batch": 1, "tokens": 1, "heads": 64, "kv_heads": 8,
               "dim": 128, "dtype": "bf16", "kv_dtype": "bf16"}


def target(case, backend):
    if backend != "cuda" or any(case[key] != value for key, value in TARGET_CASE.items()):
        return None
    return TARGETS.get(case["kv_len"]) or TARGETS.get(case["kv_len"] - 1)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_arguments(parser)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200x4")
    parser.add_argument("--backend", default="cuda", choices=["host", "cuda"])
    parser.add_argument("--scaling", nargs="+", choices=["strong", "weak"], default=["strong"])
    parser.add_argument("--kv", type=int, nargs="+", default=LENGTHS,
                        help="keys of a sequence; in weak scaling, for each rank")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--most-keys", type=int, default=1 << 23,
                        help="lengths times batch beyond this (one rank must hold them) are left "
                             "out (default: %(default)s)")
    records.add_arguments(parser)
    parser.add_argument("extra", nargs="*", help="after --: more options for longspan bench decode")
    return longspan_command.parse(parser)


def measure(args, ranks, scaling, batch):
    """The JSON of one run: a row for each length. None where all are too long."""
    lengths = [kv + more for kv in args.kv if kv * batch <= args.most_keys for more in (0, 1)]
    if not lengths:
        return None
    options = ["--backend", args.backend, "--batch", batch, "--kv", *lengths, *args.extra]
    if scaling == "weak":
        options.append("--weak")
    return longspan_command.run(args.command, options, ranks, args.launcher, ("bench", "decode"))


def to_records(report, row, machine=None):
    """A layer's time beside one rank's, the efficiency, and where the time goes."""
    case = {key: report["case"][key]
            for key in ("heads", "kv_heads", "dim", "dtype", "kv_dtype", "batch", "tokens", "page",
                        "layers", "shard", "invariant", "scaling", "ranks")}
    case |= {"kv_len": row["kv_len"]}
    if report["backend"] == "host":
        case |= {"threads": report["threads"]}
    layers = case["layers"]
    found = []

    def add(metric, value, **more):
        found.append(records.record("decode_step", case, metric, value, machine=machine,
                                    **more))

    if row["alone"]:
        alone = row["alone"]["time_ms"]["median"] * 1e3 / layers
        speed_up = row["efficiency"] * case["ranks"]
        add("us", round(row["layer_us"], 2), peer="1 rank", peer_value=round(alone, 2),
            ratio=round(speed_up, 3))
        add("efficiency", round(row["efficiency"], 4), target=target(case, report["backend"]))
    else:
        add("us", round(row["layer_us"], 2))
    for part, ms in row["split_ms"].items():
        add(f"{part} share", round(ms / row["time_ms"]["median"], 4))
    add("GB/s a rank", round(row["bandwidth_gbs"], 1))
    return found


HEADER = (f"# {'scaling':>8}{'batch':>7}{'kv':>10}{'ranks':>7}{'us a layer':>12}{'append':>9}"
          f"{'attend':>10}{'exchange':>10}{'GB/s':>9}{'efficiency':>12}{'target':>8}")


def line(report, row, found):
    case, part = report["case"], {name: ms * 1e3 / report["case"]["layers"]
                                  for name, ms in row["split_ms"].items()}
    goal = next((r["target"] for r in found if r["metric"] == "efficiency"), None)
    efficiency = "-" if row["efficiency"] is None else f"{row['efficiency']:.3f}"
    missed = goal is not None and row["efficiency"] < goal
    return (f"  {case['scaling']:>8}{case['batch']:>7}{row['kv_len']:>10}{case['ranks']:>7}"
            f"{row['layer_us']:>12.2f}{part['append']:>9.2f}{part['attend']:>10.2f}"
            f"{part['exchange']:>10.2f}{row['bandwidth_gbs']:>9.4g}{efficiency:>12}"
            f"{goal or '':>8}{' NOT MET' if missed else ''}")


def main():
    args = arguments()
    machine = records.host_machine(args.command) if args.backend == "host" else None
    printed = False
    for scaling in args.scaling:
        for batch in args.batch:
            for ranks in args.ranks:
                report = measure(args, ranks, scaling, batch)
                if report is None:
                    continue
                if not printed:
                    print(f"# longspan {report['longspan']} | {report['backend']} | "
                          f"{report['world']}\n{HEADER}")
                    printed = True
                for row in report["rows"]:
                    found = to_records(report, row, machine)
                    print(line(report, row, found), flush=True)
                    records.write("decode_step", args.machine, found, args.results)


if __name__ == "__main__":
    main()
