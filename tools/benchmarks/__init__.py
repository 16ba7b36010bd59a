"""benchmarks: figures of the main path, measured on real processes.  `make bench` runs them all."""
