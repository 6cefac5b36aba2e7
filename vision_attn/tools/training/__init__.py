"""Training and evaluation of image classifiers, with attention in them or not: a loop around libraries.

``settings`` says what a run does; ``run`` makes it: ``data``, ``network``, then the ``loop`` with its ``evaluation``,
which leave a ``folder``.
"""
