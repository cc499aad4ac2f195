"""."""

ADAPTERS = ()
