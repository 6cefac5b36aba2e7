"""Export of trained networks to other runtimes."""
