"""`longspan run --backward`: gradients against float64 computed here, what it writes, and what it refuses."""

import json
import math
import unittest

import npy
from command import INPUT, OK, UNSUPPORTED, USAGE, CommandTest, longspan

TOKENS, KEYS, HEADS, KV_HEADS, DIM = 40, 60, 4, 2, 8
SHARDED = ("--shard-queries", "--shard", "zigzag")


class BackwardTest(CommandTest):
    def make(self, code="<f4", tokens=TOKENS, keys=KEYS, value_dim=DIM, seed=1):
        """The command line with files in and out."""
        self.shapes = {"q": (tokens, HEADS, DIM), "k": (keys, KV_HEADS, DIM), "v": (keys, KV_HEADS, value_dim),
                       "dout": (tokens, HEADS, value_dim), "dlse": (tokens, HEADS), "sinks": (HEADS,)}
        self.arrays = {}
        for i, (name, shape) in enumerate(self.shapes.items()):
            of = "<f4" if name in ("dlse", "sinks") else code
            self.arrays[name] = npy.draw(shape, seed + i, of)
            npy.save(self.path(f"{name}.npy"), shape, self.arrays[name], of)
        files = [word for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
                 for word in (f"--{name}", self.path(f"{name}.npy"))]
        return ["run", "--backward", "--iterations", 1, "--check", "all", *files]

    def given(self, *names):
        return [word for name in names for word in (f"--{name}", self.path(f"{name}.npy"))]

    def close(self, ranks, arguments, bound, code="<f4", names=(), **options):
        """Runs, and compares the files with float64."""
        self.ends(longspan(ranks, *arguments), OK)
        named = {name: self.arrays[name] for name in names}
        tokens, keys, value_dim = self.shapes["q"][0], self.shapes["k"][0], self.shapes["v"][2]
        exact = npy.gradients(*(self.arrays[name] for name in ("q", "k", "v", "dout")), tokens, keys, HEADS,
                              KV_HEADS, DIM, value_dim=value_dim, **named, **options)
        shapes = (*(self.shapes[name] for name in "qkv"), (HEADS,))
        for name, shape, wanted in zip(("dq", "dk", "dv", "dsinks"), shapes, exact):
            if name == "dsinks" and "sinks" not in names:
                continue
            found_code, found_shape, found = npy.load(self.path(f"{name}.npy"))
            self.assertEqual((found_code, found_shape), ("<f4" if name == "dsinks" else code, shape))
            norm = math.sqrt(math.fsum(x * x for x in wanted)) or 1.0
            error = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(found, wanted))) / norm
            self.assertLess(error, bound, (name, arguments))

    def test_fp32(self):
        arguments = self.make() + ["--causal"]
        for ranks in (0, 2, 3) if len(self.rank_counts) > 1 else (0,):
            with self.subTest(ranks=ranks):
                self.close(ranks, arguments, 2e-6, causal=True)
                self.close(ranks, [*arguments, *SHARDED], 2e-6, causal=True)

    def test_every_strategy_that_has_gradients(self):
        self.needs_mpi()
        arguments = self.make(seed=9) + ["--window", 30]
        done = longspan(2, *arguments, *SHARDED, "--explain")
        self.ends(done, OK)
        self.assertRegex(done.stdout, "predicted .* backward +received")
        table = done.stdout[done.stdout.index("# predicted"):done.stdout.index("# keys zigzag")].splitlines()[1:]
        serving = [text[2:].split()[0] for text in table if " no: " not in text]
        self.assertLessEqual({"ring-kv", "gather-kv", "ring-q", "heads", "gather-states", "scatter-states"},
                             set(serving))
        for strategy in serving:
            with self.subTest(strategy=strategy):
                self.close(2, [*arguments, *SHARDED, "--strategy", strategy], 2e-6, window=30)

    def test_sinks_dlse_and_scores(self):
        arguments = self.make(seed=21) + ["--dsinks", self.path("dsinks.npy")]
        for options, names, meaning in (
                ([], ("sinks",), {}),
                (["--causal"], ("sinks", "dlse"), {"causal": True}),
                (["--softcap", 2, "--scale", 0.5, "--alibi", "query"], ("sinks", "dlse"),
                 {"softcap": 2.0, "scale": 0.5, "alibi": "query"}),
                (["--documents", 0, 25, 60, "--left-padding", 3], ("sinks",),
                 {"documents": [0, 25, 60], "padding": 3})):
            with self.subTest(options=options):
                self.close(self.rank_counts[-1], [*arguments, *options, *self.given(*names)], 4e-6, names=names,
                           **meaning)

    def test_types_and_widths(self):
        for code, dtype, unit in (("<f2", "fp16", 2.0 ** -11), ("<V2", "bf16", 2.0 ** -8)):
            with self.subTest(dtype=dtype):
                arguments = self.make(code, value_dim=12, seed=31) + ["--dtype", dtype, "--causal"]
                self.close(self.rank_counts[-1], arguments, unit, code=code, causal=True)
                # The out that backward starts from is rounded.
                self.close(0, [*arguments, "--fp32-gradients"], unit / 2, causal=True)

    def test_nothing_to_see(self):
        for tokens, keys in ((0, 5), (5, 0), (9, 3)):
            with self.subTest(tokens=tokens, keys=keys):
                self.close(self.rank_counts[-1], self.make(tokens=tokens, keys=keys) + ["--causal"], 2e-6, causal=True)

    def test_nan_stays_where_it_is_seen(self):
        """In a row of q: its dq, and the keys that it sees. In keys that no row sees: nowhere."""
        arguments = self.make(seed=41) + ["--causal", "--window", 8]
        row, hidden = 5, KEYS - TOKENS - 7  # rows see keys from 13 on
        for name, numbers in (("q", [(row * HEADS + 1) * DIM]), ("k", range(hidden * KV_HEADS * DIM)),
                              ("v", range(hidden * KV_HEADS * DIM))):
            values = list(self.arrays[name])
            for i in numbers:
                values[i] = math.nan
            npy.save(self.path(f"{name}.npy"), self.shapes[name], values)
        self.ends(longspan(self.rank_counts[-1], *arguments), OK)
        dq, dk, dv = (npy.load(self.path(f"{name}.npy"))[2] for name in ("dq", "dk", "dv"))
        self.assertEqual({i // DIM for i, x in enumerate(dq) if math.isnan(x)}, {row * HEADS + 1})
        last = KEYS - TOKENS + row
        seen = {(key, 0) for key in range(last - 7, last + 1)}
        for found in (dk, dv):
            self.assertEqual({(i // DIM // KV_HEADS, i // DIM % KV_HEADS)
                              for i, x in enumerate(found) if math.isnan(x)}, seen)
            self.assertEqual(set(found[:hidden * KV_HEADS * DIM]), {0.0})

    def test_made_inputs_json_and_digest(self):
        arguments = ["run", "--backward", "--kv", 300, "--tokens", 100, "--heads", 4, "--kv-heads", 2, "--dim", 16,
                     "--causal", "--digest", "--check", "all", "--json", self.path("report.json")]
        digests = set()
        for extra in ([], [], ["--seed", 1]):
            done = longspan(self.rank_counts[-1], *arguments, *extra)
            self.ends(done, OK)
            report = json.loads(self.path("report.json").read_text())
            digests.add(report["digest"])
            self.assertEqual(len(report["backward"]["times_ms"]), 5)
            self.assertGreater(report["backward"]["time_ms"]["min"], 0)
            self.assertEqual((report["check"]["wrong"], report["case"]["backward"]), (0, True))
            for name in ("dq", "dk", "dv"):
                self.assertGreater(report["check"][name]["largest"], 0)
            self.assertRegex(done.stdout, "# backward: median [0-9.]+ ms")
        self.assertEqual(len(digests), 2)
        forward = [word for word in arguments if word != "--backward"]
        self.ends(longspan(0, *forward), OK)
        self.assertNotIn("backward", json.loads(self.path("report.json").read_text()))

    def test_refuses_by_name(self):
        arguments = self.make()
        npy.save(self.path("short.npy"), (TOKENS - 1, HEADS, DIM), self.arrays["dout"][HEADS * DIM:])
        npy.save(self.path("half.npy"), (TOKENS, HEADS, DIM), npy.draw((TOKENS, HEADS, DIM), 3, "<f2"), "<f2")
        inputs = ["run", "--backward", *self.given("q", "k", "v")]
        for given, status, words in (
                ([*inputs, "--dout", self.path("short.npy")], INPUT,
                 ["short.npy [39, 4, 8]", "gradient of the result has its shape, [40, 4, 8]"]),
                ([*inputs, "--dout", self.path("half.npy")], INPUT, ["is fp16", "must be equal"]),
                ([*inputs, "--dout", self.path("none.npy")], INPUT, ["none.npy", "cannot be opened"]),
                ([*inputs, "--dout", self.path("dout.npy"), "--dlse", self.path("sinks.npy")], INPUT,
                 ["--dlse", "shape [4]", "[40, 4] was expected"]),
                (inputs, USAGE, ["--backward", "needs --dout"]),
                ([*arguments, "--dsinks", self.path("dsinks.npy")], USAGE, ["--dsinks", "no sinks"]),
                (["run", "--dq", self.path("dq.npy")], USAGE, ["--dq needs --backward"]),
                (["run", "--backward", "--dout", self.path("dout.npy")], USAGE, ["--dout needs --q"]),
                ([*arguments, "--dv", self.path("no/dv.npy")], USAGE, ["--dv was given 2 times"]),
                ([*inputs, *self.given("dout"), "--dq", self.path("no/dq.npy")], INPUT, ["no/dq.npy"]),
                ([*inputs, *self.given("dout"), "--dq", self.path("q.npy")], USAGE, ["--dq", "--q"]),
                ([*inputs, *self.given("dout"), "--dq", self.path("x.npy"), "--dk", self.path("x.npy")], USAGE,
                 ["--dq", "--dk"]),
                (["run", "--backward", "--qkv-dtype", "e4m3"], UNSUPPORTED, ["gradients of e4m3 tensors"])):
            with self.subTest(given=given):
                self.path("dq.npy").unlink(missing_ok=True)
                self.ends(longspan(0, *given), status, *words)
                self.assertFalse(self.path("dq.npy").exists())

    def test_plan(self):
        path = self.path("plan.json")
        shape = ["plan", "--nodes", 2, "--ranks-per-node", 4, "--kv", 65536, "--causal", "--json", path]
        self.ends(longspan(0, *shape), OK)
        forward = {one["strategy"]: one for one in json.loads(path.read_text())["strategies"]}
        done = longspan(0, *shape, "--backward")
        self.ends(done, OK)
        self.assertRegex(done.stdout, "# ?strategy .* backward +received")
        served = [one for one in json.loads(path.read_text())["strategies"] if not one["refusal"]]
        self.assertLessEqual(6, len(served))
        for one in served:
            before = forward[one["strategy"]]
            self.assertAlmostEqual(one["seconds"],
                                   one["attend_s"] + one["exchange_s"] + one["merge_s"] + one["backward_s"])
            self.assertGreater(one["backward_s"], 2 * before["attend_s"])
            self.assertGreater(one["memory_bytes"], before["memory_bytes"])
            self.assertGreater(one["backward_received_bytes"], 0)
            self.assertLessEqual(one["efficiency"], 1)


if __name__ == "__main__":
    unittest.main()
