"""The style of the plots. A function gets {name of a records file: its records}, filters what it can
show, and returns a figure, or None if nothing is left. The title states the one point of the plot,
with figures from the records; below it are the machine, the setting and the date. A colour means the
same in all plots.
"""

import math
import re

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, SKY, RED, PINK, GREY = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00",
                                             "#CC79A7", "#999999")
COLORS = {"longspan": BLUE, "cuDNN": ORANGE, "cuDNN (two parts)": ORANGE, "PyTorch": ORANGE,
          "PyTorch, cuDNN": ORANGE, "seed (best)": PINK, "FlashAttention-2": GREEN,
          "PyTorch, FlashAttention-2": GREEN, "seed (as shipped)": GREY}
NAMES = {"seed (as shipped)": "Triton kernel as shipped", "seed (best)": "Triton kernel, best tile",
         "cuDNN (two parts)": "cuDNN on contiguous keys, two parts"}
VARIANTS = {"one-trip": "o", "two-trips": "^"}
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


def say(figure, point, setting, rows=()):
    """The title: the point, and below it the measurement and its date."""
    dates = sorted({r["date"] for r in rows})
    when = f"; measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    figure.suptitle(f"{point}\n{setting}{when}", size=10, linespacing=1.5)


def span(values):
    """From the least to the greatest, in the form of tests/snippets.py."""
    ends = [f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def ratios(rows, peer):
    return span([r["ratio"] for r in rows if r["peer"] == peer])


def machine(name):
    """prefill-h200 -> one H200, scale-h200x4 -> 4 H200s, scale-cpu -> a CPU"""
    name = name.rsplit("-", 1)[1]
    gpu = re.fullmatch(r"([a-z]+\d+)(?:x(\d+))?", name)
    if gpu:
        return f"{gpu[2]} {gpu[1].upper()}s" if gpu[2] else f"one {gpu[1].upper()}"
    return "a CPU" if name == "cpu" else name


def heads(case):
    same = case["heads"] == case["kv_heads"]
    return f"{case['heads']} heads" if same else f"{case['heads']}/{case['kv_heads']} heads"


def sequences(case):
    return f"{case['batch']} × " if case["batch"] > 1 else ""


def short(keys):
    for unit, name in ((2 ** 20, "M"), (2 ** 10, "K")):
        if keys % unit == 0:
            return f"{keys // unit}{name}"
    return f"{keys:,}"


def log2(panel, x_ticks):
    from matplotlib import ticker
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(ticker.NullLocator())
    panel.set_xticks(x_ticks)


def bars(panel, rows, label, inside):
    """Ours and the peers, a group of bars for each case, and in ours the ratio to the peer `inside`."""
    groups = {}
    for r in rows:
        group = groups.setdefault(str(r["case"]), {"label": label(r["case"]), "ratio": "",
                                                   "speed": {"longspan": r["ours"]}})
        group["speed"][r["peer"]] = r["peer_value"]
        if r["peer"] == inside:
            group["ratio"] = f"{r['ratio']:.2f}"
    groups = list(groups.values())
    names = [name for name in COLORS if any(name in group["speed"] for group in groups)]
    thick = 0.84 / len(names)
    for i, group in enumerate(groups):
        for name in names:
            if name in group["speed"]:
                place = i - 0.42 + thick * (names.index(name) + 0.5)
                panel.barh(place, group["speed"][name], 0.94 * thick, color=COLORS[name],
                           label=NAMES.get(name, name))
        panel.annotate(group["ratio"], (0, i - 0.42 + thick / 2), (3, 0), textcoords="offset points",
                       color="white", va="center_baseline", size=7)
    panel.set_yticks(range(len(groups)), [group["label"] for group in groups])
    panel.set_ylim(len(groups) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)


def beside(panels, height, unit, label, inside):
    """A figure of bars from {title of a panel: records}; panels without records are omitted."""
    panels = {name: [r for r in rows if r["peer"] in COLORS] for name, rows in panels.items()}
    panels = {name: rows for name, rows in panels.items() if rows}
    if not panels:
        return None
    figure, axes = sheet(len(panels), 2.9 + 3.3 * len(panels), height, sharex=True)
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
    names = [name for name in dict.fromkeys(NAMES.get(name, name) for name in COLORS) if name in seen]
    figure.legend([seen[name] for name in names], names, loc="outside lower center",
                  ncols=len(names) if len(panels) > 1 else 2)
    return figure


def prefill(files):
    """bf16 in no fixed order: the order has a separate kernel (invariant-*)."""
    (name, rows), = files.items()
    rows = [r for r in rows if r["peer"] in ("cuDNN", "FlashAttention-2")
            and r["case"]["dtype"] == "bf16" and not r["case"]["invariant"]]
    figure = beside({"all keys": [r for r in rows if not r["case"]["causal"]],
                     "causal": [r for r in rows if r["case"]["causal"]]}, 5.2, "TFLOP/s",
                    lambda case: f"dim {case['dim']}, {sequences(case)}{short(case['kv_len'])} keys, {heads(case)}",
                    "cuDNN")
    if figure:
        say(figure, f"Prefill on {machine(name)} has {ratios(rows, 'cuDNN')} of cuDNN's speed",
            "bf16, without invariant; in the bars: ratio to cuDNN", rows)
    return figure


def decode(files):
    """One new token over pages of 16 keys; other pages, dtypes and windows have no peer."""
    common = {"dtype": "bf16", "kv_dtype": "bf16", "tokens": 1, "page": 16, "layout": "rows",
              "table": "permuted", "window": 0}
    (name, rows), = files.items()
    rows = [r for r in rows if r["metric"] == "TB/s" and r["peer"]
            and all(r["case"].get(key) == value for key, value in common.items())]
    figure = beside({"": rows}, 4.9, "TB/s of keys and values",
                    lambda case: f"{sequences(case)}{short(case['kv_len'])} keys, {heads(case)}", "cuDNN")
    if figure:
        say(figure, f"Decode over pages in random order has {ratios(rows, 'cuDNN')}\n"
            "of cuDNN's speed on contiguous keys",
            f"{machine(name)}, bf16, dim 128, pages of 16 keys;\nin the bars: ratio to cuDNN", rows)
    return figure


def chunked(files):
    (name, rows), = files.items()
    rows = [r for r in rows if r["metric"] == "TFLOP/s" and r["peer"]
            and r["case"]["page"] == 16 and r["case"]["layout"] == "rows"]
    figure = beside({"": rows}, 5, "TFLOP/s",
                    lambda case: f"{sequences(case)}{case['tokens']:,} queries\n"
                                 f"on {case['kv_len']:,} keys", "cuDNN (two parts)")
    if figure:
        say(figure, f"Chunked prefill over pages runs {ratios(rows, 'seed (as shipped)')} times\n"
            "as fast as the Triton kernel that serving engines ship",
            f"{machine(name)}, bf16, {heads(rows[0]['case'])}, dim 128, pages of 16 keys;\n"
            "in the bars: ratio to cuDNN", rows)
    return figure


def host(files):
    """Causal prefill on one thread beside PyTorch."""
    (_, rows), = files.items()
    rows = [r for r in rows if r["metric"] == "TFLOP/s" and r["peer"] == "PyTorch"
            and r["case"]["threads"] == 1 and r["case"]["causal"]]
    kinds = {kind: sorted((r for r in rows if r["case"]["dtype"] == kind),
                          key=lambda r: (r["case"]["dim"], r["case"]["kv_len"])) for kind in ("bf16", "fp32")}
    figure = beside({f"{kind}{' (bf16_products)' * (kind == 'bf16')}": some for kind, some in kinds.items()},
                    4.8, "TFLOP/s", lambda case: f"dim {case['dim']}, {case['kv_len']:,} tokens", "PyTorch")
    if figure:
        say(figure, "Causal prefill on one CPU thread has "
            + ", ".join(f"{ratios(some, 'PyTorch')} of PyTorch's speed in {kind}"
                        for kind, some in kinds.items() if some),
            f"{rows[0]['machine']['cpu'].replace('(R)', '')}; {heads(rows[0]['case'])}; "
            "in the bars: ratio to PyTorch", rows)
    return figure


def context_parallel(files):
    """Replays of graphs: our fastest strategy beside the faster of PyTorch's two ways, by kernel."""
    (name, rows), = files.items()
    best = {}
    for r in rows:
        if r["metric"] != "ms" or not r["peer"] or not r["case"].get("graph"):
            continue
        case = {key: value for key, value in r["case"].items() if key != "strategy"}
        kernel = "PyTorch, " + r["peer"].rsplit(", ", 1)[1]
        work = 2e-9 * case["heads"] * case["tokens"] ** 2 * case["dim"]
        made = r | {"case": case, "peer": kernel, "ours": work / r["ours"], "peer_value": work / r["peer_value"]}
        old = best.get((str(case), kernel))
        if not old or old["peer_value"] < made["peer_value"]:
            best[str(case), kernel] = made
    rows = list(best.values())
    figure = beside({"": rows}, 4.4, "TFLOP/s, of both GPUs",
                    lambda case: f"{short(case['tokens'])} tokens, {heads(case)}", "PyTorch, cuDNN")
    if figure:
        say(figure, f"Context-parallel prefill runs {ratios(rows, 'PyTorch, cuDNN')} times\n"
            "as fast as PyTorch's context_parallel over cuDNN",
            f"{machine(name)}, bf16, causal, dim 128, in CUDA graphs;\nin the bars: ratio to PyTorch over cuDNN",
            rows)
    return figure


def decode_step(files):
    """Speed-up over keys, a curve for each number of GPUs, for the lengths common to all."""
    points = {name: {r["case"]["kv_len"]: r for r in rows if grows(r)} for name, rows in files.items()}
    points = {name: some for name, some in points.items() if some}
    if not points:
        return None
    keys = sorted(set.intersection(*map(set, points.values())))
    figure, (panel,) = sheet(1, 5.6, 4)
    gains, rows = [], []
    for (name, some), color in zip(points.items(), CURVES):
        some = [some[n] for n in keys]
        ranks = some[0]["case"]["ranks"]
        speeds = [r["ours"] * ranks for r in some]
        panel.axhline(ranks, color=color, linestyle="--", linewidth=1)
        panel.plot(keys, speeds, color=color, marker="o", label=machine(name))
        panel.annotate(f"{ranks} GPUs, ideal", (keys[-1], ranks), (0, 3), textcoords="offset points",
                       ha="right", color=color, size=8)
        for x, y in zip(keys, speeds):
            panel.annotate(f"{y:.2f}", (x, y), (0, -13), textcoords="offset points", ha="center",
                           color=color, size=8)
        gains.append(f"{ranks} GPUs {speeds[-1]:.2f} times")
        rows += some
    case = rows[0]["case"]
    panel.set_xscale("log", base=2)
    panel.set_xticks(keys, map(short, keys))
    panel.minorticks_off()
    panel.set(xlabel="keys of the sequence", ylabel="speed-up over one GPU",
              ylim=(0, 1.08 * max(r["case"]["ranks"] for r in rows)))
    panel.grid(color="0.9")
    panel.legend(loc="lower right")
    say(figure, f"The longer the cache, the nearer decode comes to ideal scaling:\n"
        f"at {short(keys[-1])} keys {', '.join(gains)} as fast as one",
        f"{case['dtype']}, {heads(case)}, dim {case['dim']}, one sequence,\none new token", rows)
    return figure


def grows(r):
    """One sequence of 16-bit contiguous keys in strong scaling; lengths n, not n + 1."""
    case = r["case"]
    return (r["metric"] == "efficiency" and case["ranks"] > 1 and case["scaling"] == "strong" and case["batch"] == 1
            and case.get("page", 0) == 0 and case.get("kv_dtype", case["dtype"]) == "bf16"
            and case["kv_len"] % 128 != 1)


def exchange(files):
    """us added against KB of states; a marker shows the variant. Pushed steps have another peer."""
    figure, panels = sheet(len(files), 1 + 3.9 * len(files), 4, sharey=True)
    shown = []
    for panel, (name, rows) in zip(panels, files.items()):
        rows = [r for r in rows if r["metric"] == "us added" and r["peer"]]
        size = {str(r["case"]): 4 * (r["case"]["dim"] + 2) * r["case"]["tokens"]
                * r["case"]["heads"] / 1000 for r in rows}
        rows = sorted(rows, key=lambda r: size[str(r["case"])])
        x = [size[str(r["case"])] for r in rows]
        panel.plot(x, [r["peer_value"] for r in rows], color=ORANGE, marker="D", markersize=5,
                   label="NCCL all_gather and merge")
        panel.plot(x, [r["ours"] for r in rows], color=BLUE)
        for variant, mark in VARIANTS.items():
            some = [r for r in rows if r["case"]["variant"] == variant]
            if some:
                panel.plot([size[str(r["case"])] for r in some], [r["ours"] for r in some], mark,
                           color=BLUE, label=f"longspan, {variant}")
        log2(panel, [16, 32, 64, 128, 256, 512, 1024, 2048])
        panel.set(title=machine(name), xlabel="states of a rank (KB)")
        panel.grid(color="0.9")
        panel.legend()
        shown += rows
    panels[0].set_ylabel("time added (us, less is better)")
    say(figure, f"One kernel exchanges states {span([r['ratio'] for r in shown])} times as fast as NCCL and a merge",
        "dim 128, in a graph, added to the kernel that makes the states", shown)
    return figure


def curve_of(case):
    """The quantity common to the points of a curve: in weak scaling the keys of a rank."""
    keys = case["kv_len"]
    shared = {key: value for key, value in case.items()
              if key not in ("ranks", "scaling", "kv_len")}
    shared["keys"] = keys // case["ranks"] if case["scaling"] == "weak" else keys
    shared["tokens"] = "as keys" if case.get("tokens") == keys else case.get("tokens", 1)
    return shared


def scaling(files):
    """From bench/scale.py: speed-ups by ranks, and the parts of the time."""
    (name, rows), = files.items()
    rows = [r | {"curve": curve_of(r["case"])} for r in rows]
    points = [r for r in rows if r["metric"] == "efficiency"]
    kinds = list(dict.fromkeys(r["case"]["scaling"] for r in points))
    split = time_split([r for r in rows if r["case"]["scaling"] == kinds[0]])
    columns = len(kinds) + bool(split)
    figure, panels = sheet(columns, 3.9 * columns, 3.9)
    for panel, kind in zip(panels, kinds):
        speed_ups(panel, kind, [r for r in points if r["case"]["scaling"] == kind])
        panel.sharey(panels[0])
    slowest = min(r["ours"] * r["case"]["ranks"] for r in points)
    panels[0].set_ylim(bottom=0.93 * 2 ** math.floor(math.log2(slowest)))
    if split:
        stacks(panels[-1], split)
        panels[-1].set_title(f"{kinds[0]} scaling, {split[0]['curve']['keys']:,} keys")
    case = points[0]["case"]
    say(figure, f"Speed-up of longspan run on {machine(name)}",
        f"{case['dtype']}, {heads(case)}, dim {case['dim']}, query rows: {points[0]['curve']['tokens']}", points)
    return figure


def differences(curves):
    """The properties that differ among them, besides the number of keys."""
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
    log2(panel, ranks)
    panel.set(title=f"{kind} scaling", xlabel="ranks", ylabel="speed-up")
    panel.grid(color="0.9")
    if len(curves) > 2:  # they would hide curves
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    else:
        panel.legend()


def time_split(rows):
    """The first curve of the most keys: a case with the values of its metrics for each number of
    ranks. Records without the shares of the phases are omitted."""
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
