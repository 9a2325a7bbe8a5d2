"""What the command prints about itself."""

import json
import re
import unittest

from command import OK, USAGE, CommandTest, longspan


class InfoTest(CommandTest):
    def test_version(self):
        done = longspan(0, "--version")
        self.ends(done, OK)
        self.assertRegex(done.stdout, r"^longspan \d+\.\d+\.\d+\n$")

    def test_help_lists_every_status(self):
        for ranks in self.rank_counts:
            done = longspan(ranks, "--help")
            self.ends(done, OK)
            self.assertEqual(done.stdout.count("Exit status"), 1)  # one rank prints
            for status in range(9):
                self.assertRegex(done.stdout, rf"(?m)(^|\s){status}  \w")

    def test_help_of_a_command(self):
        for command, option in (("run", "--shard-queries"), ("verify", "--full"),
                                ("run", "--exchange"), ("verify", "--exchange")):
            done = longspan(0, command, "--help")
            self.ends(done, OK)
            self.assertIn(option, done.stdout)

    def test_nothing_asked_is_help(self):
        self.assertEqual(longspan(0).stdout, longspan(0, "--help").stdout)

    def test_unknown_command(self):
        self.ends(longspan(0, "dance"), USAGE, "dance")

    def test_info(self):
        for ranks in self.rank_counts:
            done = longspan(ranks, "info")
            self.ends(done, OK)
            self.assertEqual(len(re.findall(r"(?m)^longspan ", done.stdout)), 1)
            self.assertIn("gather-states", done.stdout)
            described = json.loads(longspan(ranks, "info", "--json").stdout)
            self.assertEqual("GPU 1" in described, "exchange" in described)
            if "exchange" in described:
                self.assertRegex(described["exchange"], "^(peer-buffers|gather)")
            self.assertEqual([s["name"] for s in described["strategies"]][:1], ["gather-states"])

    def test_features(self):
        for ranks in self.rank_counts:
            done = longspan(ranks, "info", "--features")
            self.ends(done, OK)
            self.assertEqual(len(re.findall(r"(?m)^feature .*host +cuda", done.stdout)), 1)
        listed = json.loads(longspan(0, "info", "--features", "--json").stdout)
        lines = done.stdout.splitlines()[1:]
        self.assertEqual(len(lines), len(listed))
        for line, feature in zip(lines, listed):
            self.assertEqual(set(feature), {"name", "meaning", "asked of", "host", "cuda"})
            self.assertIn(feature["asked of"], ("layer", "calls", "layer, calls"))
            yes = {True: "yes", False: "no"}
            self.assertRegex(line, rf"^{re.escape(feature['name'])} +{yes[feature['host']]} "
                                   rf"+{yes[feature['cuda']]} +{feature['asked of']} "
                                   rf"+{re.escape(feature['meaning'])}$")
        names = [feature["name"] for feature in listed]
        self.assertIn("paged", names)
        self.assertIn("state in", names)
        self.assertNotIn("listed queries", names)  # a backend's; no public call asks for it

    def test_kernels(self):
        """Every device has a last family that supports everything, and the lines match the JSON."""
        listed = json.loads(longspan(0, "info", "--kernels", "--json").stdout)
        lines = longspan(0, "info", "--kernels").stdout.splitlines()
        self.assertRegex(lines[0], r"^device +kernel +queries .*takes$")
        self.assertEqual(len(lines) - 1, len(listed))
        for line, row in zip(lines[1:], listed):
            self.assertTrue(line.startswith(row["device"]) and line.endswith(row["takes"]), line)
            self.assertIn(f" {row['kernel']} ", line)
            self.assertIn(row["rows end in"], ("states", "result of split keys", "result"))
        for device, last in (("host", "vectors"), ("cuda", "fp32")):
            named = [row for row in listed if row["device"] == device]
            self.assertEqual([named[-1][key] for key in ("kernel", "queries", "heads")],
                             [last, "any", "all"])
        self.assertEqual([row["kernel"] for row in listed if row["new keys"]], ["decode"])

    def test_options(self):
        """The options of the command are those of `longspan run`, and no name is used twice."""
        listed = json.loads(longspan(0, "info", "--options", "--json").stdout)
        lines = longspan(0, "info", "--options").stdout.splitlines()[1:]
        self.assertEqual([line.split()[0] for line in lines], [row["C++"] for row in listed])
        self.assertEqual(len({row["C++"] for row in listed}), len(listed))
        taken = longspan(0, "run", "--help").stdout
        for name in {row["longspan run"] for row in listed} - {""}:
            self.assertRegex(taken, rf"(?m)^ +{name}\b")
        compared = {row["C++"]: row["ranks compare"] for row in listed}
        self.assertEqual(compared["Options::score.alibi"], "yes")
        self.assertEqual(compared["Options::threads"], "no")
        self.assertEqual(compared["AttentionArgs::slopes"], "what it holds")

    def test_env(self):
        text = longspan(0, "env", LONGSPAN_DEADLINE_S="7.5").stdout
        self.assertRegex(text, r"LONGSPAN_DEADLINE_S\s+7\.5")
        listed = json.loads(longspan(0, "env", "--json").stdout)
        self.assertTrue({"name", "value", "standard", "meaning"} <= set(listed[0]))

    def test_list_strategies(self):
        done = longspan(0, "run", "--list-strategies")
        self.ends(done, OK)
        self.assertIn("gather-states", done.stdout)


if __name__ == "__main__":
    unittest.main()
