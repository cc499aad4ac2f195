"""How large the CPU pool should be, from one recording: what each size would find, move and save."""
