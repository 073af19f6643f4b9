"""The conformance suite of engram-core: one command proves a backend right, from any folder, without files of its own.

``pytest --pyargs engram_conformance --engram-backend=NAME``. This module imports nothing: pytest loads the plugin of
every installed distribution at every start, in projects that have nothing to do with Engram.
"""
