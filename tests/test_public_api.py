"""What users import is documented where they read it: purpose, arguments, errors and an example that runs."""

import importlib
import inspect
import pickle

import pytest

from vision_attn import errors

PUBLIC = {
    (module, name): getattr(importlib.import_module(module), name)
    for module in ("vision_attn", "vision_attn.convert", "vision_attn.equations", "vision_attn.figures")
    for name in importlib.import_module(module).__all__
}
CALLABLES = {where: thing for where, thing in PUBLIC.items() if inspect.isfunction(thing) or inspect.isclass(thing)}


@pytest.mark.parametrize("where", CALLABLES, ids=".".join)
def test_a_public_name_says_what_it_takes_and_shows_how_it_is_used(where):
    thing, doc = CALLABLES[where], inspect.getdoc(CALLABLES[where]) or ""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        assert doc
        return
    # One docstring may stand for its likes: "Arguments and errors are those of :class:`Attention2d`."
    documented = doc if "are those of" not in doc else None
    parameters = [name for name in inspect.signature(thing).parameters if not name.startswith("_")]
    if documented is not None and "Attributes" not in doc and not hasattr(thing, "__dataclass_fields__"):
        missing = [name for name in parameters if f"{name}: " not in doc]
        assert not missing, f"{where[1]} does not say what {', '.join(missing)} are"
    assert ">>>" in doc, f"{where[1]} has no example"


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
