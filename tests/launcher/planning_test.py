"""The command's predictions, the measurements for them, and its messages about the choice."""

import csv
import json
import os
import re
import unittest
from unittest import mock

from command import INPUT, OK, USAGE, CommandTest, longspan

CONSTANTS = ("flops_per_s", "key_bytes_per_s", "merge_bytes_per_s", "copy_bytes_per_s", "call_s", "latency_s",
             "peer_latency_s", "link_bytes_per_s", "node_latency_s", "node_link_bytes_per_s", "overlap")
SMALL = ("--heads", 2, "--dim", 16)


class PlanningTest(CommandTest):
    def setUp(self):
        super().setUp()
        settings = mock.patch.dict(os.environ, XDG_CONFIG_HOME=str(self.folder))
        settings.start()
        self.addCleanup(settings.stop)

    def named(self, file):
        os.environ["LONGSPAN_MACHINE"] = str(file)

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
            measured = re.search(r"(?m)^# measured (\d{4}-\d\d-\d\d, spread [\d.]+(: the machine was busy)?)$",
                                 file.read_text())
            self.assertEqual(bool(measured[2]), "measure again" in done.stdout, done.stdout)
            self.named(file)
            self.says(ranks, f"{file}, measured {measured[1]}", {"from": str(file), "measured": measured[1]})

    def says(self, ranks, text, record):
        """All commands that choose by constants name them: for people, and in their records."""
        short = ("--iterations", 1, "--threads", 1, "--backend", "host", *SMALL)
        commands = (["run", "--kv", 500, "--tokens", 3, *short],
                    ["bench", "scale", "--kv", 64, "--phases", "decode", *short],
                    ["bench", "decode", "--kv", 64, "--layers", 1, "--kv-heads", 1, *short])
        for command in commands:
            with self.subTest(command=command, ranks=ranks):
                done = longspan(ranks, *command, "--json", self.folder / "said.json")
                self.ends(done, OK)
                self.assertEqual(re.findall("(?m)^# constants: (.*)$", done.stdout), [text])
                self.assertEqual(json.loads((self.folder / "said.json").read_text())["constants"], record)
        self.assertIn(text, json.loads(longspan(ranks, "info", "--json").stdout)["constants"])
        self.assertRegex(longspan(ranks, "info").stdout, f"(?m)^constants .*{re.escape(text)}")

    def test_where_constants_come_from(self):
        for ranks in self.rank_counts:
            self.says(ranks, "built in, of one core", {"from": "built in, of one core", "measured": ""})
        _, found, _ = self.plan()
        self.assertEqual(found["constants"], {"from": "built in, of an H200", "measured": ""})
        self.named(self.folder / "bad")
        done = longspan(0, "info")
        self.ends(done, OK)
        self.assertRegex(done.stdout, "(?m)^constants .*bad.* cannot be opened")

    def test_calibrate_saves_where_the_command_looks(self):
        host = ("--threads", 1, "--backend", "host", *SMALL)
        self.ends(longspan(0, "calibrate", *host), OK)
        file = self.folder / "longspan" / "host.machine"
        done = longspan(0, "run", "--kv", 100, "--tokens", 1, *host)
        self.assertIn(f"# constants: {file}, measured ", done.stdout)

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


class UsersConstantsTest(CommandTest):
    def test_tests_neither_read_nor_write_them(self):
        file = self.path(".config/longspan/host.machine")
        file.parent.mkdir(parents=True)
        file.write_text("speed 3\n")
        done = longspan(0, "run", "--kv", 100, "--tokens", 1, *SMALL, HOME=str(self.folder))
        self.ends(done, OK)
        self.assertIn("# constants: built in", done.stdout)
        self.ends(longspan(0, "calibrate", *SMALL, HOME=str(self.folder)), INPUT, "/dev/null/longspan/")
        self.assertEqual(file.read_text(), "speed 3\n")


if __name__ == "__main__":
    unittest.main()
