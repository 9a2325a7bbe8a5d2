"""PyTorch on one GPU: times of its work, and what it moves at best."""

import statistics

import torch


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
