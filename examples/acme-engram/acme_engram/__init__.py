"""acme: Engram on CPUs with NumPy. Found through the entry point ``acme_engram.plugin``."""
