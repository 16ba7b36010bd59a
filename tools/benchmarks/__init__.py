"""Measure the main path on real processes; `make bench` runs all benchmarks."""
