"""Plots of strategies: how each scales, the parts of its time, and which is the fastest. They are
drawn from records of bench/strategies.py, or from files of `longspan bench scale --json`.

    speed-up     over one rank's time: efficiency times ranks
    efficiency   time of one rank / (ranks times the time of all), in weak scaling for as much work
    split        attend, exchange and merge, as shares of a run's time
"""

import figures
from figures import GREEN, GREY, PHASES, PINK, SKY, short

# Colours that the phases of a run do not use. Wine is from Paul Tol's palette for colour-blind readers.
BLACK, WINE = "#000000", "#882255"
COLORS = {"gather-states": BLACK, "gather-kv": GREEN, "ring-kv": PINK, "scatter-states": GREY,
          "ring-q": SKY, "heads": WINE}
MARKERS = dict(zip(COLORS, "osD^vX"))
ORDER = [*COLORS, "ideal", *PHASES]  # of a legend
STAGES = ("prefill", "chunk", "decode")


def color_of(strategy):
    return COLORS.get(strategy, figures.ORANGE)


def pair(point):
    return point["heads"], point["kv_heads"]


def in_order(names):
    """In the order of a legend; unknown ones come last."""
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def of_command(run):
    """The points of a file of `longspan bench scale --json`; a refused strategy has none. `time` is
    comparable within a problem. Weak scaling counts the keys of a rank."""
    shape = {key: run["case"][key] for key in ("heads", "kv_heads", "dim", "dtype")}
    weak = run["case"]["scaling"] == "weak"
    return [shape | {"phase": r["phase"], "ranks": r["ranks"], "strategy": r["strategy"],
                     "keys": r["kv_len"] // r["ranks"] if weak else r["kv_len"],
                     "efficiency": r["efficiency"], "time": r["time_ms"]["median"],
                     "split": r["split"], "chosen": r["chosen"], "rival": True, "cores": None}
            for r in run["rows"] if not r["no"]]


def of_records(files):
    """The points of strategies-* and auto-*. The latter has auto's choice (the last one), and the fastest
    strategy among those that auto may take: a faster one with other bits does not compete."""
    chosen, fastest, cases, found = {}, {}, {}, []
    for name, rows in files.items():
        for r in rows:
            case = dict(r["case"])
            if name.startswith("auto-"):
                strategy = case.pop("strategy")
                chosen[str(case)] = strategy
                if r["metric"] == "us":
                    fastest[str(case)] = r["peer"].removeprefix("fastest: ")
            else:
                cases.setdefault(str(case), {})[r["metric"]] = r
    for metrics in cases.values():
        if "efficiency" not in metrics:
            continue
        r = metrics["efficiency"]
        point = dict(r["case"])
        strategy = point.pop("strategy")
        shares = {phase: metrics[f"{phase} share"]["ours"] for phase in PHASES if f"{phase} share" in metrics}
        found.append(point | {"strategy": strategy, "keys": point["kv_len"], "efficiency": r["ours"],
                              "time": 1 / r["ours"], "split": shares, "date": r["date"], "problem": str(point),
                              "chosen": chosen.get(str(point)) == strategy,
                              "cores": r.get("machine", {}).get("cores")})
    times = {p["problem"]: p["time"] for p in found if fastest.get(p["problem"]) == p["strategy"]}
    return [p | {"rival": p["time"] > times.get(p["problem"], 0) or fastest.get(p["problem"]) == p["strategy"]}
            for p in found]


def points_of(files):
    """The points of several ranks, and a title's words on the machine and the problem."""
    name, first = next(iter(files.items()))
    if isinstance(first, dict):
        points, case = of_command(first), first["case"]
        where = {"host": "a CPU", "cuda": "GPUs"}.get(first["backend"], first["backend"])
        where += f", {case['scaling']} scaling, {case['shard']}"
    else:
        points, where = of_records(files), figures.machine(name)
    # Packed documents have one length, of which no curve can be drawn.
    points = sorted((p for p in points if p["ranks"] > 1 and p["phase"] in STAGES),
                    key=lambda p: (STAGES.index(p["phase"]), p["ranks"]))
    return points, f"{where}: {points[0]['dtype']}, dim {points[0]['dim']}" if points else where


def ranks_to_show(points):
    """The most ranks; where the records know the cores, the most that have a core each."""
    ranks = sorted({p["ranks"] for p in points})
    return max([n for n in ranks if n <= (points[0].get("cores") or n)] or ranks[:1])


def keys_to_show(points):
    """The longest length among those of the most numbers of ranks."""
    ranks = {}
    for p in points:
        ranks.setdefault(p["keys"], set()).add(p["ranks"])
    return max(ranks, key=lambda keys: (len(ranks[keys]), keys))


def curves(panel, points, x, y, begin=()):
    """A curve for each strategy; `begin` is a point common to all of them."""
    for strategy in in_order({p["strategy"] for p in points}):
        some = [*begin, *sorted((p[x], y(p)) for p in points if p["strategy"] == strategy)]
        panel.plot(*zip(*some), color=color_of(strategy), marker=MARKERS.get(strategy, "P"),
                   markersize=4.5, label=strategy)
    panel.grid(color="0.9")
    panel.set_axisbelow(True)


def speed_ups(panel, points):
    keys = keys_to_show(points)
    points = [p for p in points if p["keys"] == keys]
    ranks = [1, *sorted({p["ranks"] for p in points})]
    panel.plot(ranks, ranks, color="0.6", linestyle="--", label="ideal")
    curves(panel, points, "ranks", lambda p: p["efficiency"] * p["ranks"], [(1, 1)])
    figures.log2(panel, ranks)
    panel.set(title=f"{points[0]['phase']}, {keys:,} keys", xlabel="ranks", ylabel="speed-up")


def efficiencies(panel, points, ranks):
    points = [p for p in points if p["ranks"] == ranks]
    curves(panel, points, "keys", lambda p: p["efficiency"])
    panel.set_xscale("log", base=2)
    keys = sorted({p["keys"] for p in points})
    panel.set_xticks(keys, [short(n) for n in keys])
    panel.minorticks_off()
    panel.axhline(1, color="0.6", linestyle="--")
    panel.set_ylim(bottom=0)
    panel.set(title=f"{points[0]['phase']}, {ranks} ranks", xlabel="keys", ylabel="efficiency")


def splits(panel, points, ranks):
    points = [p for p in points if p["ranks"] == ranks and p["split"]]
    if not points:
        return panel.set_axis_off()
    keys = max(p["keys"] for p in points)
    points = [p for p in points if p["keys"] == keys]
    places, left = range(len(points)), [0.0] * len(points)
    for phase, color in PHASES.items():
        if phase in points[0]["split"]:
            widths = [100 * p["split"][phase] for p in points]
            panel.barh(places, widths, 0.8, left=left, color=color, label=phase)
            left = [start + width for start, width in zip(left, widths)]
    panel.set_yticks(places, [p["strategy"] for p in points])
    panel.set_ylim(len(points) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.set(title=f"{points[0]['phase']}, {keys:,} keys, {ranks} ranks", xlabel="share of time (%)")


def legend(figure, panels, columns):
    """One for all panels."""
    seen = {}
    for panel in panels:
        for handle, text in zip(*panel.get_legend_handles_labels()):
            seen.setdefault(text, handle)
    names = in_order(seen)
    figure.legend([seen[name] for name in names], names, loc="outside lower center", ncols=columns)


def strategies(files):
    """For the first pair of heads: a row of panels for each phase."""
    points, what = points_of(files)
    points = [p for p in points if p["efficiency"] is not None]
    if not points:
        return None
    points = [p for p in points if pair(p) == pair(points[0])]
    phases = list(dict.fromkeys(p["phase"] for p in points))
    columns = 2 + any(p["split"] for p in points)
    figure, panels = figures.grid(len(phases), columns, 3.9 * columns, 0.9 + 2.7 * len(phases))
    for row, phase in zip(panels, phases):
        some = [p for p in points if p["phase"] == phase]
        ranks = ranks_to_show(some)
        speed_ups(row[0], some)
        efficiencies(row[1], some, ranks)
        if columns == 3:
            splits(row[2], some, ranks)
    legend(figure, panels.flat, 6 if columns == 3 else 4)
    figures.say(figure, "How each strategy scales, and where its time goes", f"{what}, {figures.heads(points[0])}")
    return figure


def ink(color):
    """The colour of text on a colour."""
    red, green, blue = (int(color[i:i + 2], 16) / 255 for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def best(files):
    """A map of the fastest strategy among those that auto may take, with its efficiency, by keys and by
    phase, ranks and heads. Where auto chose another, the map has its share of the fastest one's
    speed."""
    points, what = points_of(files)
    if not points:
        return None
    several = len(set(map(pair, points))) > 1
    problems = {}
    for p in points:
        if p["rival"]:
            problems.setdefault((problem(p, several), p["keys"]), []).append(p)
    keys, rows = sorted({p["keys"] for p in points}), list(dict.fromkeys(name for name, _ in problems))
    figure, ((panel,),) = figures.grid(1, 1, 2.4 + 1.1 * max(4, len(keys)), 1.6 + 0.36 * len(rows))
    shares = []
    for (name, size), some in problems.items():
        fastest = min(some, key=lambda p: p["time"])
        x, y, color = keys.index(size), rows.index(name), color_of(fastest["strategy"])
        panel.barh(y, 0.96, 0.92, left=x - 0.48, color=color, label=fastest["strategy"])
        words = ["" if fastest["efficiency"] is None else f"{fastest['efficiency']:.2f}"]
        taken = [(p["strategy"], fastest["time"] / p["time"]) for p in some if p["chosen"]]
        words += [f"{strategy} {share:.2f}" for strategy, share in taken if strategy != fastest["strategy"]]
        shares += [share for _, share in taken]
        panel.text(x, y, "\n".join(words).strip(), color=ink(color), ha="center", va="center", size=6.5)
    panel.set_xticks(range(len(keys)), map(short, keys))
    panel.set_yticks(range(len(rows)), rows)
    panel.set(xlim=(-0.5, len(keys) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="keys")
    panel.tick_params(length=0)
    legend(figure, [panel], 3)
    near = sum(share >= 0.95 for share in shares)
    figures.say(figure, f"auto is within 5 % of the fastest strategy in {near} of {len(shares)} problems"
                + (f",\nand never below {min(shares):.2f} of its speed" if near < len(shares) else ""),
                f"{what}; colour: the fastest that auto may take, with its efficiency;\n"
                "second line: what auto takes instead, and its share of that speed",
                [p for p in points if "date" in p])
    return figure


def problem(p, several):
    """The name of a map's row; it notes where ranks share cores."""
    name = f"{p['phase']}, {p['ranks']} ranks"
    if (p["cores"] or p["ranks"]) < p["ranks"]:
        name += f" on {p['cores']} cores"
    return name + (f", {p['heads']}/{p['kv_heads']} heads" if several else "")
