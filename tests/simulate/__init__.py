"""Random histories of the offload engine on the host runtime's virtual clock: `python -m tests.simulate SEED`."""
