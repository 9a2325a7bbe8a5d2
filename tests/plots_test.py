"""The plots and tables of the documentation exist and match the records; what bench/figures.py draws
is in the records. The drawing itself needs matplotlib."""

import csv
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import figures  # noqa: E402
import plot  # noqa: E402
import records  # noqa: E402
import strategy_figures  # noqa: E402

SHAPE = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bf16", "batch": 1, "tokens": 1,
         "ranks": 1}
DRAWS = unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")


def documents():
    paths = [path for path in ROOT.rglob("*.md")
             if not path.relative_to(ROOT).parts[0].startswith(("build", "."))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


class Documents(unittest.TestCase):
    def test_every_picture_exists(self):
        shown = [(path, name) for path, text in documents().items()
                 for name in re.findall(r"!\[[^\]]*\]\(([^)#\s]+)\)", text) if "://" not in name]
        self.assertGreater(len(shown), 2)
        for path, name in shown:
            self.assertTrue((path.parent / name).exists(), f"{path.relative_to(ROOT)} shows {name}")

    def test_every_plot_is_of_the_records_that_are_here_and_is_shown(self):
        found, everything = plot.sources(), "".join(documents().values())
        plots = [path for path in (ROOT / "docs").glob("*.svg")
                 if "bench/plot.py" in path.read_text(encoding="utf-8")]
        self.assertEqual({path.stem for path in plots}, set(plot.SHOWN))
        for path in plots:
            self.assertIn(path.stem, found, "its records are gone")
            self.assertTrue(plot.stamp(found[path.stem][0]) in path.read_text(encoding="utf-8"),
                            f"{path.name} is of other records: python3 bench/plot.py {path.stem}")
            self.assertIn(path.name, everything, "no document shows it")

    def test_every_table_is_of_the_records_that_are_here(self):
        sources = list(records.RESULTS.glob("*.jsonl"))
        self.assertEqual({path.stem for path in records.RESULTS.glob("*.csv")}, {path.stem for path in sources})
        for path in sources:
            self.assertTrue(path.with_suffix(".csv").read_text() == records.table(records.read(path)),
                            f"{path.stem}.csv is of other records: python3 bench/tables.py")

    def test_a_table_has_every_record_and_says_met_only_of_a_target(self):
        rows = [records.record("try", {"ranks": 2}, "us", 5.0, target=6.0, less_is_better=True),
                records.record("try", {"ranks": 2, "page": 16}, "us", 7.0),
                records.record("try", {"ranks": 4}, "us", 7.0, target=6.0, less_is_better=True)]
        table = list(csv.DictReader(io.StringIO(records.table(rows))))
        self.assertEqual([(row["ranks"], row["page"], row["ours"], row["met"]) for row in table],
                         [("2", "", "5.0", "yes"), ("2", "16", "7.0", ""), ("4", "", "7.0", "no")])


def beside(bench, metric, cases, peers, **more):
    """Invented records: each case beside each peer, and alone with a target."""
    rows = []
    for case in cases:
        ours = random.uniform(1, 9)
        rows.append(records.record(bench, SHAPE | case, metric, ours, target=random.uniform(1, 9), **more))
        for peer in peers:
            theirs = random.uniform(1, 9)
            rows.append(records.record(bench, SHAPE | case, metric, ours, peer=peer,
                                       peer_value=theirs, ratio=ours / theirs,
                                       target=random.choice([None, 0.9]), **more))
    return rows


def ways():
    """Of context-parallel prefill: two ways of PyTorch's, each over two kernels, in graphs and without."""
    return [records.record("context_parallel", {"heads": 16, "kv_heads": 16, "dim": 128, "tokens": tokens,
                                                "strategy": "heads"} | graph, "ms", 2.0,
                           peer=f"PyTorch {way}, {kernel}", peer_value=theirs, ratio=theirs / 2)
            for tokens in (8192, 32768) for graph in ({}, {"graph": True})
            for way, kernel, theirs in (("allgather", "cuDNN", 3.0), ("alltoall", "cuDNN", 2.5),
                                        ("allgather", "FlashAttention-2", 5.0), ("alltoall", "FlashAttention-2", 6.0))]


def scales(bench="scale", phases=("attend", "exchange", "merge"), ranks=(1, 2, 4), sizes=(4096, 65536)):
    rows, of_ranks = [], ranks
    for kind in ("strong", "weak"):
        for size in sizes:
            for ranks in of_ranks:
                case = SHAPE | {"ranks": ranks, "scaling": kind,
                                "kv_len": size * ranks if kind == "weak" else size}
                rows += [records.record(bench, case, "us", random.uniform(50, 90)),
                         records.record(bench, case, "efficiency", random.uniform(0.3, 1),
                                        target=random.choice([None, 0.9]))]
                parts = [random.uniform(0.1, 1) for _ in phases]
                rows += [records.record(bench, case, f"{phase} share", part / sum(parts))
                         for phase, part in zip(phases, parts)]
    return rows


def exchanges(ranks):
    shape = SHAPE | {"ranks": ranks}
    return [records.record("exchange", shape | {"tokens": tokens, "variant": variant}, "us added",
                           2.0 * tokens, **peer)
            for tokens, variant in ((1, "one-trip"), (4, "one-trip"), (16, "two-trips"))
            for peer in ({"target": 1.5 * tokens, "less_is_better": True},
                         {"peer": "NCCL all_gather + merge", "peer_value": 3.0 * tokens,
                          "ratio": 1.5})
            ] + [records.record("exchange", shape | {"tokens": 4, "variant": "pushed"},
                                "us added to the step of one GPU", 5.0,
                                peer="kernels of their own", peer_value=7.0, ratio=1.4)]


NAMES = ["gather-states", "gather-kv", "ring-kv", "scatter-states", "ring-q", "heads"]
PHASES = ("attend", "exchange", "merge")


def strategies():
    """The records of bench/strategies.py, and of auto's choices."""
    measured, auto = [], []
    for phase, ranks, keys, kv_heads in [(phase, ranks, keys, kv_heads) for phase in ("decode", "prefill")
                                         for ranks in (2, 4) for keys in (4096, 16384) for kv_heads in (8, 2)]:
        case = {"phase": phase, "ranks": ranks, "kv_len": keys, "tokens": keys if phase == "prefill" else 1,
                "heads": 8, "kv_heads": kv_heads, "dim": 64, "dtype": "fp32", "causal": True}
        for name in NAMES:
            mine = case | {"strategy": name}
            measured.append(records.record("strategies", mine, "efficiency", random.uniform(0.1, 1),
                                           machine={"cores": 2}))
            measured += [records.record("strategies", mine, f"{phase} share", share)
                         for phase, share in zip(PHASES, (0.5, 0.25, 0.25))]
            measured.append(records.record("strategies", mine, "received bytes", 1.0, peer="formula",
                                           peer_value=1.0, ratio=1.0))
        some = {r["case"]["strategy"]: r["ours"] for r in measured if r["metric"] == "efficiency"
                and r["case"] | {"strategy": ""} == case | {"strategy": ""}}
        some.pop("ring-kv")  # which has other bits, so auto may not take it
        fastest = max(some, key=some.get)
        auto.append(records.record("auto", case | {"strategy": random.choice(list(some))}, "us", 5.0,
                                   peer=f"fastest: {fastest}", peer_value=4.0, ratio=0.8, target=0.95))
    return measured, auto


def scale_json(ranks=(1, 2, 4), weak=False):
    """A file of `longspan bench scale --json`, with a strategy that refuses decode."""
    rows = []
    for phase in ("prefill", "decode"):
        for n in ranks:
            for keys in (1024, 3000):
                for name in NAMES if n > 1 else NAMES[:1]:
                    row = {"phase": phase, "ranks": n, "kv_len": keys * n if weak else keys, "tokens": 1,
                           "strategy": name, "no": "", "chosen": name == "gather-kv", "fastest": False}
                    if (phase, name) == ("decode", "ring-kv"):
                        rows.append(row | {"no": "it shares the work by rows"})
                        continue
                    time = random.uniform(1, 9)
                    rows.append(row | {"time_ms": {"median": time, "min": time, "max": time},
                                       "split": dict(zip(PHASES, (0.5, 0.25, 0.25))),
                                       "efficiency": random.uniform(0.1, 1) if 1 in ranks else None})
    case = {"scaling": "weak" if weak else "strong", "batch": 1, "heads": 8, "kv_heads": 2, "dim": 64,
            "dtype": "fp32", "shard": "zigzag", "inputs": "seed 0"}
    return {"longspan": "0.2.0", "backend": "host", "world": "MPI", "case": case, "threads": 1, "rows": rows}


def invented():
    measured, auto = strategies()
    lone = {"window": 0, "kv_dtype": "bf16", "table": "permuted", "layout": "rows", "page": 16}
    masks = [{"causal": causal, "invariant": invariant, "kv_len": kv, "tokens": kv}
             for causal in (False, True) for invariant in (True, False) for kv in (4096, 16384)]
    pages = [{"page": 16, "layout": layout, "kv_len": kv, "tokens": 512}
             for layout in ("rows", "x-packed") for kv in (8704, 33280)]
    threads = [{"causal": True, "threads": 1, "kv_len": kv, "dtype": dtype} for dtype in ("bf16", "fp32")
               for kv in (4096, 16384)]
    decode = [{"kv_len": kv, "batch": batch} for kv, batch in ((4096, 32), (131072, 1))]
    return {"scale-cpu": scales(phases=()), "scale-h200x4": scales(),
            "prefill-h200": beside("prefill", "TFLOP/s", masks, ["cuDNN", "FlashAttention-2"]),
            "decode_step-h200x2": scales("decode_step", ranks=(1, 2)),
            "decode_step-h200x4": scales("decode_step", sizes=(4096, 65536, 2 ** 20)),
            "seeds-h200": beside("seeds", "TB/s", [case | lone for case in decode],
                                 ["seed (as shipped)", "seed (best)", "cuDNN"]),
            "seeds-cpu": beside("seeds", "us", decode, ["longspan, contiguous keys"]),
            "chunked-h200": beside("chunked", "TFLOP/s", pages, ["cuDNN (two parts)", "seed (as shipped)"]),
            "host-cpu": beside("host", "TFLOP/s", threads, ["PyTorch"], machine={"cpu": "a CPU", "cores": 2}),
            "context_parallel-h200x2": ways(),
            "exchange-h200x2": exchanges(2), "exchange-h200x4": exchanges(4),
            "strategies-cpu": measured, "auto-cpu": auto}


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, *arguments, before="pass", seed="0"):
        """bench/plot.py in a separate process, over invented records."""
        script = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); {before}; " \
                 "import plot; plot.main()"
        return subprocess.run(
            [sys.executable, "-c", script, "--results", self.folder / "results", *arguments],
            capture_output=True, text=True, timeout=600,
            env=dict(os.environ) | {"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"})


class Plots(InFolder):
    def setUp(self):
        super().setUp()
        for name, rows in invented().items():
            records.write(*name.split("-"), rows, self.folder / "results")

    def test_says_what_is_missing(self):
        done = self.start("--out", self.folder, before="sys.modules['matplotlib'] = None")
        self.assertEqual(done.returncode, 1)
        self.assertIn("pip install matplotlib", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    @DRAWS
    def test_every_plot_and_the_same_bytes_again(self):
        for out, seed in (("one", "1"), ("two", "2")):
            done = self.start("--out", self.folder / out, seed=seed)
            self.assertEqual(done.returncode, 0, done.stderr)
        drawn = {path.stem: path.read_bytes() for path in (self.folder / "one").iterdir()}
        self.assertEqual(set(drawn), {"scale-cpu", "scale-h200x4", "prefill-h200", "decode-h200",
                                      "decode_step-h200x2", "chunked-h200", "host-cpu",
                                      "context_parallel-h200x2", "exchange-h200", "strategies-cpu", "best-cpu"})
        found = plot.sources(self.folder / "results")
        for name, text in drawn.items():
            self.assertEqual(text, (self.folder / "two" / f"{name}.svg").read_bytes(), name)
            root = xml.etree.ElementTree.fromstring(text)
            words = " ".join("".join(part.itertext()) for part in root.iter() if "text" in part.tag)
            self.assertIn("CPU" if name.endswith("-cpu") else "H200", words)
            self.assertIn(plot.stamp(found[name][0]).encode(), text)
            self.assertNotIn(b"nan", text)

    @DRAWS
    def test_names(self):
        done = self.start("chunked-h200", "--out", self.folder / "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([path.name for path in (self.folder / "out").iterdir()],
                         ["chunked-h200.svg"])
        for name, word in (("chunked-moon", "chunked-h200"), ("decode-cpu", "nothing")):
            done = self.start(name, "--out", self.folder / "out")
            self.assertEqual(done.returncode, 1)
            self.assertIn(word, done.stderr)


class OfScale(InFolder):
    """Files of `longspan bench scale --json`."""

    def written(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    @DRAWS
    def test_plots_beside_the_file_or_in_a_folder(self):
        path = self.written("mine.json", scale_json())
        for folder, more in ((self.folder, []), (self.folder / "out", ["--out", self.folder / "out"])):
            done = self.start(path, *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            drawn = [folder / "mine.svg", folder / "mine-best.svg"]
            self.assertEqual(done.stdout.split(), list(map(str, drawn)))
            for svg in drawn:
                text = svg.read_bytes()
                xml.etree.ElementTree.fromstring(text)
                self.assertIn(plot.stamp([path]).encode(), text)

    @DRAWS
    def test_without_one_rank_there_is_the_map_alone(self):
        done = self.start(self.written("mine.json", scale_json((2, 4))))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split(), [str(self.folder / "mine-best.svg")])

    @DRAWS
    def test_what_cannot_be_drawn(self):
        for content, word in (("{", "is not what"), ("[]", "is not what"), ({"rows": []}, "is not what"),
                              (scale_json((1,)), "one rank alone")):
            done = self.start(self.written("mine.json", content))
            self.assertEqual(done.returncode, 1)
            self.assertIn(word, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
        done = self.start(self.folder / "none.json")
        self.assertEqual(done.returncode, 1)
        self.assertIn("No such file", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


def lines(panel, label):
    return [point for line in panel.lines if line.get_label() == label
            for point in zip(map(float, line.get_xdata()), map(float, line.get_ydata()))]


@DRAWS
class Figures(unittest.TestCase):
    """The drawn values, by the numbers in the figure."""

    def panels(self, function, **files):
        figure = function({name.replace("_", "-"): rows for name, rows in files.items()})
        return figure.axes

    def test_bars(self):
        rows = invented()["chunked-h200"]
        panel, = self.panels(figures.chunked, chunked_h200=rows)
        mine = [r for r in rows if r["case"]["layout"] == "rows" and r["peer"]]
        pairs = list(zip(mine[::2], mine[1::2]))
        self.assertEqual([bar.get_width() for bar in panel.patches],
                         [speed for one, two in pairs for speed in (one["ours"], one["peer_value"], two["peer_value"])])
        self.assertEqual([text.get_text() for text in panel.texts], [f"{one['ratio']:.2f}" for one, _ in pairs])

    def test_the_title_says_the_range_that_the_bars_have(self):
        rows = invented()["prefill-h200"]
        ratios = [r["ratio"] for r in rows if r["peer"] == "cuDNN" and not r["case"]["invariant"]]
        figure = figures.prefill({"prefill-h200": rows})
        shown = [float(text.get_text()) for panel in figure.axes for text in panel.texts]
        self.assertEqual(sorted(shown), sorted(round(ratio, 2) for ratio in ratios))
        self.assertIn(f"one H200 has {figures.span(ratios)} of cuDNN's speed", figure.get_suptitle())

    def test_decode_step(self):
        files = {name: invented()[name] for name in ("decode_step-h200x2", "decode_step-h200x4")}
        panel, = figures.decode_step(files).axes
        for name, ranks in (("2 H200s", 2), ("4 H200s", 4)):  # 1M keys, which only one has, are left out
            mine = {r["case"]["kv_len"]: ranks * r["ours"] for r in files[f"decode_step-h200x{ranks}"]
                    if r["metric"] == "efficiency" and r["case"]["scaling"] == "strong" and r["case"]["ranks"] == ranks}
            self.assertEqual(lines(panel, name), [(keys, mine[keys]) for keys in (4096, 65536)])

    def test_context_parallel(self):
        panel, = self.panels(figures.context_parallel, context_parallel_h200x2=ways())
        work = [2e-9 * 16 * tokens ** 2 * 128 for tokens in (8192, 32768)]  # in graphs, of the faster way
        self.assertEqual([bar.get_width() for bar in panel.patches],
                         [flops / ms for flops in work for ms in (2.0, 2.5, 5.0)])

    def test_scaling(self):
        rows = scales("scale")
        strong, weak, split = self.panels(figures.scaling, scale_h200x4=rows)
        for panel, kind, label in ((strong, "strong", "65,536 keys"),
                                   (weak, "weak", "65,536 keys a rank")):
            mine = [r for r in rows if r["case"]["scaling"] == kind and r["metric"] == "efficiency"]
            speed = {ranks: ranks * r["ours"] for r in mine if (ranks := r["case"]["ranks"])
                     and r["case"]["kv_len"] == (65536 * ranks if kind == "weak" else 65536)}
            self.assertEqual(lines(panel, label), sorted(speed.items()))
        value = {(r["case"]["ranks"], r["metric"]): r["ours"] for r in rows
                 if r["case"]["scaling"] == "strong" and r["case"]["kv_len"] == 65536}
        times = [value[ranks, "us"] * value[ranks, f"{phase} share"] / 1000
                 for phase in ("attend", "exchange", "merge") for ranks in (1, 2, 4)]
        for bar, time in zip(split.patches, times, strict=True):
            self.assertAlmostEqual(bar.get_height(), time, places=9)  # a sum less a sum
        self.assertEqual(len(self.panels(figures.scaling, scale_cpu=scales(phases=()))), 2)

    def test_exchange(self):
        panels = self.panels(figures.exchange, exchange_h200x2=exchanges(2),
                             exchange_h200x4=exchanges(4))
        self.assertEqual([panel.get_title() for panel in panels], ["2 H200s", "4 H200s"])
        sizes = [tokens * 32 * 520 / 1000 for tokens in (1, 4, 16)]
        for panel in panels:
            self.assertEqual(lines(panel, "NCCL all_gather and merge"),
                             list(zip(sizes, (3.0, 12.0, 48.0))))
            self.assertEqual(lines(panel, "longspan, two-trips"), [(sizes[2], 32.0)])

    def test_strategies_of_records(self):
        rows, auto = strategies()
        panels = self.panels(strategy_figures.strategies, strategies_cpu=rows, auto_cpu=auto)
        self.assertEqual([panel.get_title() for panel in panels],
                         ["prefill, 16,384 keys", "prefill, 2 ranks", "prefill, 16,384 keys, 2 ranks",
                          "decode, 16,384 keys", "decode, 2 ranks", "decode, 16,384 keys, 2 ranks"])
        for phase, (speed, efficiency, split) in zip(("prefill", "decode"), (panels[:3], panels[3:])):
            mine = {(r["case"]["strategy"], r["case"]["ranks"], r["case"]["kv_len"]): r["ours"] for r in rows
                    if r["metric"] == "efficiency" and r["case"]["phase"] == phase and r["case"]["kv_heads"] == 8}
            for name in NAMES:
                self.assertEqual(lines(speed, name), [(1, 1), *((n, n * mine[name, n, 16384]) for n in (2, 4))])
                self.assertEqual(lines(efficiency, name), [(n, mine[name, 2, n]) for n in (4096, 16384)])
            self.assertEqual([bar.get_width() for bar in split.patches], 6 * [50] + 12 * [25])
        without = [r for r in rows if not r["metric"].endswith("share")]
        self.assertEqual(len(self.panels(strategy_figures.strategies, strategies_cpu=without)), 4)

    def cells(self, panel):
        """{(row, column): text} and {(row, column): colour} of a map."""
        rows, columns = ([label.get_text() for label in labels]
                         for labels in (panel.get_yticklabels(), panel.get_xticklabels()))
        place = lambda x, y: (rows[round(y)], columns[round(x)])
        return ({place(*text.get_position()): text.get_text() for text in panel.texts},
                {place(bar.get_x() + 0.48, bar.get_y() + 0.46): bar.get_facecolor() for bar in panel.patches})

    def test_best_of_records(self):
        from matplotlib import colors
        rows, auto = strategies()
        panel, = self.panels(strategy_figures.best, strategies_cpu=rows, auto_cpu=auto)
        texts, fills = self.cells(panel)
        self.assertEqual(len(texts), 16)
        self.assertEqual(set(texts), set(fills))
        for choice in auto:
            case = choice["case"]
            some = {r["case"]["strategy"]: r["ours"] for r in rows if r["metric"] == "efficiency"
                    and r["case"] | {"strategy": ""} == case | {"strategy": ""}}
            some.pop("ring-kv")
            name, cores = max(some, key=some.get), " on 2 cores" * (case["ranks"] == 4)
            cell = (f"{case['phase']}, {case['ranks']} ranks{cores}, 8/{case['kv_heads']} heads",
                    f"{case['kv_len'] // 1024}K")
            self.assertEqual(fills[cell], colors.to_rgba(strategy_figures.COLORS[name]))
            taken = case["strategy"]
            self.assertEqual(texts[cell], f"{some[name]:.2f}" + (
                "" if taken == name else f"\n{taken} {some[taken] / some[name]:.2f}"))

    def test_best_of_the_command(self):
        from matplotlib import colors
        for weak in (False, True):
            run = scale_json(weak=weak)
            figure = strategy_figures.best({"mine": run})
            texts, fills = self.cells(figure.axes[0])
            self.assertEqual(len(texts), 8)
            for (row, column), text in texts.items():
                phase, ranks = row.split(", ")
                n, keys = int(ranks.split()[0]), {"1K": 1024, "3,000": 3000}[column]
                some = {r["strategy"]: r for r in run["rows"] if not r["no"] and r["phase"] == phase
                        and r["ranks"] == n and r["kv_len"] == keys * (n if weak else 1)}
                self.assertEqual(len(some), 6 if phase == "prefill" else 5)
                name = min(some, key=lambda name: some[name]["time_ms"]["median"])
                self.assertEqual(fills[row, column], colors.to_rgba(strategy_figures.COLORS[name]))
                self.assertTrue(text.startswith(f"{some[name]['efficiency']:.2f}"))
                self.assertEqual("gather-kv" in text, name != "gather-kv")

    def test_strategies_of_the_command(self):
        run = scale_json()
        panels = strategy_figures.strategies({"mine": run}).axes
        self.assertEqual([panel.get_title() for panel in panels[:3]],
                         ["prefill, 3,000 keys", "prefill, 4 ranks", "prefill, 3,000 keys, 4 ranks"])
        value = {(r["phase"], r["strategy"], r["ranks"], r["kv_len"]): r["efficiency"]
                 for r in run["rows"] if not r["no"]}
        self.assertEqual(lines(panels[0], "ring-q"), [(1, 1), *((n, n * value["prefill", "ring-q", n, 3000])
                                                                for n in (2, 4))])
        self.assertEqual(lines(panels[4], "heads"), [(n, value["decode", "heads", 4, n]) for n in (1024, 3000)])
        self.assertEqual(lines(panels[4], "ring-kv"), [])
        self.assertIsNone(strategy_figures.strategies({"mine": scale_json((2, 4))}))


if __name__ == "__main__":
    unittest.main()
