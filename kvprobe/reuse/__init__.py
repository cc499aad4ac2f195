"""How far apart the uses of a block are: LRU stack distances, exact or of a sample of blocks. It imports nothing."""
