"""Values of options: anything but a number, or a name, is refused at once in one line."""

import unittest

from command import OK, USAGE, CommandTest, longspan

BASE = ["--kv", 40, "--tokens", 2, "--heads", 2, "--dim", 16, "--iterations", 1, "--warmup", 0]
WHOLE = ["-1", "1.5", "1e3", "0x10", "nan", "inf", "", " ", "1 ", " 1", "1x", "x", "+1", "1,000",
         "99999999999999999999", "-99999999999999999999"]
FRACTIONS = ["nan", "-nan", "inf", "-inf", "infinity", "", " ", "1 ", "1x", "x", "1e999", "-1e999",
             "0x1p3", "9" * 400]


class NumbersTest(CommandTest):
    def refused(self, command, option, value, *extra):
        with self.subTest(command=command, option=option, value=value[:30]):
            done = longspan(0, *command, *extra, option, value)
            self.ends(done, USAGE, option)
            self.assertLess(len(done.stderr), 400)
            self.assertEqual(done.stdout, "")

    def test_whole_numbers_of_run(self):
        for option in ("--kv", "--tokens", "--batch", "--heads", "--kv-heads", "--dim", "--window",
                       "--right", "--iterations", "--warmup", "--threads", "--seed", "--lengths"):
            for value in WHOLE:
                self.refused(["run"], option, value)
        for value in WHOLE:
            self.refused(["run"], "--check", value)

    def test_fractions_of_run(self):
        for option in ("--scale", "--softcap", "--deadline"):
            for value in FRACTIONS:
                self.refused(["run"], option, value)
        for value in ("1e39", "-1e39", "1e-60"):  # an fp32 would be infinite, or 0
            self.refused(["run"], "--scale", value)
        for value in ("0", "-1", "-0", "1e39", "1e-60"):
            self.refused(["run"], "--softcap", value)
        for value in ("0", "-1", "1e-9", "1e9"):
            self.refused(["run"], "--deadline", value)

    def test_other_commands(self):
        for option in ("--seed", "--threads"):
            for value in ("-1", "x", "18446744073709551616", ""):
                self.refused(["verify"], option, value)
        for option in ("--kv", "--batch", "--tokens", "--heads", "--kv-heads", "--dim", "--page",
                       "--layers", "--iterations", "--warmup", "--check"):
            for value in ("-1", "1.5", "nan", "", "1x", "99999999999999999999"):
                self.refused(["bench", "decode"], option, value)
        for value in FRACTIONS + ["0", "-1"]:
            self.refused(["bench", "decode"], "--memory", value)

    def test_blocks(self):
        for block in ("0", "-1", "99999999999999999999", "2147483648", "", "x", "1x", "nan", "1e3"):
            self.refused(["run"], "--shard", f"interleaved:{block}")
            self.refused(["bench", "decode"], "--shard", f"interleaved:{block}")

    def test_bounds_that_hold(self):
        for extra in (["--seed", 2 ** 64 - 1], ["--scale", "1e-3"], ["--scale", "-2"],
                      ["--scale", 0], ["--softcap", "1e-3"], ["--shard", "interleaved:2147483647"],
                      ["--kv", "040"], ["--check", "off"], ["--check", "all"], ["--deadline", 0.5]):
            with self.subTest(extra=extra):
                arguments = BASE[2:] if extra[0] == "--kv" else BASE
                done = longspan(0, "run", *arguments, *extra)
                self.ends(done, OK)
                rows = [text for text in done.stdout.splitlines() if not text.startswith("#")]
                self.assertEqual(rows[0].split()[1], "40")  # 040 is not a number in base 8

    def test_empty_names(self):
        files = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy"]
        for option in ("--q", "--k", "--v", "--sinks", "--out", "--lse", "--json"):
            for spelled in ([option, ""], [option + "="]):
                with self.subTest(spelled=spelled):
                    others = [word for pair in zip(files[::2], files[1::2]) if pair[0] != option
                              for word in pair]
                    self.ends(longspan(0, "run", *others, *spelled), USAGE, option, "variable")
        for spelled in (["--json", ""], ["--json="]):
            self.ends(longspan(0, "bench", "decode", *spelled), USAGE, "--json", "variable")

    def test_empty_words(self):
        for option in ("--dtype", "--qkv-dtype", "--alibi", "--shard", "--check", "--backend",
                       "--exchange", "--strategy"):
            with self.subTest(option=option):
                done = longspan(0, "run", *BASE, option, "")
                self.assertIn(done.returncode, (USAGE, 4), done.stderr)

    def test_too_much_memory(self):
        """Refused with a figure before anything is allocated, on every number of ranks."""
        most = 2 ** 31 - 1
        for extra in (["--batch", most], ["--tokens", most], ["--kv", most],
                      ["--heads", 65536, "--dim", 256, "--tokens", 100000],
                      ["--batch", 65535, "--tokens", 32768], ["--tokens", most, "--shard-queries"],
                      ["--kv", most, "--heads", 65536, "--dim", 256]):
            for ranks in self.rank_counts:
                with self.subTest(extra=extra, ranks=ranks):
                    done = longspan(ranks, "run", *extra, "--out", self.path("out.npy"), timeout=60)
                    self.assertIn(done.returncode, (USAGE, 3), done.stderr)
                    self.ends(done, done.returncode)
                    if done.returncode == USAGE:
                        self.assertRegex(done.stderr, r"takes? [0-9.e+]+ GiB of memory.*"
                                                      r"[0-9.e+]+ GiB are available")
                    else:  # more rows than a batch can have at all
                        self.assertIn("2^31 - 1", done.stderr)
                    self.assertFalse(self.path("out.npy").exists())
        done = longspan(0, "bench", "decode", "--kv", 1 << 30, "--heads", 65536, "--kv-heads",
                        65536, "--batch", 65536)
        self.ends(done, USAGE, "GiB of memory", "caches")


if __name__ == "__main__":
    unittest.main()
