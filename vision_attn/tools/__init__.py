"""What is run around networks: training, comparison, export, explorer and the command line.

Nothing below imports it.
"""
