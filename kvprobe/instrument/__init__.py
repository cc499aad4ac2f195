"""How kvprobe gets into a server: import hooks, the contract of adapters, the table of their states."""

from kvprobe.instrument.installation import Observation, activate, install, observe, plugin, table, uninstall

__all__ = ["Observation", "activate", "install", "observe", "plugin", "table", "uninstall"]
