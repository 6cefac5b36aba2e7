"""What users import is documented where they read it: purpose, arguments, errors and an example that runs."""

import importlib
import inspect
import pickle

from vision_attn import errors

PUBLIC = {
    (module, name): getattr(importlib.import_module(module), name)
    for module in (
        "vision_attn",
        "vision_attn.networks.convert",
        "vision_attn.attention.equations",
        "vision_attn.networks.figures",
    )
    for name in importlib.import_module(module).__all__
}
CALLABLES = {where: thing for where, thing in PUBLIC.items() if inspect.isfunction(thing) or inspect.isclass(thing)}


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
    unsaid = {".".join(where): undocumented(thing) for where, thing in CALLABLES.items()}
    assert {name: parts for name, parts in unsaid.items() if parts} == {}


def test_what_a_docstring_leaves_unsaid_is_found():
    def documented(x, y):  # noqa: D417
        """Add.

        Args:
            x: one.
        """

    assert undocumented(documented) == ["y", "an example"]


def test_an_error_comes_whole_out_of_another_process():
    made = [
        errors.Interrupted(2, "saved"),
        *(kind("first", "second") for kind in errors.VisionAttnError.__subclasses__()),
    ]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_every_error_has_one_base():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.VisionAttnError) != (kind is errors.Interrupted)
