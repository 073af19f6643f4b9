"""Kernels executed in Triton's interpreter: collected only where ``TRITON_INTERPRET=1`` is set.

Triton decides when a kernel is decorated, so ``test_kernel_processes.py`` runs this folder in a process of its own; by
hand it is ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

from __future__ import annotations

from engram_core._environ import interpreting

collect_ignore_glob = [] if interpreting() else ["*"]
