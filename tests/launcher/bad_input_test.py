"""Bad input: one clear line, the right status on every rank count, and nothing written."""

import os
import socket
import subprocess
import unittest

import npy
from command import (INPUT, OK, UNSUPPORTED, USAGE, CommandTest, each_rank, environment, line,
                     longspan)

SHAPE = (40, 2, 16)


class BadInputTest(CommandTest):
    def setUp(self):
        super().setUp()
        for name in ("q", "k", "v"):
            npy.save(self.path(f"{name}.npy"), SHAPE, npy.draw(SHAPE, name))
        self.arguments = ["run", "--out", self.path("out.npy"), "--lse", self.path("lse.npy"),
                          "--json", self.path("report.json")]
        for name in ("q", "k", "v"):
            self.arguments += [f"--{name}", self.path(f"{name}.npy")]

    def refused(self, status, *words, arguments=None, extra=()):
        before = sorted(p.name for p in self.folder.iterdir())
        for ranks in self.rank_counts:
            with self.subTest(ranks=ranks):
                done = longspan(ranks, *(arguments or self.arguments), *extra)
                self.ends(done, status, *words)
                self.assertEqual(sorted(p.name for p in self.folder.iterdir()), before)

    def test_the_arguments_are_good(self):
        self.ends(longspan(0, *self.arguments), OK)

    def test_a_complaint_is_one_write(self):
        """Ranks share stderr, so that a line in two writes can be torn by another rank's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            for arguments in (["run", "--kv", "-1"], ["run", "--k", self.path("none.npy")]):
                done = subprocess.run(line(0, *arguments), env=environment(), stderr=theirs,
                                      stdout=subprocess.DEVNULL, timeout=60, check=False)
                self.assertNotEqual(done.returncode, OK)
                written = ours.recv(1 << 16)
                self.assertTrue(written.startswith(b"longspan: "), written)
                self.assertTrue(written.endswith(b"\n"), written)
                with self.assertRaises(BlockingIOError):
                    ours.recv(1, socket.MSG_DONTWAIT)

    def test_rope(self):
        for words, *extra in ((("rope.dim 18 with head_dim 16",), "--rope", 18),
                              (("rope.dim 7 with head_dim 16",), "--rope", 7),
                              (("rope.dim is 0",), "--rope-theta", 50),
                              (("rope.dim is 0",), "--rope-interleaved"),
                              (("--rope-theta",), "--rope", 8, "--rope-theta", "nan"),
                              (("--rope-scale",), "--rope", 8, "--rope-scale", 0)):
            self.refused(USAGE, *words, extra=extra)

    def test_documents_and_padding(self):
        self.refused(INPUT, "--documents 5 3", "ascend", extra=["--documents", 5, 3])
        self.refused(USAGE, "--documents", extra=["--documents", -1, 3])
        self.refused(INPUT, "--left-padding has 2 numbers", extra=["--left-padding", 0, 1])
        self.refused(INPUT, "--left-padding 41: sequence 0 has 40 keys", extra=["--left-padding", 41])

    def test_missing_file(self):
        self.path("k.npy").unlink()
        self.refused(INPUT, "k.npy", "cannot be opened")

    def test_folder_in_place_of_a_file(self):
        self.path("k.npy").unlink()
        self.path("k.npy").mkdir()
        self.refused(INPUT, "k.npy", "not a regular file")

    def test_truncated_data(self):
        raw = self.path("v.npy").read_bytes()
        self.path("v.npy").write_bytes(raw[:-4])
        self.refused(INPUT, "v.npy", "truncated", "[40, 2, 16]", 40 * 2 * 16 * 4 - 4)

    def test_truncated_header(self):
        raw = self.path("v.npy").read_bytes()
        for size in (3, 9, 40):
            self.path("v.npy").write_bytes(raw[:size])
            self.refused(INPUT, "v.npy")

    def test_empty_file(self):
        self.path("q.npy").write_bytes(b"")
        self.refused(INPUT, "q.npy", "empty")

    def test_not_npy(self):
        self.path("q.npy").write_text("these are not the queries")
        self.refused(INPUT, "q.npy", "not a .npy file")

    def test_impossible_shape(self):
        self.path("q.npy").write_bytes(npy.header("<f4", (2 ** 40, 2 ** 20, 2 ** 20)))
        self.refused(INPUT, "q.npy", "impossible shape")

    def test_fortran_order(self):
        npy.save(self.path("k.npy"), SHAPE, npy.draw(SHAPE, 1), fortran=True)
        self.refused(INPUT, "k.npy", "Fortran order")

    def test_other_types(self):
        for code in (">f4", "<f8", "<i4"):
            self.path("q.npy").write_bytes(npy.header(code, SHAPE) + bytes(40 * 2 * 16 * 8))
            self.refused(INPUT, "q.npy", code)

    def test_two_bytes_without_a_meaning(self):
        npy.save(self.path("q.npy"), SHAPE, npy.draw(SHAPE, 1), "<V2")
        self.refused(INPUT, "q.npy", "--dtype bf16")

    def test_other_dtype_than_asked(self):
        self.refused(INPUT, "q.npy", "fp32", "fp16", extra=["--dtype", "fp16"])

    def test_dtypes_differ(self):
        npy.save(self.path("k.npy"), SHAPE, npy.draw(SHAPE, 1), "<f2")
        self.refused(INPUT, "k.npy", "q.npy", "fp16", "fp32")

    def test_key_and_value_shapes_differ(self):
        npy.save(self.path("v.npy"), (39, 2, 16), npy.draw((39, 2, 16), 1))
        self.refused(INPUT, "k.npy [40, 2, 16]", "v.npy [39, 2, 16]")

    def test_dims_differ(self):
        for name in ("k", "v"):
            npy.save(self.path(f"{name}.npy"), (40, 2, 24), npy.draw((40, 2, 24), 1))
        self.refused(INPUT, "q.npy [40, 2, 16]", "k.npy [40, 2, 24]")

    def test_wrong_number_of_dimensions(self):
        npy.save(self.path("q.npy"), (80, 16), npy.draw((80, 16), 1))
        self.refused(INPUT, "q.npy", "[80, 16]", "[tokens, heads, dim]")

    def test_heads_not_a_multiple(self):
        npy.save(self.path("q.npy"), (4, 3, 16), npy.draw((4, 3, 16), 1))
        self.refused(INPUT, "3 heads", "2 kv heads")
        self.refused(USAGE, "heads 3", "kv_heads 2",
                     arguments=["run", "--heads", 3, "--kv-heads", 2, "--kv", 10])

    def test_head_dim(self):
        for dim in (577, 584):
            self.refused(UNSUPPORTED, f"head_dim {dim}", "1 to 576",
                         arguments=["run", "--dim", dim, "--kv", 10, "--tokens", 1])
        for dim in (513, 520):
            self.refused(UNSUPPORTED, f"value_dim {dim}", "1 to 512",
                         arguments=["run", "--value-dim", dim, "--kv", 10, "--tokens", 1])

    def test_sinks(self):
        npy.save(self.path("sinks.npy"), (3,), [0.0] * 3)
        self.refused(INPUT, "sinks.npy", "[3]", "[2]",
                     extra=["--sinks", self.path("sinks.npy")])

    def test_output_cannot_be_written(self):
        self.refused(INPUT, "no_such_folder/out.npy", "cannot be written",
                     arguments=self.instead_of("out.npy", self.path("no_such_folder/out.npy")))

    def instead_of(self, name, other):
        return [other if a == self.path(name) else a for a in self.arguments]

    def test_output_is_no_file(self):
        self.path("folder").mkdir()
        self.refused(INPUT, "folder", "cannot be written", "it is a folder",
                     arguments=self.instead_of("lse.npy", self.path("folder")))

    def test_backend_cuda_without_a_gpu(self):
        if "\nGPU 0 " in longspan(0, "info").stdout:
            self.skipTest("this machine has a GPU")
        self.refused(UNSUPPORTED, "--backend cuda", extra=["--backend", "cuda"])

    def test_unknown_strategy(self):
        self.refused(USAGE, "teleport", "gather-states", extra=["--strategy", "teleport"])

    def test_peer_buffers_on_cpu(self):
        """On one rank nothing travels; on more, CPUs have no peer buffers."""
        asked = ["--backend", "host", "--exchange", "peer-buffers"]
        self.ends(longspan(0, *self.arguments, *asked), OK)
        self.needs_mpi()
        self.path("out.npy").unlink()
        self.ends(longspan(2, *self.arguments, *asked), UNSUPPORTED, "peer-buffers", "gather", "host")
        self.assertFalse(self.path("out.npy").exists())
        self.ends(longspan(2, "verify", "--quick", *asked), UNSUPPORTED, "peer-buffers", "gather")

    def test_unknown_exchange(self):
        for command in ("run", "verify"):
            self.refused(USAGE, "--exchange", "pigeon",
                         arguments=[command, "--exchange", "pigeon"])

    def test_usage(self):
        for extra, word in ((["--no-such-option"], "--no-such-option"),
                            (["--check", "many"], "many"), (["--shard", "diagonal"], "diagonal"),
                            (["--shard", "interleaved:0"], "interleaved:0"),
                            (["--shard", "zigzag:64"], "zigzag:64"), (["--window", 0], "--window"),
                            (["--kv", 10], "--kv"), (["--deadline", -1], "--deadline"),
                            (["--dtype", "fp64"], "fp64"), (["--iterations", 0], "--iterations")):
            with self.subTest(extra=extra):
                self.refused(USAGE, word, extra=extra)

    def test_queries_without_keys(self):
        self.refused(USAGE, "--k", arguments=["run", "--q", self.path("q.npy")])

    def test_ranks_disagree(self):
        self.needs_mpi()
        base = ["run", "--kv", 100, "--tokens", 1]
        done = each_rank(base + ["--causal"], base)
        self.ends(done, USAGE, "--causal", "rank 1")
        done = each_rank(base + ["--seed", 1], base + ["--seed", 2])
        self.ends(done, USAGE, "--seed", "1", "2")
        done = each_rank(base, ["info"])
        self.ends(done, USAGE, "command", "run", "info")
        done = each_rank(base, base + ["--bogus"])
        self.ends(done, USAGE, "rank 1", "--bogus")

    def test_a_file_that_one_rank_lacks(self):
        self.needs_mpi()
        out = ["--out", "out.npy"]
        good, bad = self.path("good"), self.path("bad")
        for folder in (good, bad):
            folder.mkdir()
            for name in ("q", "k", "v"):
                if folder == good or name != "k":
                    os.symlink(self.path(f"{name}.npy"), folder / f"{name}.npy")
        files = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy"]
        done = each_rank(*[["run", *files, *out]] * 2, folders=[good, bad])
        self.ends(done, INPUT, "rank 1", "k.npy", "cannot be opened")
        self.assertFalse((good / "out.npy").exists())


if __name__ == "__main__":
    unittest.main()
