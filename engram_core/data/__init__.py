"""Shipped data: ``demo.txt``, our own words (CC0), with the cases, accents and scripts that a token map folds."""
