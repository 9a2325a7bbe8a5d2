"""Measured records: one JSON line per case in <bench>-<machine>.jsonl, and the same as a table for
people in <bench>-<machine>.csv. bench/tables.py writes the tables anew.

Records go to build/results by default. Those in bench/results are the project's: the figures of the
README and the docs are generated only from them, and `--results bench/results` writes there. A
record has the case, its peer, the machine, and the command that measured it. A later measurement of
the same case replaces the earlier one. A target is the ratio, or the figure, that the project set
before it measured: met tells whether it was reached, and is null without a target.
"""

import csv
import datetime
import io
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"  # the project's
OWN_RESULTS = ROOT / "build" / "results"
FIGURES = ("metric", "ours", "peer", "peer_value", "ratio", "target", "met", "date", "commit")


def add_arguments(parser):
    parser.add_argument("--results", default=OWN_RESULTS,
                        help="folder of the records (default: build/results; the project's own, "
                             "which the documentation shows, are in bench/results)")


def record(bench, case, metric, ours, *, peer=None, peer_value=None, ratio=None, target=None,
           command=None, less_is_better=False, machine=None):
    """`ratio` is ours against the peer (above 1 is better). `target` is for the ratio, or without a
    peer for `ours`, which must then reach it: from above if `less_is_better`. `machine` is
    host_machine(), for measurements on CPUs."""
    judged = ours if ratio is None else ratio
    below = less_is_better and ratio is None
    made = {"bench": bench, "case": case, "metric": metric, "ours": ours, "peer": peer,
            "peer_value": peer_value, "ratio": ratio, "target": target,
            "met": None if target is None else judged <= target if below else judged >= target,
            "date": datetime.date.today().isoformat(), "commit": commit(),
            "command": command or command_line()}
    return made | {"machine": machine} if machine else made


def case_key(r):
    return json.dumps([r["bench"], r["case"], r["metric"], r["peer"]], sort_keys=True)


def write(bench, machine, records, folder=OWN_RESULTS, key=case_key):
    """Puts the records into the file. Each replaces an older one of the same case, or of the same
    key(record) where a case includes findings of the measurement."""
    path = pathlib.Path(folder) / f"{bench}-{machine}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {}
    for old in read(path) + list(records):
        kept[key(old)] = old
    path.write_text("".join(json.dumps(r) + "\n" for r in kept.values()))
    path.with_suffix(".csv").write_text(table(kept.values()))
    return path


def table(rows):
    """The records as CSV: a column for each word of a case. Only the JSON line has the command."""
    rows = [{**r["case"], **{key: r[key] for key in FIGURES}} for r in rows]
    made = io.StringIO()
    writer = csv.DictWriter(made, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
                      for key, value in row.items()} for row in rows)
    return made.getvalue()


def read(path):
    path = pathlib.Path(path)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def host_machine(command=None, **libraries):
    """The CPU that a figure holds for: its name, the cores that this process may use, memory,
    the instruction set that `longspan info` names, and versions of libraries by name."""
    model = platform.processor() or platform.machine()
    memory = None
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                memory = round(int(line.split()[1]) / 2 ** 20, 1)
    except OSError:
        pass
    machine = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": memory}
    if command:
        done = subprocess.run([command, "info", "--json"], check=True, capture_output=True, text=True)
        info = json.loads(done.stdout)
        machine |= {"simd": info["host"].split(",")[0], "longspan": info["longspan"],
                    "compiler": info["compiler"]}
    return machine | libraries


def commit():
    try:
        return subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], check=True,
                              capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command_line():
    """As typed, with paths relative to the repository."""
    script = pathlib.Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    arguments = [a.replace(str(ROOT) + "/", "") for a in sys.argv[1:]]
    return shlex.join(["python3", name, *arguments])
