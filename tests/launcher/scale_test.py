"""bench/scale.py from end to end on a small problem."""

import json
import pathlib
import subprocess
import sys
import unittest

from command import COMMAND, MPIEXEC, OK, USAGE, CommandTest, environment, longspan

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import records  # noqa: E402
import strategy_figures  # noqa: E402


class ScaleTest(CommandTest):
    def test_table_and_speed_up(self):
        self.needs_mpi()
        done = subprocess.run(
            [sys.executable, ROOT / "bench" / "scale.py", "--command", COMMAND, "--launcher",
             MPIEXEC + " -n {ranks}", "--ranks", "1", "2", "--kv", "2048", "--tokens", "4",
             "--iterations", "3", "--results", self.folder, "--", "--causal"],
            env=environment(), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [text.split() for text in done.stdout.splitlines() if not text.startswith("#")]
        self.assertEqual([(row[0], row[1], row[3]) for row in rows],
                         [("strong", "2048", "1"), ("strong", "2048", "2"),
                          ("weak", "2048", "1"), ("weak", "4096", "2")])
        self.assertEqual([row[6] for row in rows[::2]], ["1.00", "1.00"])
        self.assertEqual(done.stderr, "")  # progress is for terminals
        found = {}  # what bench/plot.py draws from
        for r in records.read(self.path("scale-cpu.jsonl")):
            self.assertTrue(r["machine"]["cpu"])
            found.setdefault((r["case"]["scaling"], r["case"]["ranks"]), {})[r["metric"]] = r["ours"]
        self.assertEqual(len(found), 4)
        for row in rows:
            metrics = found[row[0], int(row[3])]
            # Both are rounded: half a microsecond, and half of a hundredth of one.
            self.assertAlmostEqual(metrics["us"] / 1000, float(row[4]), delta=0.00051)
            self.assertAlmostEqual(metrics["efficiency"], float(row[7]), delta=0.006)
            for phase, share in zip(("attend", "exchange", "merge"), row[8:11]):
                self.assertAlmostEqual(100 * metrics[f"{phase} share"], float(share), delta=0.06)

    def test_bench_scale_writes_what_plots_show(self):
        self.needs_mpi()
        path = self.path("scale.json")
        done = longspan(2, "bench", "scale", "--backend", "host", "--phases", "prefill", "decode", "--kv", 512,
                        "--iterations", 1, "--json", path)
        self.assertEqual(done.returncode, OK, done.stderr)
        points, where = strategy_figures.points_of({"scale": json.loads(path.read_text())})
        self.assertEqual(where, "a CPU, strong scaling, zigzag: fp32, dim 64")
        self.assertEqual({(p["phase"], p["ranks"], p["keys"]) for p in points},
                         {("prefill", 2, 512), ("decode", 2, 512)})
        self.assertEqual({p["strategy"] for p in points if p["phase"] == "prefill"}, set(strategy_figures.COLORS))
        for p in points:
            self.assertGreater(p["efficiency"], 0)
            self.assertAlmostEqual(sum(p["split"].values()), 1, places=3)
        self.assertEqual([p["phase"] for p in points if p["chosen"]], ["prefill", "decode"])

    def test_training(self):
        """Forward and backward, their bytes, and memory beside the formula."""
        self.needs_mpi()
        path, table = self.path("train.json"), self.path("train.csv")
        done = longspan(2, "bench", "scale", "--backend", "host", "--phases", "train", "--kv", 2048, "--heads", 8,
                        "--iterations", 2, "--json", path, "--csv", table)
        self.assertEqual(done.returncode, OK, done.stderr)
        rows = [row for row in json.loads(path.read_text())["rows"] if not row["no"]]
        self.assertLessEqual({"ring-kv", "gather-kv", "ring-q", "heads", "gather-states", "scatter-states"},
                             {row["strategy"] for row in rows if row["ranks"] == 2})
        for row in rows:
            with self.subTest(ranks=row["ranks"], strategy=row["strategy"]):
                self.assertEqual((row["phase"], row["tokens"], row["check"]["wrong"]), ("train", 2048, 0))
                self.assertLessEqual({"dq", "dk", "dv"}, set(row["check"]))
                self.assertGreater(row["time_ms"]["min"], row["backward_ms"]["min"])
                self.assertGreater(row["backward_ms"]["min"], 0)
                self.assertLess(abs(row["counted_bytes"] - row["received_bytes"]), 0.02 * row["received_bytes"] + 1)
                tensors = 2048 / row["ranks"] * 8 * 4 * (8 * 64 + 1)
                expected = tensors + row["workspace_bytes"]
                self.assertLess(row["peak_bytes"], 1.3 * expected + 2 ** 24)
                self.assertGreater(row["peak_bytes"], 0.7 * expected)
        self.assertIn("peak_bytes", table.read_text().splitlines()[0])

    def test_graphs_are_for_gpus(self):
        path = self.path("scale.json")
        done = longspan(0, "bench", "scale", "--backend", "host", "--kv", 64, "--graph", "--json", path)
        self.ends(done, USAGE, "--graph needs GPUs")
        self.assertFalse(path.exists())

    def test_records_replace_older_ones(self):
        one = records.record("scale", {"ranks": 1}, "us", 5.0, peer="1 rank", peer_value=5.0,
                             ratio=1.0, target=0.9)
        two = records.record("scale", {"ranks": 2}, "us", 9.0, ratio=0.55, target=0.9)
        again = records.record("scale", {"ranks": 1}, "us", 4.0, peer="1 rank", peer_value=5.0,
                               ratio=1.25)
        path = records.write("scale", "test", [one, two], self.folder)
        records.write("scale", "test", [again], self.folder)
        kept = records.read(path)
        self.assertEqual([r["ours"] for r in kept], [4.0, 9.0])
        self.assertEqual([r["met"] for r in (one, two, again)], [True, False, None])
        keys = {"bench", "case", "metric", "ours", "peer", "peer_value", "ratio", "target", "met",
                "date", "commit", "command"}
        self.assertEqual(set(json.loads(path.read_text().splitlines()[0])), keys)
        machine = records.host_machine(COMMAND, pytorch="2.9.0")
        named = records.record("scale", {"ranks": 1}, "us", 5.0, machine=machine)
        self.assertEqual(set(named), keys | {"machine"})
        self.assertEqual(set(machine), {"cpu", "cores", "memory_gib", "simd", "longspan",
                                        "compiler", "pytorch"})
        self.assertTrue(all(machine.values()), machine)

    def test_records_go_to_a_folder_of_the_user(self):
        """For every script: the project's records are written only when they are named."""
        self.assertNotEqual(records.OWN_RESULTS, records.RESULTS)
        ignored = subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", records.OWN_RESULTS])
        self.assertIn(ignored.returncode, (0, 128))  # 128: no repository
        for script in (ROOT / "bench").glob("*.py"):
            if script.name not in ("records.py", "tables.py", "plot.py"):
                self.assertNotIn("RESULTS", script.read_text(encoding="utf-8"), script)


if __name__ == "__main__":
    unittest.main()
