"""Wrong backends: single-fault mutants of the reference, to show that the conformance suite catches them.

A suite that every backend passes proves nothing. Each mutant is data (:class:`mutants.model.Mutant`): one line of the
reference backend, or of the core's definitions that it inherits, and what stands there instead. Faults of what the
reference has not (a cache of hot rows, streams) are run on the NVIDIA backend, interpreted or on a GPU.
"""

from mutants.checkout import importable

importable()
