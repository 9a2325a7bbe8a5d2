"""Processes that are ranks, and wait for jobs: a job is a function of a module, called on every rank
with its communicator. They meet by from_exchange, over the pipes that deliver jobs."""

import multiprocessing
import traceback


class Ranks:
    def __init__(self, size, deadline=20.0):
        context = multiprocessing.get_context("spawn")
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, deadline), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, job, *args, each=None):
        """[what job(comm, *args) returned or raised, by rank]. `each`: [arguments of rank r]."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((job, args if each is None else (*each[rank], *args)))
        results = [None] * self.size
        waiting, gathered = set(range(self.size)), {}
        while waiting:
            ready = multiprocessing.connection.wait([self.pipes[r] for r in waiting], timeout=60)
            assert ready, f"ranks {sorted(waiting)} do not answer"
            for rank in sorted(waiting):
                if self.pipes[rank] not in ready:
                    continue
                try:
                    kind, value = self.pipes[rank].recv()
                except EOFError:
                    kind, value = "done", ("dead", None)
                if kind == "exchange":
                    gathered[rank] = value
                    if len(gathered) == self.size:
                        texts = [gathered[r] for r in range(self.size)]
                        gathered = {}
                        for pipe in self.pipes:
                            pipe.send(texts)
                    continue
                results[rank] = value
                waiting.discard(rank)
        return results

    def values(self, job, *args, each=None):
        """The same; an error on any rank fails the test."""
        results = self(job, *args, each=each)
        for rank, (kind, value) in enumerate(results):
            assert kind == "value", f"rank {rank}: {value}"
        return [value for _, value in results]

    def end(self):
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.join(20)
            assert process.exitcode is not None, "a rank does not end"
        return [process.exitcode for process in self.processes]


def _serve(pipe, rank, size, deadline):
    import longspan

    def exchange(mine):
        pipe.send(("exchange", mine))
        return pipe.recv()

    comm = None
    while (asked := pipe.recv()) is not None:
        job, args = asked
        try:
            if comm is None:
                comm = longspan.from_exchange(rank, size, exchange, deadline=deadline)
            pipe.send(("done", ("value", job(comm, *args))))
        except Exception as error:
            error.__notes__ = [traceback.format_exc()]
            pipe.send(("done", ("error", error)))
            if isinstance(error, (longspan.RankError, longspan.UsageError)):
                comm = None  # it has ended: the next job has a new one
