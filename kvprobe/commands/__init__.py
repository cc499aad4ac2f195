"""The commands, one file each; `cli.py` finds them by name and imports one only when it is asked for."""
