"""The worker process: all its runs, in one event loop.  Read executor.py first."""
