"""."""
ADAPTERS = ()
