"""The benchmark scripts from end to end on small problems, with invented peers where a GPU and
PyTorch would be needed."""

import contextlib
import io
import json
import pathlib
import sys
import unittest
from unittest import mock

from command import COMMAND, MPIEXEC, CommandTest, environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import context_parallel  # noqa: E402
import context_parallel_vs_gloo  # noqa: E402
import context_parallel_vs_torch  # noqa: E402
import host_serving  # noqa: E402
import prefill_features  # noqa: E402
import prefill_runs  # noqa: E402
import prefill_fp8  # noqa: E402
import prefill_vs_torch  # noqa: E402
import records  # noqa: E402
import seeds_vs_longspan  # noqa: E402
import serving_command  # noqa: E402


def start(module, *arguments):
    """The script's main, in this process; returns its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), \
            mock.patch.object(sys, "argv", [module.__name__, *map(str, arguments)]), \
            mock.patch.dict("os.environ", environment()):
        module.main()
    return output.getvalue()


class PrefillTest(CommandTest):
    def test_table_of_ratios_and_targets(self):
        with mock.patch.object(prefill_vs_torch, "peer_us", lambda *_: {"cuDNN": 1000.0}):
            start(prefill_vs_torch, "--command", COMMAND, "--machine", "try", "--backend", "host",
                  "--shrink", 256, "--dim", 128, "--rounds", 2, "--results", self.folder)
        rows = records.read(self.path("prefill-try.jsonl"))
        self.assertEqual(len([r for r in rows if r["peer"] == "cuDNN"]), 12)  # 6 shapes, 2 masks
        self.assertEqual({r["case"]["kv_heads"] for r in rows if "equal" in r["peer"]}, {8})
        self.assertTrue(all(r["target"] is not None for r in rows
                            if r["peer"] == "cuDNN" and r["case"]["heads"] == r["case"]["kv_heads"]))

    def test_heads_of_two_widths(self):
        with mock.patch.object(prefill_vs_torch, "peer_us", lambda *_: {"cuDNN": 1000.0}):
            start(prefill_vs_torch, "--command", COMMAND, "--machine", "try", "--backend", "host",
                  "--shrink", 512, "--only-two-widths", "--rounds", 1, "--results", self.folder)
        rows = records.read(self.path("mla_prefill-try.jsonl"))
        self.assertEqual({(r["case"]["dim"], r["case"]["value_dim"]) for r in rows},
                         {(192, 128), (96, 64)})
        self.assertEqual([r["target"] for r in rows], [1.05] * 10)

    def test_targets(self):
        self.assertEqual([prefill_vs_torch.target(*case) for case in
                          ((128, 4096, False), (64, 4096, True), (128, 65536, True),
                           (256, 16384, False), (256, 16384, True))],
                         [1.0, 1.05, 1.02, 0.95, 1.0])


class ContextParallelTest(CommandTest):
    def test_beside_invented_peers(self):
        self.needs_mpi()

        def peers(bench, args):
            shape = {"heads": 8, "kv_heads": 2, "alone": 8.0}
            return [shape | {"tokens": tokens, "name": "other", "ms": 5.0} for tokens in args.tokens] + [
                shape | {"tokens": 256, "name": "none", "refused": "NotImplementedError: no kernel"}]

        host = mock.Mock(machine=lambda command: {"cpu": "a cpu", "pytorch": "2", "pytorch_simd": "AVX9"})
        with mock.patch.object(context_parallel, "run_peer", peers), mock.patch.dict(sys.modules, torch_host=host):
            output = start(context_parallel_vs_gloo, "--command", COMMAND, "--launcher", MPIEXEC + " -n {ranks}",
                         "--tokens", 256, 512, "--heads", "8/2", "--rounds", 2, "--iterations", 1, "--strategies",
                         "ring-kv", "heads", "--machine", "try", "--results", self.folder)
        self.assertIn("# none refuses 8/2, 256 tokens: NotImplementedError: no kernel", output)
        self.assertIn("efficiency  0.800   (one thread: 8.000 ms)", output)
        rows = records.read(self.path("context_parallel-try.jsonl"))
        self.assertEqual({r["machine"]["cpu"] for r in rows}, {"a cpu"})
        for tokens in (256, 512):
            mine = [r for r in rows if r["case"]["tokens"] == tokens]
            times = {r["case"]["strategy"]: r["ours"] for r in mine if r["metric"] == "ms" and not r["peer"]}
            self.assertEqual(set(times), {"ring-kv", "heads"})
            peer, = [r for r in mine if r["peer"]]
            best = min(times, key=times.get)
            self.assertEqual((peer["peer"], peer["case"]["strategy"], peer["ours"]), ("other", best, times[best]))
            self.assertAlmostEqual(peer["ratio"] * times[best], 5.0, delta=0.01)

    def test_figures_of_rounds(self):
        def row(ranks, strategy, ms, no=""):
            return {"kv_len": 8192, "ranks": ranks, "strategy": strategy, "no": no, "time_ms": {"median": ms},
                    "workspace_bytes": 1 << 24, "peer_bytes": 1 << 24}  # a block; q, k, v and out are two

        ours = [[row(1, "gather-states", one), row(2, "ring-kv", two), row(2, "heads", 9.0), row(2, "ring-q", 0, "no")]
                for one, two in ((10.0, 6.0), (30.0, 7.0), (20.0, 80.0))]
        peers = [[{"heads": 16, "kv_heads": 16, "tokens": tokens, "name": "other", "alone": 1.0, "ms": ms}
                  for tokens in (8192, 4096)] for ms in (14.0, 1.0, 21.0)]
        args = mock.Mock(tokens=[8192], ranks=2)
        with contextlib.redirect_stdout(io.StringIO()):
            found = context_parallel.judge(context_parallel_vs_torch.BENCH, args, "16/16", ours, peers)
        self.assertEqual([(r["case"]["strategy"], r["metric"], r["ours"], r["peer_value"], r["ratio"], r["target"])
                          for r in found],
                         [("ring-kv", "efficiency", 1.429, None, None, 0.85), ("ring-kv", "ms", 7.0, None, None, None),
                          ("ring-kv", "memory", 0.75, None, None, None),
                          ("heads", "efficiency", 1.111, None, None, None), ("heads", "ms", 9.0, None, None, None),
                          ("heads", "memory", 0.75, None, None, None),
                          ("ring-kv", "ms", 7.0, 14.0, 2.0, None)])

    def test_memory_of_long_sequences(self):
        tokens = 1 << 20
        block = 2 * 2 * 128 * tokens // 2 * 8  # k and v of a rank, as are q and out
        row = {"kv_len": tokens, "ranks": 2, "strategy": "ring-kv", "no": "", "time_ms": {"median": 1.0}}
        ours = [[row | {"ranks": 1, "workspace_bytes": 0, "peer_bytes": 0},
                 row | {"workspace_bytes": 2 * block, "peer_bytes": 1 * block}]]
        args = mock.Mock(tokens=[tokens], ranks=2)
        with contextlib.redirect_stdout(io.StringIO()):
            found = context_parallel.judge(context_parallel_vs_torch.BENCH, args, "8/8", ours, [])
        memory = [(r["ours"], r["target"], r["met"]) for r in found if r["metric"] == "memory"]
        self.assertEqual(memory, [(1.25, 1.2, False)])


class FeaturesTest(CommandTest):
    def test_beside_itself(self):
        start(prefill_features, "--command", COMMAND, "--machine", "try", "--backend", "host",
              "--shrink", 256, "--rounds", 1, "--results", self.folder)
        rows = records.read(self.path("features-try.jsonl"))
        self.assertEqual(len(rows), 17)
        self.assertEqual({r["peer"] for r in rows}, {"longspan, plain", "longspan, all keys",
                                                     "longspan, equal lengths"})
        self.assertEqual(sorted({r["target"] for r in rows} - {None}), [0.8, 0.85, 0.9])
        self.assertEqual({r["case"]["softcap"] for r in rows if r["target"] is None}, {2, 50})

    def test_work(self):
        for window in (0, 1, 7, 20, 30):
            self.assertEqual(prefill_runs.visible_pairs(20, True, window),
                             sum(min(i + 1, window or 20) for i in range(20)))
        lengths = prefill_features.uneven(16384)
        self.assertEqual((len(lengths), min(lengths), max(lengths)), (16, 1, 16384))
        work = sum(n * n for n in lengths)
        self.assertLess(abs(sum(n * n for n in prefill_features.equal(lengths)) / work - 1), 0.001)


class Fp8Test(CommandTest):
    def test_beside_bf16(self):
        start(prefill_fp8, "--command", COMMAND, "--machine", "try", "--backend", "host",
              "--shrink", 256, "--rounds", 1, "--no-accuracy", "--results", self.folder)
        rows = records.read(self.path("fp8-try.jsonl"))
        self.assertEqual(len(rows), 8)
        self.assertEqual({(r["target"], r["peer"]) for r in rows}, {(1.3, "longspan, bf16")})
        self.assertEqual({r["case"]["qkv_dtype"] for r in rows}, {"e4m3"})
        self.assertEqual({r["case"]["fp8_products"] for r in rows}, {False})  # not on CPUs


def attention(section, heads, kv_heads, batch, tokens, kv_len, us, **more):
    """The output of bench_serving for a case."""
    return {"section": section, "heads": heads, "kv_heads": kv_heads, "dim": 128, "dtype": "bf16",
            "kv_dtype": "bf16", "batch": batch, "tokens": tokens, "kv_len": kv_len, "page": 16,
            "layout": "rows", "table": "permuted", "window": 0, "us": us, "min_us": us,
            "right": True} | more


class SeedsTest(CommandTest):
    """Invented figures of both sides, and the resulting records."""

    SEEDS = [
        {"kind": "A", "D": 128, "dtype": "bf16", "T": 4096, "H": 32, "ok": True, "graph_us": 80.0,
         "bytes": 100e6},
        {"kind": "A", "D": 128, "dtype": "bf16", "T": 256, "H": 16, "ok": True, "graph_us": 3.7,
         "bytes": 3e6},
        *({"kind": "B", "Hq": 32, "Hkv": 8, "batch": 1, "ctx": 131072, "tile": tile, "segs": segs,
           "ok": ok, "both_us": us} for tile, segs, us, ok in
          ((16, 16, 600.0, True), (32, 64, 140.0, True), (64, 64, 1.0, False))),
        {"kind": "Bcudnn", "Hq": 32, "Hkv": 8, "batch": 1, "ctx": 131072, "ok": True,
         "best_us": 127.0},
        {"kind": "C", "q": 512, "ctx": 8192, "seqs": 1, "key": "seed", "ok": True, "tflops": 63.0},
        {"kind": "C", "q": 512, "ctx": 8192, "seqs": 1, "key": "cudnnfull", "ok": None,
         "tflops": 526.0},
        {"kind": "skip", "label": "a case without time"}]

    def test_records(self):
        seeds = self.path("seeds_triton.jsonl")
        seeds.write_text("".join(json.dumps(r) + "\n" for r in self.SEEDS))
        merges = {"section": "merge", "dtype": "bf16", "dim": 128, "right": True}
        runs = iter([
            [{"section": "copy", "us": 1.0, "tb_s": 4.0},
             merges | {"tokens": 4096, "heads": 32, "us": 25.0, "tb_s": 4.0},
             merges | {"tokens": 256, "heads": 16, "us": 2.0, "tb_s": 1.5},
             attention("decode", 32, 8, 1, 1, 131072, 140.0, bytes=560e6, tb_s=4.0)],
            [attention("chunked", 32, 8, 1, 512, 8704, 10.0, tflop_s=210.0)],
            [{"section": "copy", "us": 1.0, "tb_s": 4.0},
             merges | {"tokens": 4096, "heads": 32, "us": 35.0, "tb_s": 100 / 35},
             merges | {"tokens": 256, "heads": 16, "us": 2.2, "tb_s": 1.4},
             attention("decode", 32, 8, 1, 1, 131072, 140.0, bytes=560e6, tb_s=4.0)],
            [attention("chunked", 32, 8, 1, 512, 8704, 10.0, tflop_s=210.0)]])
        with mock.patch.object(serving_command, "run", lambda *_: next(runs)):
            start(seeds_vs_longspan, "--program", "none", "--machine", "try", "--seeds", seeds,
                  "--results", self.folder)

        def found(bench):
            rows = records.read(self.path(f"{bench}-try.jsonl"))
            return {(r["case"]["tokens"], r["metric"], r["peer"]):
                    (r["ratio"] or r["ours"], r["target"], r["met"]) for r in rows}

        self.assertEqual(found("merge"), {
            (4096, "TB/s", "copy"): (0.833, 0.85, False),  # 25 and 35 us: 3.33 of 4 TB/s
            (4096, "TB/s", "seed (as shipped)"): (2.667, None, None),
            (256, "us", None): (2.1, 2.5, True),
            (256, "TB/s", "seed (as shipped)"): (1.762, None, None)})
        self.assertEqual(found("seeds"), {
            (1, "TB/s", "seed (as shipped)"): (4.286, 1.5, True),
            (1, "TB/s", "seed (best)"): (1.0, 1.0, True),  # the wrong variant does not count
            (1, "TB/s", "cuDNN"): (0.907, None, None)})
        self.assertEqual(found("chunked"), {
            (512, "TFLOP/s", None): (210.0, 200, True),
            (512, "TFLOP/s", "seed (as shipped)"): (3.333, None, None)})

    def test_wrong_results_leave_no_record(self):
        lines = [attention("decode", 32, 8, 1, 1, 64, 1.0, tb_s=1.0) | {"right": right}
                 for right in (True, False)] + [{"section": "merge", "error": "unsupported"}]
        program = self.path("program")
        program.write_text("#!/bin/sh\ncat <<END\n" +
                           "".join(json.dumps(line) + "\n" for line in lines) + "END\nexit 5\n")
        program.chmod(0o755)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            self.assertEqual(serving_command.run(str(program)), lines[:1])
        self.assertEqual(output.getvalue().count("NOT RIGHT"), 2)

    def test_host_ratio(self):
        line = attention("plain decode", 32, 8, 1, 1, 32768, 11.0) | {
            "min_us": 10.0, "plain_min_us": 9.0}
        with mock.patch.object(serving_command, "run", lambda *_: [line]):
            start(host_serving, "--program", "none", "--machine", "try", "--results", self.folder)
        (r,) = records.read(self.path("seeds-try.jsonl"))
        self.assertEqual((r["ratio"], r["target"], r["met"]), (0.9, 0.8, True))


if __name__ == "__main__":
    unittest.main()
