"""NVIDIA backend. Found through the entry point ``engram_nvidia.plugin``; imports nothing."""
