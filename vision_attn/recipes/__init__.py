"""Scripts that people run, read in one sitting, and copy: train, compare, demo, predict, export and explore.

They import public names only. No other package of the library imports this one; ``vision_attn.cli`` runs the scripts.
"""
