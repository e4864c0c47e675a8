"""The version of this package and of the stores it writes, readable without importing anything else."""

__version__ = "0.1.0"

FORMAT = 1
"""The store format that this package writes, and the newest that it reads."""
