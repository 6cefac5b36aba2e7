"""Layers of libraries that are slow to import, or that are not on every machine."""

import warnings
from functools import partial
from pkgutil import resolve_name

import pytest


def layer_of(path, *given, **options):
    """A layer by the path of its class; a test of it is skipped where its library is missing."""
    with warnings.catch_warnings(action="ignore"):  # of other libraries while they are imported
        pytest.importorskip(path.partition(".")[0])
        return resolve_name(path)(*given, **options)


def transformers_layer(path, *given, config=None, attn_implementation="sdpa", **options):
    """A layer of transformers by its path below ``models``, which is made of a configuration."""
    kind = path.rpartition(".")[2].removesuffix("Attention")
    transformers = pytest.importorskip("transformers")
    maker = getattr(transformers, config or f"{kind}VisionConfig", None) or getattr(transformers, f"{kind}Config")
    return layer_of(f"transformers.models.{path}", maker(attn_implementation=attn_implementation, **options), *given)


diffusers_attention = partial(layer_of, "diffusers.models.attention_processor.Attention")
