"""The test functions that execute cases; ``pytest --pyargs engram_conformance`` collects them."""
