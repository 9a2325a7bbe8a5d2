"""`--backend simulated`: the CUDA kernels on CPUs, in the one build that has them."""

import json
import os
import unittest

from command import MPIEXEC, OK, USAGE, CommandTest, longspan

HAS_SIMULATOR = "LONGSPAN_TEST_SIMULATED" in os.environ


class SimulatedTest(CommandTest):
    ranks = 2 if MPIEXEC else 0

    def test_help_does_not_name_it(self):
        for command in (["run"], ["verify"], ["bench", "decode"]):
            done = longspan(0, *command, "--help")
            self.ends(done, OK)
            self.assertNotIn("simulated", done.stdout)
        self.ends(longspan(0, "run", "--backend", "imagined"), USAGE, "--backend", "imagined")

    @unittest.skipIf(HAS_SIMULATOR, "this build has a simulator")
    def test_other_builds_say_how_to_get_one(self):
        for command in (["run"], ["verify"], ["bench", "decode"]):
            for ranks in self.rank_counts:
                with self.subTest(command=command, ranks=ranks):
                    self.ends(longspan(ranks, *command, "--backend", "simulated"), USAGE,
                              "--backend", "this build has no simulator",
                              "cmake --preset simulated")

    @unittest.skipUnless(HAS_SIMULATOR, "this build has no simulator")
    def test_info(self):
        done = longspan(self.ranks, "info", LONGSPAN_SIMULATED_GPUS="2")
        self.ends(done, OK)
        self.assertRegex(done.stdout, r"(?m)^GPU 1 +Simulated GPU sm_\d\d,")

    @unittest.skipUnless(HAS_SIMULATOR, "this build has no simulator")
    def test_run(self):
        digests = set()
        for exchange in ("peer-buffers", "gather"):
            done = longspan(self.ranks, "run", "--backend", "simulated", "--kv", 300, "--tokens", 3,
                            "--heads", 2, "--dtype", "bf16", "--causal", "--check", "all",
                            "--iterations", 1, "--digest", "--invariant",
                            *(["--exchange", exchange] if self.ranks else []),
                            "--json", self.path("report.json"))
            self.ends(done, OK)
            self.assertIn("Simulated GPU", done.stdout)
            report = json.loads(self.path("report.json").read_text())
            self.assertEqual((report["check"]["rows"], report["check"]["wrong"]), (3, 0))
            self.assertEqual(report["case"]["ranks"], max(self.ranks, 1))
            if self.ranks:
                self.assertEqual(report["exchange"], exchange)
            digests.add(report["digest"])
        self.assertEqual(len(digests), 1)

    @unittest.skipUnless(HAS_SIMULATOR, "this build has no simulator")
    def test_scale_in_graphs(self):
        self.needs_mpi()
        done = longspan(2, "bench", "scale", "--backend", "simulated", "--phases", "prefill", "--kv", 300,
                        "--heads", 2, "--graph", "--iterations", 2, "--json", self.path("report.json"))
        self.ends(done, OK)
        report = json.loads(self.path("report.json").read_text())
        self.assertTrue(report["case"]["graph"])
        served = [row for row in report["rows"] if not row["no"]]
        self.assertLess(1, len({row["strategy"] for row in served if row["ranks"] == 2}))
        for row in served:  # written by the last replay over NaNs
            self.assertEqual((row["check"]["rows"], row["check"]["wrong"]), (4, 0), row["strategy"])
            self.assertGreater(row["time_ms"]["min"], 0)

    @unittest.skipUnless(HAS_SIMULATOR, "this build has no simulator")
    def test_no_gpu(self):
        done = longspan(self.ranks, "run", "--backend", "simulated", LONGSPAN_SIMULATED_GPUS="0")
        self.ends(done, 4, "--backend simulated", "no GPU was found")


if __name__ == "__main__":
    unittest.main()
