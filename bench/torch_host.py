"""PyTorch on processors: what a record says of it."""

import torch

import records


def math_library():
    """Of PyTorch's matrix products, as its own configuration names it, with the version."""
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    named = [line for line in lines
             if line.startswith(("Intel(R)", "OpenBLAS", "oneDNN"))]
    return "; ".join(named) or "not named"


def machine(command):
    """The processor and the versions of both sides, for the records."""
    return records.host_machine(command, pytorch=torch.__version__, pytorch_math=math_library(),
                                pytorch_simd=torch.backends.cpu.get_cpu_capability())
