"""PyTorch on CPUs: its fields of a record."""

import torch

import records


def math_library():
    """The library of PyTorch's matrix products, as in PyTorch's configuration, with its version."""
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    named = [line for line in lines
             if line.startswith(("Intel(R)", "OpenBLAS", "oneDNN"))]
    return "; ".join(named) or "not named"


def machine(command):
    """The CPU and the versions of both sides, for the records."""
    return records.host_machine(command, pytorch=torch.__version__, pytorch_math=math_library(),
                                pytorch_simd=torch.backends.cpu.get_cpu_capability())
