"""The same bits for 1, 2 and 4 ranks, in any layout of the queries; and from run to run."""

import json
import unittest

from command import MPIEXEC, OK, CommandTest, longspan

RANKS = (0, 1, 2, 4) if MPIEXEC else (0,)


class BitsTest(CommandTest):
    def digest(self, ranks, *arguments):
        report = self.path("report.json")
        self.ends(longspan(ranks, "run", *arguments, "--iterations", 1, "--digest", "--json",
                           report), OK)
        return json.loads(report.read_text())["digest"]

    def same(self, *arguments):
        digests = {self.digest(ranks, *arguments) for ranks in RANKS}
        self.assertEqual(len(digests), 1, arguments)
        return digests.pop()

    def test_same_bits(self):
        seen = set()
        for kv in (1, 127, 4097, 5000):
            for shard in ("contiguous", "interleaved", "interleaved:256"):
                with self.subTest(kv=kv, shard=shard):
                    seen.add(self.same("--kv", kv, "--tokens", 5, "--heads", 4, "--kv-heads", 2,
                                       "--dim", 64, "--causal", "--shard", shard))
        self.assertGreaterEqual(len(seen), 4)  # a digest that never changes would prove nothing

    def test_sharded_queries(self):
        arguments = ["--kv", 1500, "--tokens", 400, "--heads", 2, "--dim", 32, "--causal",
                     "--dtype", "bf16"]
        self.assertEqual(self.same(*arguments, "--shard-queries"), self.same(*arguments))

    def test_seed_and_dtype_matter(self):
        base = ["--kv", 300, "--tokens", 2]
        digests = [self.digest(0, *base, *extra) for extra in
                   ([], ["--seed", 1], ["--dtype", "fp16"], ["--dtype", "bf16"], ["--causal"],
                    ["--softcap", 5])]
        self.assertEqual(len(set(digests)), len(digests))

    def test_threads(self):
        self.assertEqual(len({self.digest(0, "--kv", 5000, "--tokens", 40, "--threads", n)
                              for n in (1, 2, 3)}), 1)


if __name__ == "__main__":
    unittest.main()
