"""What is run around networks: training, comparison, export, benchmark, explorer and the command line.

Nothing below imports it.
"""
