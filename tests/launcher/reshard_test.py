"""`longspan reshard`: the moves, that every byte is right, and what it refuses."""

import json
import unittest

from command import OK, USAGE, CommandTest, longspan

SMALL = ("--kv", 700, "--kv-heads", 2, "--dim", 8, "--iterations", 2, "--threads", 1)
ROW = 2 * (8 + 8) * 2  # bytes of a key and its value in bf16


class ReshardTest(CommandTest):
    def reshard(self, ranks, *options):
        record = self.path("reshard.json")
        done = longspan(ranks, "reshard", *options, "--json", record)
        self.ends(done, OK)
        self.assertIn("every byte right", done.stdout)
        found = json.loads(record.read_text())
        self.assertEqual(found["wrong_rows"], 0)
        self.assertEqual(len(found["traffic"]), max(ranks, 1))
        sent, received = (sum(t[name] for t in found["traffic"]) for name in ("sent", "received"))
        self.assertEqual(sent, received)
        self.assertEqual(found["moved_bytes"], received)
        self.assertGreater(found["time_ms"]["median"], 0)
        return found

    def test_every_layout_in_pages_and_without(self):
        for ranks in self.rank_counts:
            for old, new in (("contiguous", "zigzag"), ("zigzag", "striped"), ("striped", "interleaved:16"),
                             ("interleaved", "contiguous")):
                found = self.reshard(ranks, "--from", old, "--to", new, "--to-page", 16, *SMALL)
                moved = sum(t["received"] + t["kept"] for t in found["traffic"])
                self.assertEqual(moved, 700 * ROW)

    def test_the_same_layout_keeps_every_key(self):
        for ranks in self.rank_counts:
            found = self.reshard(ranks, "--from", "zigzag", "--from-page", 7, "--to", "zigzag", *SMALL)
            self.assertEqual(found["moved_bytes"], 0)
            self.assertEqual(found["gb_per_s"], 0)

    def test_from_one_rank_to_another(self):
        self.needs_mpi()
        found = self.reshard(3, "--from", "interleaved:32", "--from-ranks", 2, "--to-first", 2, "--to-page", 16,
                             "--lengths", 300, 0, 45, *SMALL[2:])
        self.assertEqual([t["received"] for t in found["traffic"]], [0, 0, 345 * ROW])
        self.assertEqual(sum(t["sent"] for t in found["traffic"][:2]), 345 * ROW)

    def test_types_and_latent_keys(self):
        for ranks in self.rank_counts:
            for dtype in ("fp32", "fp16", "e4m3", "e5m2"):
                self.reshard(ranks, "--to", "striped", "--dtype", dtype, "--value-dim", 5, "--batch", 2, *SMALL)
            found = self.reshard(ranks, "--to", "striped", "--value-dim", 0, *SMALL)
            self.assertEqual(sum(t["received"] + t["kept"] for t in found["traffic"]), 700 * ROW // 2)

    def test_what_makes_no_sense(self):
        for ranks in self.rank_counts:
            for options, words in ((("--from", "diagonal"), "diagonal"), (("--to", "zigzag:4"), "zigzag:4"),
                                   (("--to-ranks", 9), "--to-ranks 9"), (("--from-first", 8), "--from-first 8"),
                                   (("--dim", 0), "from 1 to"), (("--dtype", "int8"), "int8"),
                                   (("--kv", 2000000000, "--batch", 1000), "GiB")):
                self.ends(longspan(ranks, "reshard", *options), USAGE, words)


if __name__ == "__main__":
    unittest.main()
