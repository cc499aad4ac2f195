"""What is measured: rings of calls, NVTX ranges, stacks, the GPU's counters; and what the CPU did meanwhile."""
