"""AMD ROCm backend. Found through the entry point ``engram_rocm.plugin``; imports nothing."""
