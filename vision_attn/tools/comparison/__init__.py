"""Comparison of networks with different blocks over several seeds, with confidence intervals."""
