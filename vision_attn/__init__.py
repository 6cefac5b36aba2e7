"""vision_attn: spatial multi-head attention for convolutional networks.

Axis names in einx and einsum expressions and in docstrings:

===  =====================================
b    batch
c    channels
h w  height and width of a feature map
n    heads (``h`` always means height)
m    key and value heads, if fewer than n
i    query token
j    key token
d    width of queries and keys in one head
e    width of values in one head
===  =====================================

Public names are imported on first use, so that importing the package is fast. ``__init__.pyi`` lists their modules. The
modules ``blocks``, ``convert``, ``errors`` and ``implementations`` contain the names that are used less often.
"""

from importlib.util import find_spec

import lazy_loader

from vision_attn.version import __version__ as __version__

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__ or name.startswith("_") or find_spec(f"vision_attn.{name}"):  # the import of a module asks first
        return _import_name(name)
    import difflib

    known = {public: f"va.{public}" for public in __all__}
    for module in ("blocks", "convert", "errors", "implementations"):
        known |= {public: f"va.{module}.{public}" for public in _import_name(module).__all__ if public not in known}
    known |= {"train": "vision_attn.recipes.train.train", "attention_figure": "AttentionMap.figure"}
    known |= {"MultiheadAttention": "va.Attention2d", "MHSA": "va.Attention2d", "visualize": "va.explore or va.capture"}
    known |= {"attention_maps": "va.capture", "add_attention": "va.insert_"}
    same = [public for public in known if public.lower().rstrip("_") == name.lower().rstrip("_")]
    close = same or [public for public in known if public.startswith(name)] or difflib.get_close_matches(name, known)
    close.sort(key=lambda public: known[public].count("."))  # names of va first
    suggestion = f" Did you mean {' or '.join(dict.fromkeys(known[public] for public in close[:3]))}?" if close else ""
    raise AttributeError(f"vision_attn has no attribute {name!r}.{suggestion}")
