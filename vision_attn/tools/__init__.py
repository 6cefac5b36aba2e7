"""Training, comparison and export of networks, the attention explorer and the command line.

No other package of the library imports this one.
"""
