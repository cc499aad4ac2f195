"""What is carried into a Python of another environment; nothing here imports the rest of kvprobe."""
