"""Tests that execute the kernels in Triton's interpreter: collected only where ``TRITON_INTERPRET=1`` is set.

Triton decides when a kernel is decorated, so one process can't do both. ``test_rocm_processes.py`` runs this folder in
a process of its own; by hand it is ``TRITON_INTERPRET=1 pytest tests/rocm/interpreted``.
"""

from __future__ import annotations

from engram_core._environ import interpreting

collect_ignore_glob = [] if interpreting() else ["*"]
