"""`longspan run` on files: the numbers against float64 computed here, and what it writes."""

import json
import math
import unittest

import npy
from command import OK, USAGE, CommandTest, each_rank, longspan

KEYS, TOKENS, HEADS, KV_HEADS, DIM = 150, 5, 4, 2, 16


class RunTest(CommandTest):
    def make(self, code="<f4", keys=KEYS, tokens=TOKENS, seed=1, value_dim=DIM):
        self.q = npy.draw((tokens, HEADS, DIM), seed, code)
        self.k = npy.draw((keys, KV_HEADS, DIM), seed + 1, code)
        self.v = npy.draw((keys, KV_HEADS, value_dim), seed + 2, code)
        self.tokens, self.keys, self.value_dim = tokens, keys, value_dim
        npy.save(self.path("q.npy"), (tokens, HEADS, DIM), self.q, code)
        npy.save(self.path("k.npy"), (keys, KV_HEADS, DIM), self.k, code)
        npy.save(self.path("v.npy"), (keys, KV_HEADS, value_dim), self.v, code)
        return ["run", "--q", self.path("q.npy"), "--k", self.path("k.npy"), "--v",
                self.path("v.npy"), "--out", self.path("out.npy"), "--lse", self.path("lse.npy")]

    def expected(self, **options):
        return npy.attention(self.q, self.k, self.v, self.tokens, self.keys, HEADS, KV_HEADS, DIM,
                             value_dim=self.value_dim, **options)

    def close(self, ranks, arguments, bound, code="<f4", **options):
        """Runs, and compares both files with float64."""
        done = longspan(ranks, *arguments)
        self.ends(done, OK)
        exact, exact_lse = self.expected(**options)
        found_code, shape, out = npy.load(self.path("out.npy"))
        self.assertEqual((found_code, shape), (code, (self.tokens, HEADS, self.value_dim)))
        norm = math.sqrt(sum(x * x for x in exact)) or 1.0
        error = math.sqrt(sum((a - b) ** 2 for a, b in zip(out, exact))) / norm
        self.assertLess(error, bound)
        lse_code, lse_shape, lse = npy.load(self.path("lse.npy"))
        self.assertEqual((lse_code, lse_shape), ("<f4", (self.tokens, HEADS)))
        for a, b in zip(lse, exact_lse):
            self.assertTrue(a == b or abs(a - b) < 2e-6 * max(1, abs(b)), (a, b))
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()),
                         sorted({"q.npy", "k.npy", "v.npy", "out.npy", "lse.npy"}
                                | {p.name for p in self.folder.glob("extra*")}))
        return done

    def test_fp32_causal(self):
        arguments = self.make()
        for ranks in self.rank_counts + (3,):
            with self.subTest(ranks=ranks):
                self.close(ranks, arguments + ["--causal"], 2e-6, causal=True)

    def test_masks_and_scores(self):
        sinks = [0.5, -1.0, 2.0, 0.0]
        npy.save(self.path("extra_sinks.npy"), (HEADS,), sinks)
        arguments = self.make(seed=7)
        for options, meaning in (
                ([], {}),
                (["--causal", "--window", 20], {"causal": True, "window": 20}),
                (["--scale", 0.5, "--softcap", 3], {"scale": 0.5, "softcap": 3.0}),
                (["--alibi", "context", "--causal", "--softcap", 3],
                 {"alibi": "context", "causal": True, "softcap": 3.0}),
                (["--alibi", "query"], {"alibi": "query"}),
                (["--causal", "--causal-alignment", "upper_left", "--alibi", "context"],
                 {"causal": True, "upper_left": True, "alibi": "context"}),
                (["--rope", 6], {"rope": {"dim": 6}}),
                (["--rope", DIM, "--rope-interleaved", "--rope-theta", 50, "--rope-scale", 2.5, "--causal"],
                 {"rope": {"dim": DIM, "interleaved": True, "theta": 50.0, "scale": 2.5},
                  "causal": True}),
                (["--documents", 0, 60, 147, 149, "--causal"], {"documents": [0, 60, 147, 149], "causal": True}),
                (["--documents", 3, 150, "--left-padding", 148], {"documents": [3, 150], "padding": 148}),
                (["--causal", "--sinks", self.path("extra_sinks.npy")],
                 {"causal": True, "sinks": sinks})):
            with self.subTest(options=options):
                self.close(2 if len(self.rank_counts) > 1 else 0, arguments + options, 2e-6,
                           **meaning)

    def test_sixteen_bits(self):
        # One rounding to the output: half a unit in the last place of each element, and that of
        # P in addition where a device rounds it.
        for code, dtype, unit in (("<f2", "fp16", 2.0 ** -11), ("<V2", "bf16", 2.0 ** -8)):
            arguments = self.make(code, seed=11) + ["--dtype", dtype]
            for ranks in self.rank_counts:
                with self.subTest(dtype=dtype, ranks=ranks):
                    self.close(ranks, arguments, unit, code=code)

    def test_values_of_another_width(self):
        for value_dim in (8, 24):
            arguments = self.make(value_dim=value_dim, seed=31)
            for ranks in self.rank_counts:
                with self.subTest(value_dim=value_dim, ranks=ranks):
                    self.close(ranks, arguments + ["--causal"], 2e-6, causal=True)

    def test_formats_two_and_three(self):
        arguments = self.make()
        for version in (2, 3):
            npy.save(self.path("k.npy"), (KEYS, KV_HEADS, DIM), self.k, version=version)
            self.close(0, arguments, 2e-6)

    def test_sharded_queries(self):
        self.needs_mpi()
        arguments = self.make(keys=300, tokens=300, seed=21)
        for shard in ("contiguous", "zigzag", "striped", "interleaved:32"):
            with self.subTest(shard=shard):
                self.close(3, arguments + ["--causal", "--shard-queries", "--shard", shard], 2e-6,
                           causal=True)

    def test_more_ranks_than_keys(self):
        self.needs_mpi()
        self.close(4, self.make(keys=2), 2e-6)

    def test_zero_keys(self):
        arguments = self.make(keys=0)
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                self.close(ranks, arguments, 2e-6)
                self.assertEqual(set(npy.load(self.path("out.npy"))[2]), {0.0})
                self.assertEqual(set(npy.load(self.path("lse.npy"))[2]), {-math.inf})

    def test_zero_rows(self):
        arguments = self.make(tokens=0)
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                self.close(ranks, arguments, 2e-6)

    def test_nan_in_a_query_stays_in_its_row(self):
        arguments = self.make(seed=31)
        poisoned = list(self.q)
        poisoned[2 * HEADS * DIM + 3] = math.nan  # row 2, head 0
        npy.save(self.path("q.npy"), (TOKENS, HEADS, DIM), poisoned)
        exact, exact_lse = self.expected(causal=True)
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                self.ends(longspan(ranks, *arguments, "--causal"), OK)
                out = npy.load(self.path("out.npy"))[2]
                for i, (a, b) in enumerate(zip(out, exact)):
                    if i // DIM == 2 * HEADS:
                        self.assertTrue(math.isnan(a))
                    else:
                        self.assertLess(abs(a - b), 1e-5)
                self.assertTrue(math.isnan(npy.load(self.path("lse.npy"))[2][2 * HEADS]))

    def test_nan_in_keys_that_no_row_sees(self):
        arguments = self.make(seed=41)
        unseen = (KEYS - TOKENS - 10 + 1) * KV_HEADS * DIM  # before every window of 10
        for name, values in (("k.npy", self.k), ("v.npy", self.v)):
            npy.save(self.path(name), (KEYS, KV_HEADS, DIM),
                     [math.nan] * unseen + values[unseen:])
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                self.close(ranks, arguments + ["--causal", "--window", 10], 2e-6, causal=True,
                           window=10)

    def test_json_and_table(self):
        arguments = ["run", "--kv", 3000, "--tokens", 7, "--heads", 4, "--kv-heads", 2, "--dim", 32,
                     "--causal", "--check", "all", "--json", self.path("report.json"), "--digest"]
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                done = longspan(ranks, *arguments)
                self.ends(done, OK)
                report = json.loads(self.path("report.json").read_text())
                self.assertEqual(report["case"]["ranks"], max(ranks, 1))
                self.assertEqual(report["case"]["kv_len"], 3000)
                self.assertRegex(report["exchange"], "^(peer-buffers|gather)")
                self.assertEqual(len(report["times_ms"]), 5)
                self.assertEqual(report["check"]["rows"], 7)
                self.assertEqual(report["check"]["wrong"], 0)
                self.assertLess(report["check"]["relative_error"], 2e-6)
                self.assertAlmostEqual(sum(report["share"].values()), 1, places=6)
                rows = [text for text in done.stdout.splitlines() if not text.startswith("#")]
                self.assertEqual(len(rows), 1, done.stdout)  # only rank 0 prints
                self.assertEqual(rows[0].split()[:7],
                                 ["gather-states", "3000", "7", "4", "2", "32", "fp32"])
                self.assertIn("# digest " + report["digest"], done.stdout)

    def test_gather_by_name(self):
        """The requested strategy, and the bits of `auto`."""
        digests = set()
        for exchange in ("auto", "gather"):
            done = longspan(self.rank_counts[-1], "run", "--kv", 300, "--tokens", 3, "--digest",
                            "--exchange", exchange, "--json", self.path("report.json"))
            self.ends(done, OK)
            report = json.loads(self.path("report.json").read_text())
            digests.add(report["digest"])
            if exchange == "gather":
                self.assertEqual(report["exchange"], "gather")
        self.assertEqual(len(digests), 1)

    def test_ranks_with_other_numbers_of_threads(self):
        """Ranks of unlike nodes: only their scratch differs. The bits do not."""
        self.needs_mpi()
        for extra in ([], ["--shard-queries"]):
            base = ["run", "--kv", 5000, "--tokens", 64, "--causal", "--digest", *extra]
            digests = set()
            for threads in ((1, 1), (1, 2), (3, 1)):
                done = each_rank(base, base, variables=[f"LONGSPAN_THREADS={n}" for n in threads])
                self.ends(done, OK)
                digests.add(done.stdout.split("# digest ")[1])
            self.assertEqual(len(digests), 1)
        base = ["bench", "decode", "--kv", 500, "--layers", 2, "--heads", 4, "--kv-heads", 2]
        self.ends(each_rank(base, base, base, variables=[f"LONGSPAN_THREADS={n}" for n in (2, 1, 1)]),
                  OK)

    def test_batch(self):
        done = longspan(2 if len(self.rank_counts) > 1 else 0, "run", "--kv", 700, "--tokens", 3,
                        "--batch", 4, "--causal", "--check", "all")
        self.ends(done, OK)
        self.assertIn("12 of 12 rows", done.stdout)

    def test_lengths(self):
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                done = longspan(ranks, "run", "--lengths", 40, 0, 1, 300, "--causal", "--alibi",
                                "query", "--check", "all", "--json", self.path("report.json"))
                self.ends(done, OK)
                self.assertIn("ALiBi query", done.stdout)
                report = json.loads(self.path("report.json").read_text())
                self.assertEqual(report["check"]["rows"], 341)
                self.assertEqual((report["case"]["lengths"], report["case"]["kv_len"]),
                                 ([40, 0, 1, 300], 300))
        done = longspan(0, "run", "--lengths", 40, "--kv", 30)
        self.ends(done, USAGE)


if __name__ == "__main__":
    unittest.main()
