"""Deliberate bugs, put into the code one at a time: each must be caught, or is explained. `make mutants` runs them."""
