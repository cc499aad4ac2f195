"""What a project's own tests use: a gate that calls of the hot path must not break, and a GPU played on the CPU."""
