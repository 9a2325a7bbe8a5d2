"""Processes that are ranks of torch.distributed, and wait for jobs: a job is a function of a
module, called on the first ranks with the process group of these. Every wait has a deadline."""

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback

import device
import pytest

LIMIT = 150  # seconds of a job; the machine may be busy


class TorchRanks:
    def __init__(self, size, deadline=30.0):
        if size > device.most_ranks():
            pytest.skip(f"{size} GPUs are wanted")
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, self.folder.name, deadline),
                                      daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, count, job, *args):
        """[("value", what job(group, *args) returned) or ("error", what it raised), or ("dead", None)]
        of the first `count` ranks."""
        if count > device.most_ranks():
            pytest.skip(f"{count} GPUs are wanted")
        for pipe in self.pipes[:count]:
            pipe.send((count, job, args))
        results = [None] * count
        waiting, end = set(range(count)), time.monotonic() + LIMIT
        while waiting:
            ready = multiprocessing.connection.wait([self.pipes[r] for r in waiting],
                                                    timeout=max(0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise AssertionError(f"ranks {sorted(waiting)} do not answer within {LIMIT} s")
            for rank in sorted(waiting):
                if self.pipes[rank] not in ready:
                    continue
                try:
                    results[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = ("dead", None)
                waiting.discard(rank)
        return results

    def values(self, count, job, *args):
        """The same; an error on any rank fails the test."""
        results = self(count, job, *args)
        for rank, (kind, value) in enumerate(results):
            if kind == "error":
                raise AssertionError(f"rank {rank} of {count}: {value}") from value
            assert kind == "value", f"rank {rank} is {kind}"
        return [value for _, value in results]

    def kill(self):
        for process in self.processes:
            process.kill()

    def end(self):
        """Exit codes: the processes end by themselves, after any failure."""
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        end = time.monotonic() + 60
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        self.folder.cleanup()
        assert None not in codes, f"ranks do not end: {codes}"
        return codes


def _serve(pipe, rank, size, folder, deadline):
    os.environ |= {"LONGSPAN_THREADS": "1", "LONGSPAN_DEADLINE_S": str(deadline), "OMP_NUM_THREADS": "1",
                   "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    import torch
    import torch.distributed as dist

    from longspan.torch import _groups

    torch.set_num_threads(1)
    device.take_device(rank)
    dist.init_process_group(device.BACKEND, init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    groups = {n: dist.new_group(range(n)) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    while (asked := pipe.recv()) is not None:
        count, job, args = asked
        try:
            pipe.send(("value", job(groups[count], *args)))
        except BaseException as error:
            error.__notes__ = [traceback.format_exc()]
            try:
                pipe.send(("error", error))
            except Exception:  # it cannot be pickled
                pipe.send(("error", RuntimeError(traceback.format_exc())))
            for name in _groups._made.get(groups[count], {}).values():
                _groups.known(name).comm.close()  # it may have ended: the next job has a new one
