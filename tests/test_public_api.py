"""The docstring of each public name has its arguments, its errors and an example that runs."""

import inspect
import pickle

import vision_attn
from vision_attn import errors
from vision_attn.networks import convert, figures
from vision_attn.networks.convert import equations

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (vision_attn, convert, equations, figures)
    for name in module.__all__
}


def undocumented(thing):
    """Return the arguments that the docstring of a function or class lacks, and the example."""
    doc = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return [] if doc else ["a docstring"]
    # A docstring may refer to another one: "Arguments and errors are those of :class:`Attention2d`."
    elsewhere = "are those of" in doc or "Attributes" in doc or hasattr(thing, "__dataclass_fields__")
    parameters = [] if elsewhere else [name for name in inspect.signature(thing).parameters if not name.startswith("_")]
    missing = [name for name in parameters if f"{name}: " not in doc]
    return missing if ">>>" in doc else [*missing, "an example"]


def test_public_names_are_documented_with_an_example():
    things = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    assert {name: parts for name, thing in things.items() if (parts := undocumented(thing))} == {}
    assert undocumented(lambda x, y: None) == ["x", "y", "an example"]


def test_errors_have_one_base_and_survive_a_pickle():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)} - {errors.Interrupted}
    assert all(issubclass(kind, errors.VisionAttnError) for kind in kinds)
    made = [errors.Interrupted(2, "saved"), *(kind("first", "second") for kind in kinds - {errors.VisionAttnError})]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
