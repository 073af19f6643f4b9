"""Reference backend: pure torch, any device. Found through the entry point ``engram_reference.plugin``."""
