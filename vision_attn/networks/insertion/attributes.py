"""Attributes of modules: the record of a block, the module that a block replaced, and its state."""

from torch import nn

from vision_attn.networks.insertion.record import InsertedBlock

#: The attribute in which a block stores its :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute in which a target finds the module that runs in place of a block outside the target, in a tuple: a
#: wrapper or, in a replica of ``nn.DataParallel``, the replica of the block.
SUBSTITUTE = "substitute_of_block"

#: The attribute of a replaced module with random weights, because no file contained them.
RANDOM = "weights_not_loaded"


def get_record(block: nn.Module) -> InsertedBlock:
    """Return the record of an inserted block."""
    return getattr(block, RECORD)


def set_record_(block: nn.Module, record: InsertedBlock) -> nn.Module:
    """Store the record of a block in it, and return the block."""
    setattr(block, RECORD, record)
    return block


def is_inserted(module: nn.Module) -> bool:
    """Return True if a module is an inserted block, or a wrapper of one that a hook runs.

    A wrapper may show the attributes of the module inside, but only the block itself can be exchanged for the module
    that it replaced.
    """
    record = getattr(module, RECORD, None)
    return isinstance(record, InsertedBlock) and (not record.replaced or RECORD in vars(module))


def replaced_module(block: nn.Module) -> nn.Module | None:
    """Return the module that a block replaced, or None."""
    return next(iter(get_record(block).replaced), None) if is_inserted(block) else None


def original_module(module: nn.Module) -> nn.Module:
    """Return the module that a block replaced, or else the module itself."""
    return module if (old := replaced_module(module)) is None else old
