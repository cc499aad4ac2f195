"""A hot path that must stay one, as a test: pytest --kvprobe test_hot_path.py. No GPU is needed, torch's CPU build is.

What the block copies, allocates and waits for is looked at; a copy that holds it up fails the test with its line.
"""

import torch

GPU = torch.device("cuda", 0)


def load(cpu_blocks, gpu_blocks):
    """What is tested: every block goes to the GPU without the host waiting for it."""
    for cpu, gpu in zip(cpu_blocks, gpu_blocks, strict=True):
        gpu.copy_(cpu, non_blocking=True)


def test_loading_waits_for_nothing(kvprobe):
    """The pool is made before the hot path: pinning and allocating are slow."""
    cpu_blocks = [torch.full((4096,), float(n), pin_memory=True) for n in range(8)]
    gpu_blocks = [torch.empty(4096, device=GPU) for _ in range(8)]
    with kvprobe.hot_path():
        load(cpu_blocks, gpu_blocks)
    assert all(torch.equal(gpu.cpu(), cpu) for gpu, cpu in zip(gpu_blocks, cpu_blocks, strict=True))
