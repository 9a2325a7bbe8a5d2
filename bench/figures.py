"""What the plots look like. A function gets {name of a records file: its records}, filters what it
can show, and returns a figure, or None if nothing is left. A colour means the same in all plots.
"""

import math
import re

# Okabe and Ito's colours, which stay apart for colour-blind eyes.
BLUE, ORANGE, GREEN, SKY, RED, PINK, GREY = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00",
                                             "#CC79A7", "#999999")
COLORS = {"longspan": BLUE, "cuDNN": ORANGE, "cuDNN (two parts)": ORANGE, "seed (best)": PINK,
          "FlashAttention-2": GREEN, "seed (as shipped)": GREY, "copy": SKY,
          "NCCL all_gather + merge": ORANGE}
NAMES = {"seed (as shipped)": "Triton kernel as shipped", "seed (best)": "Triton kernel, best tile",
         "cuDNN (two parts)": "cuDNN on contiguous keys, two parts"}
VARIANTS = {"one-trip": "o", "two-trips": "^",  # and of earlier versions:
            "beside": "v", "flags": "s", "shares": "P"}
CURVES = (BLUE, RED, GREEN, PINK, SKY, ORANGE, GREY)
PHASES = {"append": GREEN, "attend": BLUE, "exchange": RED, "merge": ORANGE}


def grid(rows, columns, width, height, **options):
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    pyplot.close(figure)  # only pyplot's list forgets it
    return figure, panels


def sheet(columns, width, height, **options):
    figure, panels = grid(1, columns, width, height, **options)
    return figure, panels[0]


def machine(name):
    """prefill-h200 -> one H200, scale-h200x4 -> 4 H200s, scale-cpu -> processors"""
    name = name.rsplit("-", 1)[1]
    gpu = re.fullmatch(r"([a-z]+\d+)(?:x(\d+))?", name)
    if gpu:
        return f"{gpu[2]} {gpu[1].upper()}s" if gpu[2] else f"one {gpu[1].upper()}"
    return "processors" if name == "cpu" else name


def heads(case):
    same = case["heads"] == case["kv_heads"]
    return f"{case['heads']} heads" if same else f"{case['heads']}/{case['kv_heads']} heads"


def sequences(case):
    return f"{case['batch']} × " if case["batch"] > 1 else ""


def dim(case):
    return "" if case["dim"] == 128 else f", dim {case['dim']}"


def log2(panel, x_ticks):
    from matplotlib import ticker
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(ticker.NullLocator())
    panel.set_xticks(x_ticks)


def marks(panel, x, y):
    panel.plot(x, y, "_", color="black", markersize=13, markeredgewidth=1.8, label="target")


def bars(panel, rows, label, inside):
    """Ours and the peers, a group of bars for each case; a mark on ours where the target is (the
    highest, if there are several), and in it the ratio to the peer `inside`."""
    groups = {}
    for r in rows:
        empty = {"label": label(r["case"]), "speed": {"longspan": r["ours"]}, "goal": 0, "ratio": ""}
        group = groups.setdefault(str(r["case"]), empty)
        if r["peer"] in COLORS:
            group["speed"][r["peer"]] = r["peer_value"]
        if r["peer"] == inside:
            group["ratio"] = f"{r['ratio']:.2f}"
        if r["target"] is not None:
            group["goal"] = max(group["goal"], r["target"] * (r["peer_value"] or 1))
    groups = list(groups.values())
    names = [name for name in COLORS if any(name in group["speed"] for group in groups)]
    thick = 0.84 / len(names)
    for i, group in enumerate(groups):
        for name in names:
            if name in group["speed"]:
                place = i - 0.42 + thick * (names.index(name) + 0.5)
                panel.barh(place, group["speed"][name], 0.94 * thick, color=COLORS[name],
                           label=NAMES.get(name, name))
        ours = i - 0.42 + thick / 2
        panel.annotate(group["ratio"], (0, ours), (3, 0), textcoords="offset points", color="white",
                       va="center_baseline", size=7)
        if group["goal"]:
            panel.vlines(group["goal"], ours - 0.62 * thick, ours + 0.62 * thick, color="black",
                         linewidth=1.8, label="target")
    panel.set_yticks(range(len(groups)), [group["label"] for group in groups])
    panel.set_ylim(len(groups) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)


def beside(panels, height, unit, title, label, inside):
    """A figure of bars from {title of a panel: records}; panels without records are left out."""
    panels = {name: rows for name, rows in panels.items() if rows}
    if not panels:
        return None
    figure, axes = sheet(len(panels), 2.2 + 3.9 * len(panels), height, sharex=True)
    seen = {}
    for axis, (name, rows) in zip(axes, panels.items()):
        bars(axis, rows, label, inside)
        axis.set(title=name, xlabel=unit)
        axis.grid(axis="x", color="0.9")
        axis.set_axisbelow(True)
        for handle, text in zip(*axis.get_legend_handles_labels()):
            seen.setdefault(text, handle)
    labels = [axis.get_yticklabels() for axis in axes]
    for axis, mine in zip(axes[1:], labels[1:]):  # the same cases are named once
        if [text.get_text() for text in mine] == [text.get_text() for text in labels[0]]:
            axis.set_yticklabels([])
    figure.suptitle(title, size=11)
    names = [NAMES.get(name, name) for name in COLORS] + ["target"]
    names = [name for name in dict.fromkeys(names) if name in seen]
    figure.legend([seen[name] for name in names], names, loc="outside lower center",
                  ncols=3 if len(names) > 5 else len(names))
    return figure


def prefill(files):
    (name, rows), = files.items()
    rows = [r for r in rows if r["peer"] in ("cuDNN", "FlashAttention-2")]
    rows.sort(key=lambda r: r["case"]["invariant"])  # the fixed order, which is slower, comes last

    def label(case):
        kind = "" if case["dtype"] == "bf16" else f", {case['dtype']}"
        return (f"dim {case['dim']}, {sequences(case)}{case['kv_len']:,} keys, {heads(case)}{kind}"
                + (",\nfixed order (--invariant)" if case["invariant"] else ""))

    return beside({"full": [r for r in rows if not r["case"]["causal"]],
                   "causal": [r for r in rows if r["case"]["causal"]]},
                  7, "TFLOP/s", f"Prefill on {machine(name)}, bf16 (in the bars: ratio to cuDNN)",
                  label, "cuDNN")


def decode(files):
    """One new token; other dtypes, pages and windows (seeds_vs_longspan.py --sweep) have no peer."""
    common = {"dtype": "bf16", "kv_dtype": "bf16", "tokens": 1, "page": 16, "layout": "rows",
              "table": "permuted", "window": 0, "invariant": False}
    rows = [r for rows in files.values() for r in rows
            if r["metric"] == "TB/s" and r["peer"] != "read ceiling"
            and isinstance(r["case"]["kv_len"], int)  # not a batch of uneven lengths
            and all(r["case"].get(key, value) == value for key, value in common.items())]
    return beside({"pages of 16 in random order (cuDNN: contiguous)":
                   [r for r in rows if "page" in r["case"]],
                   "contiguous keys": [r for r in rows if "page" not in r["case"]]},
                  4.6, "TB/s of keys and values",
                  f"Decode on {machine(next(iter(files)))}, bf16 (in the bars: ratio to cuDNN)",
                  lambda case: (f"{sequences(case)}{case['kv_len']:,} keys,\n"
                                f"{heads(case)}{dim(case)}"), "cuDNN")


def chunked(files):
    (name, rows), = files.items()
    rows = [r for r in rows if r["metric"] == "TFLOP/s" and r["case"]["page"] == 16
            and r["case"]["dtype"] == r["case"].get("kv_dtype", "bf16") == "bf16"]
    layouts = dict.fromkeys(r["case"]["layout"] for r in rows)
    return beside({f"pages of 16, {layout}": [r for r in rows if r["case"]["layout"] == layout]
                   for layout in layouts},
                  4.8, "TFLOP/s",
                  f"Chunked prefill on {machine(name)}, bf16 (in the bars: ratio to cuDNN)",
                  lambda case: f"{sequences(case)}{case['tokens']:,} queries\non "
                               f"{case['kv_len']:,} keys{dim(case)}", "cuDNN (two parts)")


def merge(files):
    (name, rows), = files.items()
    rows = [r for r in rows if r["metric"] == "TB/s"]
    return beside({f"{dtype} states": [r for r in rows if r["case"]["dtype"] == dtype]
                   for dtype in dict.fromkeys(r["case"]["dtype"] for r in rows)},
                  3.6, "TB/s read and written",
                  f"Merge of two states on {machine(name)} (in the bars: ratio to a copy)",
                  lambda case: f"{case['tokens']:,} tokens,\n{case['heads']} heads{dim(case)}",
                  "copy")


def exchange(files):
    """us added against KB of states; a marker says which variant ran. Pushed steps, whose peer is
    another, are left to the tables."""
    figure, panels = sheet(len(files), 1 + 3.9 * len(files), 3.9, sharey=True)
    for panel, (name, rows) in zip(panels, files.items()):
        rows = [r for r in rows if r["metric"] == "us added"]
        size = {str(r["case"]): 4 * (r["case"]["dim"] + 2) * r["case"]["tokens"]
                * r["case"]["heads"] / 1000 for r in rows}
        rows = sorted(rows, key=lambda r: size[str(r["case"])])
        nccl = [r for r in rows if r["peer"]]
        panel.plot([size[str(r["case"])] for r in nccl], [r["peer_value"] for r in nccl],
                   color=ORANGE, marker="D", markersize=5, label="NCCL all_gather and merge")
        ours = list({str(r["case"]): r for r in rows}.values())
        panel.plot([size[str(r["case"])] for r in ours], [r["ours"] for r in ours], color=BLUE)
        for variant, mark in VARIANTS.items():
            some = [r for r in ours if r["case"]["variant"] == variant]
            if some:
                panel.plot([size[str(r["case"])] for r in some], [r["ours"] for r in some], mark,
                           color=BLUE, label=f"longspan, {variant}")
        goals = [r for r in rows if r["target"] is not None]
        if goals:
            marks(panel, [size[str(r["case"])] for r in goals], [r["target"] for r in goals])
        log2(panel, [16, 32, 64, 128, 256, 512, 1024, 2048])
        panel.set(title=machine(name), xlabel="states of a rank (KB)")
        panel.grid(color="0.9")
        panel.legend()
    panels[0].set_ylabel("time added to the producer (us)")
    figure.suptitle("Exchange and merge of states, dim 128, in a graph (less is better)", size=11)
    return figure


def curve_of(case):
    """What the points of one curve share: in weak scaling the keys of a rank."""
    keys = case["kv_len"]
    shared = {key: value for key, value in case.items()
              if key not in ("ranks", "scaling", "kv_len")}
    shared["keys"] = keys // case["ranks"] if case["scaling"] == "weak" else keys
    shared["tokens"] = "as keys" if case.get("tokens") == keys else case.get("tokens", 1)
    return shared


def scaling(files):
    """Speed-ups are efficiency times ranks, so targets of efficiency can be shown with them."""
    (name, rows), = files.items()
    rows = [r | {"curve": curve_of(r["case"])} for r in rows
            if "scaling" in r["case"] and r["case"].get("kv_len", 0) % 128 != 1]  # n, not n + 1
    points = [r for r in rows if r["metric"] == "efficiency"]
    if not points:
        return None
    kinds = list(dict.fromkeys(r["case"]["scaling"] for r in points))
    split = time_split([r for r in rows if r["case"]["scaling"] == kinds[0]])
    columns = len(kinds) + bool(split)
    curves = len({str(r["curve"]) for r in points})
    figure, panels = sheet(columns, 3.9 * columns, 3.6 + (0.1 * curves if curves > 4 else 0))
    for panel, kind in zip(panels, kinds):
        speed_ups(panel, kind, [r for r in points if r["case"]["scaling"] == kind])
        panel.sharey(panels[0])
    slowest = min(r["ours"] * r["case"]["ranks"] for r in points)
    panels[0].set_ylim(bottom=0.93 * 2 ** math.floor(math.log2(slowest)))
    if split:
        stacks(panels[-1], split)
        panels[-1].set_title(f"{kinds[0]} scaling, {split[0]['curve']['keys']:,} keys")

    varying = differences([r["curve"] for r in points])
    case = points[0]["case"]
    texts = {"heads": heads(case), "dim": f"dim {case['dim']}", "dtype": case["dtype"],
             "tokens": f"query rows: {points[0]['curve']['tokens']}"}
    figure.suptitle(f"{'Decode' if points[0]['bench'] == 'decode_step' else 'longspan run'} on "
                    f"{machine(name)}: "
                    + ", ".join(text for key, text in texts.items() if key not in varying), size=11)
    return figure


def differences(curves):
    """What is not the same in all of them, besides the number of keys."""
    names = dict.fromkeys(name for curve in curves for name in curve)
    return [name for name in names
            if name != "keys" and len({str(curve.get(name)) for curve in curves}) > 1]


def speed_ups(panel, kind, points):
    ranks = sorted({r["case"]["ranks"] for r in points})
    panel.plot(ranks, ranks, color="0.6", linestyle="--", label="ideal")
    curves = list({str(r["curve"]): r["curve"] for r in points}.values())
    varying = differences(curves)
    for i, curve in enumerate(curves):
        some = sorted((r for r in points if r["curve"] == curve), key=lambda r: r["case"]["ranks"])
        text = [f"{curve['keys']:,} keys" + (" a rank" if kind == "weak" else "")]
        text += [{True: key, False: f"not {key}"}.get(curve.get(key), f"{key} {curve.get(key)}")
                 for key in varying]
        panel.plot([r["case"]["ranks"] for r in some],
                   [r["ours"] * r["case"]["ranks"] for r in some], color=CURVES[i % len(CURVES)],
                   marker="osD^vXP"[i % 7], label=", ".join(text))
    goals = [r for r in points if r["target"] is not None]
    if goals:
        marks(panel, [r["case"]["ranks"] for r in goals],
              [r["target"] * r["case"]["ranks"] for r in goals])
    log2(panel, ranks)
    panel.set(title=f"{kind} scaling", xlabel="ranks", ylabel="speed-up")
    panel.grid(color="0.9")
    if len(curves) > 2:  # they would hide curves
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    else:
        panel.legend()


def time_split(rows):
    """The first curve of the most keys, a case with the values of its metrics for each number of
    ranks; those whose records lack the shares of the phases are left out."""
    most = max((r["curve"] for r in rows), key=lambda curve: curve["keys"])
    found = {}
    for r in rows:
        if r["curve"] == most:
            point = found.setdefault(r["case"]["ranks"], {"curve": most})
            point |= {"ranks": str(r["case"]["ranks"]), r["metric"]: r["ours"]}
    return [found[ranks] for ranks in sorted(found) if "attend share" in found[ranks]]


def stacks(panel, split):
    bottom = [0.0] * len(split)
    for phase, color in PHASES.items():
        if f"{phase} share" not in split[0]:
            continue
        heights = [point["us"] * point[f"{phase} share"] / 1000 for point in split]
        panel.bar([point["ranks"] for point in split], heights, bottom=bottom, color=color,
                  label=phase)
        bottom = [low + height for low, height in zip(bottom, heights)]
    panel.set(xlabel="ranks", ylabel="time (ms)")
    panel.legend()
