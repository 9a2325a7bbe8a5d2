"""Measured records: one JSON line per case in bench/results/<bench>-<machine>.jsonl.

The README's and the docs' figures are generated from these files and from nothing else, so a record
says what was measured, against what, and the command that measured it. A later measurement of the
same case takes the place of the earlier one; a target that is not met stays, with met false.
"""

import datetime
import json
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def record(bench, case, metric, ours, *, peer=None, peer_value=None, ratio=None, target=None,
           command=None, less_is_better=False):
    """`ratio` is ours against the peer (above 1 is better); `target` is for the ratio, or for
    `ours` where there is no peer, which must then reach it: from above if `less_is_better`."""
    judged = ours if ratio is None else ratio
    below = less_is_better and ratio is None
    return {"bench": bench, "case": case, "metric": metric, "ours": ours, "peer": peer,
            "peer_value": peer_value, "ratio": ratio, "target": target,
            "met": target is None or (judged <= target if below else judged >= target),
            "date": datetime.date.today().isoformat(), "commit": commit(),
            "command": command or command_line()}


def write(bench, machine, records, folder=RESULTS):
    """Puts the records into the file, each in the place of an older one of the same case."""
    path = pathlib.Path(folder) / f"{bench}-{machine}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {}
    for old in read(path) + list(records):
        kept[key(old)] = old
    path.write_text("".join(json.dumps(r) + "\n" for r in kept.values()))
    return path


def read(path):
    path = pathlib.Path(path)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def key(r):
    return json.dumps([r["bench"], r["case"], r["metric"], r["peer"]], sort_keys=True)


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
