"""The folder of a run: what lies in it, who may read it, one function that writes and one that reads each file."""
