"""`longspan bench decode` from outside: its report, that its results are those of one rank, and what
it refuses. Times must exist, but are not checked. And bench/decode_step.py."""

import contextlib
import io
import json
import pathlib
import sys
import unittest
from unittest import mock

from command import (COMMAND, INPUT, MPIEXEC, OK, UNSUPPORTED, USAGE, CommandTest, each_rank,
                     environment, longspan)

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import decode_step  # noqa: E402
import records  # noqa: E402

SMALL = {"--backend": "host", "--heads": 6, "--kv-heads": 2, "--dim": 32, "--layers": 3,
         "--iterations": 2, "--warmup": 1}


def small(*extra):
    """A command for small sizes, where `extra` does not say otherwise: an option is given once."""
    rest = [word for item in SMALL.items() if item[0] not in extra for word in item]
    return ["bench", "decode", *rest, *extra]


class BenchDecodeTest(CommandTest):
    rank_counts = (0, 1, 2, 3) if MPIEXEC else (0,)

    def report(self, ranks, *extra):
        """The output of --json, and the rows of the table."""
        done = longspan(ranks, *small(*extra), "--json", self.path("report.json"))
        self.ends(done, OK)
        rows = [text.split() for text in done.stdout.splitlines() if not text.startswith("#")]
        return json.loads(self.path("report.json").read_text()), rows, done.stdout

    def test_table_and_json(self):
        lengths = [0, 1, 300, 1025]
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                report, rows, _ = self.report(ranks, "--kv", *lengths)
                world = max(ranks, 1)
                self.assertEqual(report["case"]["ranks"], world)
                self.assertEqual((report["case"]["heads"], report["case"]["kv_heads"],
                                  report["case"]["dim"], report["case"]["layers"]), (6, 2, 32, 3))
                self.assertEqual((report["warmup"], report["iterations"]), (1, 2))
                self.assertEqual([row["kv_len"] for row in report["rows"]], lengths)
                self.assertEqual([row[:3] for row in rows],  # only rank 0 prints
                                 [[str(n), "3", str(world)] for n in lengths])
                for row in report["rows"]:
                    self.assertEqual(len(row["times_ms"]), 2)
                    self.assertEqual(row["caches"], 3)
                    self.assertEqual(row["check"]["rows"], 8)  # 4 before, 4 after the timed ones
                    self.assertEqual(row["check"]["wrong"], 0)
                    self.assertTrue(row["check"]["right"])
                    times = [row["time_ms"]["median"], row["bandwidth_gbs"], row["layer_us"],
                             row["split_ms"]["append"], row["split_ms"]["attend"]]
                    if world > 1:
                        self.assertEqual(row["alone"]["kv_len"], row["kv_len"])
                        times += [row["alone"]["time_ms"]["median"], row["efficiency"]]
                        self.assertAlmostEqual(row["efficiency"], times[-2] / times[0] / world)
                    else:
                        self.assertIsNone(row["alone"])
                        self.assertIsNone(row["efficiency"])
                    self.assertTrue(all(value > 0 for value in times), row)

    def test_bits_of_one_rank(self):
        """1, 2 and 4 ranks append the same, in the same places, and give the same bits."""
        self.needs_mpi()
        for extra in ([], ["--batch", 3, "--tokens", 4, "--page", 16],
                      ["--batch", 2, "--kv-dtype", "e4m3"]):
            digests = {self.report(ranks, "--kv", 700, "--dtype", "fp32", "--no-alone",
                                   *extra)[0]["rows"][0]["digest"] for ranks in (1, 2, 4)}
            self.assertEqual(len(digests), 1, extra)
        other = self.report(1, "--kv", 700, "--batch", 2, "--kv-dtype", "e4m3", "--dtype", "fp32",
                            "--seed", 1)[0]["rows"][0]["digest"]
        self.assertNotIn(other, digests)

    def test_every_kind_of_cache(self):
        for extra in (["--batch", 5, "--tokens", 8, "--page", 1, "--shard", "striped"],
                      ["--batch", 3, "--tokens", 4, "--shard", "interleaved:7", "--dtype", "fp16"],
                      ["--batch", 7, "--page", 48, "--kv-dtype", "e5m2", "--invariant"],
                      ["--tokens", 2, "--dtype", "fp32", "--kv-dtype", "e4m3"]):
            for ranks in (0, 3) if MPIEXEC else (0,):
                with self.subTest(extra=extra, ranks=ranks):
                    report, _, _ = self.report(ranks, "--kv", 260, *extra)
                    tokens = report["case"]["tokens"]
                    self.assertEqual(report["rows"][0]["check"]["rows"], 8 * tokens)
                    self.assertEqual(report["rows"][0]["check"]["wrong"], 0)

    def test_weak(self):
        self.needs_mpi()
        report, rows, _ = self.report(3, "--kv", 200, "--weak")
        row = report["rows"][0]
        self.assertEqual(report["case"]["scaling"], "weak")
        self.assertEqual((row["kv_len"], row["alone"]["kv_len"], rows[0][0]), (600, 200, "600"))
        self.assertAlmostEqual(row["efficiency"],
                               row["alone"]["time_ms"]["median"] / row["time_ms"]["median"])

    def test_caches_that_do_not_all_fit(self):
        """Layers share them, alike on all ranks and alone. Where one rank cannot hold a whole one,
        nothing is compared."""
        ranks = self.rank_counts[-1]
        # 20,000 keys of 2 tensors, 2 heads, dim 32, 2 bytes: 5 MB.
        report, rows, _ = self.report(ranks, "--kv", 20000, "--memory", 0.012)
        self.assertEqual(report["rows"][0]["caches"], 2)
        self.assertEqual(rows[0][1], "2")
        self.assertEqual(report["rows"][0]["check"]["wrong"], 0)
        self.assertEqual(report["rows"][0]["alone"] is None, ranks == 0)
        if ranks == 0:
            return
        report, _, output = self.report(ranks, "--kv", 20000, "--memory", 0.004)
        self.assertIsNone(report["rows"][0]["alone"])
        self.assertIn("--memory", report["rows"][0]["not_alone"])
        self.assertIn("# not alone: ", output)

    def test_alone_for_longer_than_the_deadline(self):
        """The others wait in pieces."""
        self.needs_mpi()
        report, _, _ = self.report(2, "--kv", 100000, "--deadline", 2, "--layers", 8, "--memory",
                                   0.1, "--check", 1, "--iterations", 40)
        self.assertIsNotNone(report["rows"][0]["efficiency"])

    def test_nothing_checked(self):
        report, rows, _ = self.report(self.rank_counts[-1], "--kv", 100, "--check", 0)
        self.assertNotIn("check", report["rows"][0])
        self.assertEqual(rows[0][-3:], ["-", "-", "-"])

    def test_refused(self):
        for extra, status, words in (
                (["--shard", "contiguous"], USAGE, ["contiguous", "interleaved"]),
                (["--shard", "striped:4"], USAGE, ["striped:4"]),
                (["--tokens", 9], USAGE, ["--tokens", "1 to 8"]), (["--kv", -1], USAGE, ["--kv"]),
                (["--batch", 0], USAGE, ["--batch"]),
                (["--warmup", 0], USAGE, ["--warmup", "from 1"]),
                (["--iterations", 0], USAGE, ["--iterations", "from 1"]),
                (["--layers", 2, "--layers", 3], USAGE, ["--layers"]),
                (["--memory", 0], USAGE, ["--memory"]),
                (["--kv", 10, 2 ** 31 - 1], USAGE, ["2147483647", "at the end"]),
                (["--kv-dtype", "fp16"], USAGE, ["dtypes.kv fp16"]),
                (["--dtype", "e4m3"], USAGE, ["e4m3"]),
                (["--no-such-option"], USAGE, ["--no-such-option", "bench decode --help"]),
                (["--json", self.path("no/report.json")], INPUT, ["cannot be written"])):
            for ranks in (0, 2) if MPIEXEC else (0,):
                with self.subTest(extra=extra, ranks=ranks):
                    self.ends(longspan(ranks, *small(*extra)), status, *words)
        self.ends(longspan(0, "bench", "decode", "--dim", 577), UNSUPPORTED, "dim 577")
        self.ends(longspan(0, "bench", "decode", "--heads", 3, "--kv-heads", 2), USAGE, "heads 3")
        self.ends(longspan(0, "bench"), USAGE, "not a command by itself")
        self.ends(longspan(0, "bench", "encode"), USAGE, "bench")

    def test_ranks_disagree(self):
        self.needs_mpi()
        self.ends(each_rank(small("--kv", 100), small("--kv", 101)), USAGE, "--kv", "rank 1")
        self.ends(each_rank(small(), ["run", "--kv", 100]), USAGE, "bench decode", "run")


class DecodeScriptTest(CommandTest):
    def start(self, *arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), \
                mock.patch.object(sys, "argv", ["decode_step", *map(str, arguments)]), \
                mock.patch.dict("os.environ", environment()):
            decode_step.main()
        return output.getvalue()

    def test_records(self):
        self.needs_mpi()
        output = self.start("--command", COMMAND, "--launcher", MPIEXEC + " -n {ranks}", "--backend",
                          "host", "--ranks", 1, 2, "--kv", 256, "--batch", 1, 2, "--scaling",
                          "strong", "weak", "--machine", "try", "--results", self.folder, "--",
                          "--layers", 2, "--iterations", 2, "--warmup", 1)
        rows = records.read(self.path("decode_step-try.jsonl"))
        # 2 kinds of scaling, 2 batches, 2 rank counts, kv and kv + 1; efficiency on two ranks only.
        self.assertEqual(len([r for r in rows if r["metric"] == "us"]), 16)
        efficient = [r for r in rows if r["metric"] == "efficiency"]
        self.assertEqual(len(efficient), 8)
        self.assertEqual({r["case"]["ranks"] for r in efficient}, {2})
        strong = [r["case"] for r in efficient if r["case"]["scaling"] == "strong"]
        self.assertEqual({case["kv_len"] for case in strong}, {256, 257})
        self.assertEqual({r["bench"] for r in rows}, {"decode_step"})
        self.assertEqual(len([text for text in output.splitlines() if not text.startswith("#")]), 16)

    def test_targets(self):
        """Those of 4 GPUs, batch 1, heads 64/8, at 2^k keys and at 2^k + 1."""
        def of(backend="cuda", **more):
            return decode_step.target(
                {"ranks": 4, "scaling": "strong", "batch": 1, "tokens": 1, "heads": 64,
                 "kv_heads": 8, "dim": 128, "dtype": "bf16", "kv_dtype": "bf16",
                 "kv_len": 1 << 20} | more, backend)

        self.assertEqual([of(kv_len=n << 17) for n in (1, 4, 8, 32)], [0.75, 0.93, 0.96, 0.985])
        self.assertEqual(of(kv_len=(1 << 20) + 1), 0.96)
        for other in ({"batch": 2}, {"ranks": 2}, {"scaling": "weak"}, {"backend": "host"},
                      {"kv_len": 4096}, {"kv_dtype": "e4m3"}):
            self.assertIsNone(of(**other), other)


if __name__ == "__main__":
    unittest.main()
