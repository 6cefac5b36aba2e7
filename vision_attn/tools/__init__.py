"""What is run around networks: training, comparison, export, benchmark, explorer and the command line.

Nothing below imports it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["training"])
