"""Training and evaluation of image classifiers, with or without attention.

``settings`` describes a run, and ``run`` executes it: it opens the ``data``, builds the ``network``, and starts the
training ``loop`` with its ``evaluation``. The results are written to a ``folder``.
"""
