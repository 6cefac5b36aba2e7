"""Trained networks as files for other runtimes."""
