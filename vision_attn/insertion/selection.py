"""Which modules of a model are chosen as sites."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from vision_attn.errors import SiteError
from vision_attn.insertion.attach import is_host
from vision_attn.insertion.branch import branch_end
from vision_attn.insertion.dry_run import DryRun
from vision_attn.insertion.exchange import REPLACED
from vision_attn.insertion.out import inserted
from vision_attn.insertion.sites import (
    Names,
    first_of_sequential,
    last_of_sequential,
    match_names,
    match_stages,
    match_where,
)
from vision_attn.insertion.stages import stages_of

__all__ = ["PLACES", "hosts_of", "select_sites"]

#: Where a block can go, relative to a site.
PLACES = ("after", "before", "branch")


def select_sites(
    run: DryRun,
    *,
    stages: int | str | Iterable[int | str] | None,
    names: Names | Iterable[Names] | None,
    where: Callable[[str, nn.Module], bool] | None,
) -> list[str]:
    """The paths of the modules that are chosen by stage, by name or by a function."""
    if sum(choice is not None for choice in (stages, names, where)) != 1:
        raise ValueError("choose sites by exactly one of stages, names and where")
    # A block that replaced a module is a site, which is then refused; what is inside of blocks is none.
    own = {
        id(module)
        for site, block in inserted(run.model).items()
        for module in block.modules()
        if module is not run.model.get_submodule(site)
    }
    first = {id(module): name for name, module in run.model.named_modules()}
    modules = {
        name: module
        for name, module in run.model.named_modules(remove_duplicate=False)
        if name and id(module) not in own
    }
    if stages is not None:
        chosen = match_stages(run.model, several("stages", stages, (int, str)), stages_of(run))
    elif names is not None:
        chosen = match_names(modules, several("names", names, (str, re.Pattern)))
    else:
        assert where is not None
        chosen = match_where(modules, where)
    # A module that has several names goes by its first.
    return list(dict.fromkeys(first[id(modules[name])] for name in chosen))


def several(argument: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """One or several of some kinds, as a list."""
    items = [given] if isinstance(given, kinds) else list(given) if isinstance(given, Iterable) else [given]
    wrong = [item for item in items if isinstance(item, bool) or not isinstance(item, kinds)]
    if wrong or not items:
        what = "an index or a name" if int in kinds else "a glob or a compiled regular expression"
        raise ValueError(f"{argument} must be {what}, or several; got {given!r}")
    return items


def hosts_of(run: DryRun, sites: list[str], at: str) -> list[str]:
    """The modules at which the blocks of these sites run."""
    if at not in PLACES:
        raise ValueError(f"at must be one of {', '.join(map(repr, PLACES))}; got {at!r}")
    end = first_of_sequential if at == "before" else last_of_sequential
    hosts = [end(run.model, site) for site in sites]
    if at == "branch":
        for host in hosts:
            run.check_called_once(host)
        hosts = [last_of_sequential(run.model, branch_end(run.model, host, run.example)) for host in hosts]
    hosts = list(dict.fromkeys(hosts))
    for host in hosts:
        module = run.model.get_submodule(host)
        if REPLACED in vars(module):
            raise SiteError(f"{host!r} has replaced a module: insert at the module around it, or give it its options")
        if is_host(module):
            raise SiteError(f"{host!r} has an inserted block already: take it out with remove_, or choose another site")
    return hosts
