"""What users import is documented where they read it: purpose, arguments, errors and an example that runs."""

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
    """What the docstring of a function or class leaves unsaid."""
    doc = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return [] if doc else ["what it is"]
    # One docstring may stand for its likes: "Arguments and errors are those of :class:`Attention2d`."
    elsewhere = "are those of" in doc or "Attributes" in doc or hasattr(thing, "__dataclass_fields__")
    parameters = [] if elsewhere else [name for name in inspect.signature(thing).parameters if not name.startswith("_")]
    missing = [name for name in parameters if f"{name}: " not in doc]
    return missing if ">>>" in doc else [*missing, "an example"]


def test_a_public_name_says_what_it_takes_and_shows_how_it_is_used():
    things = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    unsaid = {name: undocumented(thing) for name, thing in things.items()}
    assert {name: parts for name, parts in unsaid.items() if parts} == {}

    def documented(x, y):  # noqa: D417
        """Add.

        Args:
            x: one.
        """

    assert undocumented(documented) == ["y", "an example"]


def test_an_error_has_one_base_and_comes_whole_out_of_another_process():
    kinds = {getattr(errors, name) for name in errors.__all__} - {errors.Interrupted}
    assert all(issubclass(kind, errors.VisionAttnError) for kind in kinds)
    made = [errors.Interrupted(2, "saved"), *(kind("first", "second") for kind in kinds - {errors.VisionAttnError})]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
