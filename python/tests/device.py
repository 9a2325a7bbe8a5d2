"""Where tensors of PyTorch lie in the tests: LONGSPAN_TEST_DEVICE, "cpu" or "cuda". On GPUs every rank has its own, the
ranks are those of NCCL, and a test of more ranks than GPUs is skipped. On CPUs no process of the tests sees a GPU:
longspan would compute there, while the tensors are elsewhere."""

import os

DEVICE = os.environ.get("LONGSPAN_TEST_DEVICE", "cpu")
# Several processes of tests share a GPU, and JAX would take three quarters of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
BACKEND = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"


def most_ranks():
    if DEVICE == "cpu":
        return 4
    import torch

    return min(4, torch.cuda.device_count())


def tensor(values):
    """A tensor there from an array of NumPy."""
    import torch

    return torch.from_numpy(values).to(DEVICE)


def take_device(rank=0):
    """From now on torch creates tensors on this rank's device by default."""
    if DEVICE == "cpu":
        return
    import torch

    torch.cuda.set_device(rank)
    torch.set_default_device(f"{DEVICE}:{rank}")
