"""Measurements, run by hand: `python -m benchmarks.<name>`. Each prints a table and writes JSON."""
