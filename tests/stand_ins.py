"""Layers of optional libraries, some of which are slow to import."""

import warnings
from functools import partial
from pkgutil import resolve_name

import pytest


def layer_of(path, *given, **options):
    """Create a layer by its class path; the test is skipped if the library is not installed."""
    with warnings.catch_warnings(action="ignore"):  # warnings of other libraries during the import
        pytest.importorskip(path.partition(".")[0])
        return resolve_name(path)(*given, **options)


def transformers_layer(path, *given, config=None, attn_implementation="sdpa", **options):
    """Create a layer of transformers from a configuration, given its path in ``transformers.models``."""
    kind, transformers = path.rpartition(".")[2].removesuffix("Attention"), pytest.importorskip("transformers")
    maker = getattr(transformers, config or f"{kind}VisionConfig", None) or getattr(transformers, f"{kind}Config")
    return layer_of(f"transformers.models.{path}", maker(attn_implementation=attn_implementation, **options), *given)


diffusers_attention = partial(layer_of, "diffusers.models.attention_processor.Attention")
