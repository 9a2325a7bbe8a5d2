"""What the command predicts, measures for it, and says of the choice."""

import csv
import json
import os
import pathlib
import re
import tempfile
import unittest

from command import INPUT, OK, USAGE, CommandTest, longspan

CONSTANTS = ("flops_per_s", "key_bytes_per_s", "merge_bytes_per_s", "copy_bytes_per_s", "call_s", "latency_s",
             "peer_latency_s", "link_bytes_per_s", "node_latency_s", "node_link_bytes_per_s", "overlap")
SMALL = ("--heads", 2, "--dim", 16)


class PlanningTest(CommandTest):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        os.environ["XDG_CONFIG_HOME"] = folder.name  # no constants of the user
        self.addCleanup(os.environ.pop, "XDG_CONFIG_HOME")

    def named(self, file):
        os.environ["LONGSPAN_MACHINE"] = str(file)
        self.addCleanup(os.environ.pop, "LONGSPAN_MACHINE", None)

    def plan(self, *options):
        done = longspan(0, "plan", *options, "--json", self.folder / "plan.json")
        self.ends(done, OK)
        found = json.loads((self.folder / "plan.json").read_text())
        served = {s["strategy"]: s for s in found["strategies"] if not s["refusal"]}
        return done, found, served

    def test_plan_of_a_billion_keys(self):
        done, found, served = self.plan("--nodes", 128, "--keys", 1000000000, "--causal", "--heads", 16)
        self.assertIn("128 nodes of 8 ranks", done.stdout)
        self.assertEqual(found["chosen"], min(served, key=lambda name: served[name]["seconds"]))
        for one in served.values():
            self.assertLess(one["received_from_nodes_bytes"], one["received_bytes"])
            self.assertGreater(one["received_from_nodes_bytes"], 0.97 * one["received_bytes"])
            self.assertAlmostEqual(one["seconds"], one["attend_s"] + one["exchange_s"] + one["merge_s"])
            self.assertLessEqual(one["efficiency"], 1)
        # (P - 1) / P of all keys and values, in bf16.
        self.assertAlmostEqual(served["gather-kv"]["received_bytes"], 1023 / 1024 * 1e9 * 16 * 2 * 128 * 2, delta=1e6)
        # Of two levels, an eighth of the heads' from 127 other nodes, and from 7 ranks of the own node an
        # eighth of the heads of what a rank has of q, k and v and of the result.
        far, near = 127 / 128 * 1e9 * 2 * 2 * 128 * 2, 7 / 1024 * 1e9 * 2 * 4 * 128 * 2
        two = served["heads+ring-kv"]
        self.assertAlmostEqual(two["received_from_nodes_bytes"] / far, 1, delta=1e-3)
        self.assertAlmostEqual((two["received_bytes"] - two["received_from_nodes_bytes"]) / near, 1, delta=0.01)

    def test_plan_of_one_node_has_one_level(self):
        for options in (["--nodes", 1], ["--nodes", 4, "--ranks-per-node", 1]):
            _, found, _ = self.plan("--kv", 131072, "--causal", *options)
            self.assertFalse([s for s in found["strategies"] if "+" in s["strategy"]])

    def test_plan_of_decode_moves_states(self):
        _, found, served = self.plan("--kv", 1 << 20, "--tokens", 1, "--heads", 64, "--kv-heads", 8)
        self.assertEqual(served[found["chosen"]]["received_bytes"], served["gather-states"]["received_bytes"])

    def test_plan_within_a_limit_of_memory(self):
        _, _, served = self.plan("--kv", 131072, "--causal")
        least = min(s["memory_bytes"] for s in served.values())
        done, found, some = self.plan("--kv", 131072, "--causal", "--max-workspace", int(least))
        self.assertLess(len(some), len(served))
        self.assertIn("max_workspace", done.stdout)
        self.assertIn(found["chosen"], some)

    def test_plan_by_the_constants_of_a_file(self):
        self.ends(longspan(0, "plan", "--machine", self.folder / "none"), INPUT, "none")
        file = self.folder / "bad"
        file.write_text("flops_per_s fast\n")
        self.ends(longspan(0, "plan", "--machine", file), USAGE, "flops_per_s 'fast'")
        file.write_text("".join(f"{name} 1\n" for name in CONSTANTS))
        done, _, served = self.plan("--machine", file, "--kv", 1000, "--ranks-per-node", 2)
        self.assertIn(str(file), done.stdout)
        self.assertGreater(served["gather-kv"]["attend_s"], 1e6)

    def test_plan_that_makes_no_sense(self):
        self.ends(longspan(0, "plan", "--heads", 6, "--kv-heads", 4), USAGE, "--kv-heads 4")
        self.ends(longspan(0, "plan", "--nodes", 0), USAGE, "--nodes")

    def test_calibrate(self):
        for ranks in self.rank_counts:
            file = self.folder / "here.machine"
            done = longspan(ranks, "calibrate", "--threads", 1, *SMALL, "--out", file)
            self.ends(done, OK)
            self.assertEqual(done.stdout.count("saved to"), 1)
            found = dict(line.split() for line in file.read_text().splitlines() if not line.startswith("#"))
            self.assertEqual(set(found), set(CONSTANTS))
            self.assertIn("one rank" if ranks < 2 else f"{ranks} ranks", file.read_text())
            self.named(file)
            done = longspan(ranks, "run", "--kv", 500, "--tokens", 3, "--explain", *SMALL)
            self.ends(done, OK)
            self.assertIn("gather-states", done.stdout)

    def test_calibrate_saves_where_the_command_looks(self):
        self.ends(longspan(0, "calibrate", "--threads", 1, *SMALL), OK)
        self.assertTrue((self.folder / "longspan" / "host.machine").exists())

    def test_constants_that_make_no_sense(self):
        file = self.folder / "bad"
        self.named(file)
        for ranks in (r for r in self.rank_counts if r > 1):
            self.ends(longspan(ranks, "run", "--kv", 100, "--tokens", 1, *SMALL), USAGE, "cannot be opened")
        file.write_text("speed 3\n")
        for ranks in (r for r in self.rank_counts if r > 1):
            self.ends(longspan(ranks, "run", "--kv", 100, "--tokens", 1, *SMALL), USAGE, "'speed'")

    def test_explain(self):
        for ranks in self.rank_counts:
            done = longspan(ranks, "run", "--kv", 300, "--tokens", 300, "--causal", "--explain", *SMALL)
            self.ends(done, OK)
            self.assertEqual(done.stdout.count("# predicted"), 1)
            self.assertRegex(done.stdout, r"(?m)^#>\S+ +\d")
        for ranks in (r for r in self.rank_counts if r > 1):
            done = longspan(ranks, "run", "--kv", 300, "--tokens", 3, "--strategy", "telepathy", *SMALL)
            self.ends(done, USAGE, "telepathy")

    def test_explain_of_documents(self):
        def attend(*lengths):
            done = longspan(2, "run", "--lengths", *lengths, "--shard", "zigzag", "--shard-queries", "--causal",
                            "--explain", *SMALL)
            self.ends(done, OK)
            return float(re.search(r"(?m)^#.gather-kv +\S+ +([\d.]+)", done.stdout)[1])

        if any(ranks > 1 for ranks in self.rank_counts):  # short ones do not change what a long one takes
            self.assertLess(abs(attend(1500, 1, 1, 1) / attend(1500) - 1), 0.1)

    def test_scale(self):
        for ranks in (r for r in self.rank_counts if r > 0):
            table, record = self.folder / "t.csv", self.folder / "t.json"
            done = longspan(ranks, "bench", "scale", "--kv", 300, "--chunk", 7, "--iterations", 2, "--threads", 1,
                            *SMALL, "--csv", table, "--json", record)
            self.ends(done, OK)
            rows = json.loads(record.read_text())["rows"]
            self.assertEqual({r["phase"] for r in rows}, {"prefill", "chunk", "decode"})
            self.assertEqual(max(r["ranks"] for r in rows), ranks)
            for one in rows:
                if one["no"]:
                    continue
                self.assertEqual(one["check"]["wrong"], 0)
                self.assertGreater(one["efficiency"], 0)
                self.assertGreater(one["predicted_ms"], 0)
            problems = {(r["phase"], r["ranks"]) for r in rows}
            for mark in ("fastest", "chosen"):
                self.assertEqual(sorted((r["phase"], r["ranks"]) for r in rows if r[mark]), sorted(problems))
            with open(table, newline="") as lines:
                self.assertEqual(len(list(csv.DictReader(lines))), sum(not r["no"] for r in rows))

    def test_scale_that_makes_no_sense(self):
        self.ends(longspan(0, "bench", "scale", "--ranks", 99), USAGE, "--ranks 99")
        self.ends(longspan(0, "bench", "scale", "--strategies", "telepathy"), USAGE, "telepathy")


if __name__ == "__main__":
    unittest.main()
