#!/usr/bin/env python3
"""Draws the plots of the documentation from bench/results/*.jsonl, and from nothing else; or those
of other records, beside them.

    python3 bench/plot.py                                    the plots that the documents show
    python3 bench/plot.py best-cpu                           this one
    python3 bench/plot.py scale-cpu --results build/results  of your own records, to build/results
    python3 bench/plot.py --out folder                       to another place
    python3 bench/plot.py out.json                           of `longspan bench scale --json out.json`:
                                                             out.svg and out-best.svg beside it

Needs matplotlib. Text stays text in the SVG, and the same records give the same bytes. A plot
carries a digest of its records, by which tests/plots_test.py finds plots that are out of date.
"""

import argparse
import hashlib
import importlib.util
import json
import pathlib
import re
import sys

import figures
import records
import strategy_figures

# Plot, the records it shows, its function. * is a machine; one of the files is enough.
PLOTS = [
    ("scale-*", ["scale-*"], figures.scaling),
    ("prefill-*", ["prefill-*"], figures.prefill),
    ("decode-*", ["seeds-*"], figures.decode),
    ("decode_step-*x2", ["decode_step-*x2", "decode_step-*x4", "decode_step-*x8"], figures.decode_step),
    ("chunked-*", ["chunked-*"], figures.chunked),
    ("host-*", ["host-*"], figures.host),
    ("context_parallel-*x2", ["context_parallel-*x2"], figures.context_parallel),
    ("exchange-*", ["exchange-*x2", "exchange-*x4", "exchange-*x8"], figures.exchange),
    ("strategies-*", ["strategies-*", "auto-*"], strategy_figures.strategies),
    ("best-*", ["strategies-*", "auto-*"], strategy_figures.best),
]
# The plots in the documentation, from the records in bench/results.
SHOWN = ["prefill-h200", "chunked-h200", "decode-h200", "decode_step-h200x2", "context_parallel-h100x2", "host-cpu",
         "exchange-h200", "best-h200x2", "best-cpu"]
# For a file of `longspan bench scale --json`: the suffix of its name, the plot's function.
OF_SCALE = [("", strategy_figures.strategies), ("-best", strategy_figures.best)]
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "longspan", "figure.constrained_layout.use": True,
         "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False}


def sources(folder=records.RESULTS):
    """{plot: (its existing files of records, its function)}"""
    stems, found = sorted(path.stem for path in pathlib.Path(folder).glob("*.jsonl")), {}
    for plot, patterns, function in PLOTS:
        for pattern in patterns:
            for stem in stems:
                match = re.fullmatch(pattern.replace("*", r"(\w+)"), stem)
                if match:
                    files, _ = found.setdefault(plot.replace("*", match.group(1)), ([], function))
                    files.append(pathlib.Path(folder) / f"{stem}.jsonl")
    return found


def stamp(files):
    """The digest of a plot's records: a hash of the bytes of their files."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return f"bench/plot.py: {' '.join(path.name for path in files)} {digest}"


def read(path):
    """Records, or the one that a command wrote as JSON."""
    return json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else records.read(path)


def draw(name, files, function, folder):
    """The path of the plot; None if the records have nothing for it."""
    import matplotlib
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        figure = function({path.stem: read(path) for path in files})
        if figure is None:
            return None
        path = pathlib.Path(folder) / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": stamp(files)})
        figure.clear()
    text = path.read_text(encoding="utf-8")  # without the spaces at the ends of some lines
    path.write_text("".join(line.rstrip() + "\n" for line in text.splitlines()), encoding="utf-8")
    return path


def draw_scale(path, folder):
    """The plots of a file of `longspan bench scale`, without those that it has nothing for."""
    try:
        read(path)["rows"][0]["phase"]
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        sys.exit(f"{path} is not what `longspan bench scale --json` writes")
    drawn = [draw(path.stem + ending, [path], function, folder) for ending, function in OF_SCALE]
    if not any(drawn):
        sys.exit(f"{path}: nothing to show of one rank alone; start the command on several")
    print(*filter(None, drawn), sep="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="plots such as scale-cpu (default: those of the documents; of other "
                        "records all), or files that `longspan bench scale --json` wrote")
    parser.add_argument("--results", default=records.RESULTS, help="folder of the records")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the plots (default: docs for "
                        "the records of the documentation, else the folder of the records)")
    args = parser.parse_args()
    files = [pathlib.Path(name) for name in args.name if name.endswith(".json")]
    names = [name for name in args.name if not name.endswith(".json")]
    beside = args.out
    ours = pathlib.Path(args.results).resolve() == records.RESULTS.resolve()
    if args.out is None:
        args.out = records.ROOT / "docs" if ours else pathlib.Path(args.results)
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("bench/plot.py draws with matplotlib, which is not installed for this Python: "
                 "python3 -m pip install matplotlib")
    for path in files:
        draw_scale(path, beside or path.parent)
    found = sources(args.results) if names or not files else {}
    for name in names or ([] if files else SHOWN if ours else found):
        if name not in found:
            sys.exit(f"{name}: {args.results} has no records for it; "
                     f"there are records for {', '.join(found) or 'no plot'}")
        path = draw(name, *found[name], args.out)
        if path:
            print(path)
        elif names:
            sys.exit(f"{name}: its records have nothing that this plot shows")


if __name__ == "__main__":
    main()
