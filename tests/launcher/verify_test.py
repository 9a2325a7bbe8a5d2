"""`longspan verify` on several worlds."""

import unittest

from command import OK, USAGE, CommandTest, longspan


class VerifyTest(CommandTest):
    def test_quick(self):
        for ranks in self.rank_counts[:1] + self.rank_counts[2:] + \
                ((3, 4, 7) if len(self.rank_counts) > 1 else ()):
            with self.subTest(ranks=ranks):
                done = longspan(ranks, "verify", "--quick", "--seed", ranks, timeout=500)
                self.ends(done, OK)
                rows = [text for text in done.stdout.splitlines() if not text.startswith("#")]
                self.assertEqual(len(rows), 20, done.stdout)
                bits = [text for text in rows if text.startswith(" same bits")]
                others = [text for text in rows if text not in bits]
                self.assertTrue(all(text.endswith("pass") for text in others), done.stdout)
                if ranks in (3, 7):  # of other numbers than 1, 2, 4 ... the bits are not promised
                    self.assertRegex(bits[0], r"^ same bits +0 [ -]+not compared: 1, 2, 4 ... 64 ranks "
                                              rf"give the same bits, and these are {ranks}$")
                else:
                    self.assertTrue(bits[0].endswith("pass"), bits)

    def test_families_by_name(self):
        ranks = self.rank_counts[-1]
        done = longspan(ranks, "verify", "--quick", "--families", "gradients", "same bits")
        self.ends(done, OK)
        rows = [text for text in done.stdout.splitlines() if not text.startswith("#")]
        self.assertEqual([text.strip().split("  ")[0] for text in rows], ["same bits", "gradients"])
        self.ends(longspan(0, "verify", "--families", "gradient"), USAGE, "did you mean gradients")


if __name__ == "__main__":
    unittest.main()
