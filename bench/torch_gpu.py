"""PyTorch on GPUs: times of its work, a GPU's best bandwidth, and ranks of torchrun."""

import os
import statistics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def elapsed_us(work, repeat):
    """Median time of one call, by events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def join():
    """(this rank's GPU, the mesh of all ranks), under torchrun."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device, init_device_mesh("cuda", (dist.get_world_size(),))


def leave():
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def slowest_ms(work, warmup, iterations):
    """(the median of a call on the slowest rank, the last call's result). Collective."""
    for _ in range(warmup):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    times = []
    for _ in range(iterations):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        out = work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return of_slowest(statistics.median(times)), out


def of_slowest(ms):
    """The largest of the ranks' values. Collective."""
    slowest = torch.tensor(ms, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def slowest_replay_ms(work, warmup, iterations):
    """The median of a replay on the slowest rank, where replays are queued back to back. Collective."""
    replay = captured(lambda _: work(), 1)
    replay()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [torch.cuda.Event(True) for _ in range(warmup + iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        replay()
        mark.record()
    torch.cuda.synchronize()
    return of_slowest(statistics.median(a.elapsed_time(b) for a, b in zip(marks[warmup:], marks[warmup + 1:])))


def pytorch_context_parallel():
    """PyTorch's module of context parallelism, at its place in this version."""
    try:
        import torch.distributed.tensor.experimental._context_parallel._attention as module
    except ImportError:
        import torch.distributed.tensor.experimental._attention as module
    return module


def captured(work, calls):
    """work(i) for each call as a graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)
    return graph.replay


def copy_bandwidth():
    """TB/s read and written by a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / elapsed_us(lambda: target.copy_(source), 9) / 1e6


def read_ceiling():
    """TB/s of a sum over 4 GiB."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return 4 * source.numel() / elapsed_us(lambda: source.sum(), 15) / 1e6
