"""`longspan verify` on several worlds."""

import unittest

from command import OK, CommandTest, longspan


class VerifyTest(CommandTest):
    def test_quick(self):
        for ranks in self.rank_counts[:1] + self.rank_counts[2:] + \
                ((3, 4, 7) if len(self.rank_counts) > 1 else ()):
            with self.subTest(ranks=ranks):
                done = longspan(ranks, "verify", "--quick", "--seed", ranks, timeout=500)
                self.ends(done, OK)
                rows = [text for text in done.stdout.splitlines() if not text.startswith("#")]
                self.assertEqual(len(rows), 14, done.stdout)
                self.assertTrue(all(text.endswith("pass") for text in rows), done.stdout)


if __name__ == "__main__":
    unittest.main()
