"""One model of a recording, readers that fill it, writers that pass it on."""
