"""Which modules of a model are chosen as sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from vision_attn.insertion.branch import branch_end
from vision_attn.insertion.dry_run import DryRun
from vision_attn.insertion.out import inserted
from vision_attn.insertion.sites import (
    CHILD,
    Names,
    SiteError,
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
    """Paths of the modules chosen by stage, by name or by a function."""
    if sum(choice is not None for choice in (stages, names, where)) != 1:
        raise ValueError("choose sites by exactly one of stages, names and where")
    # A block that replaced a module is a site, which is then refused; what is inside of blocks is none.
    own = {
        id(module)
        for site, block in inserted(run.model).items()
        for module in block.modules()
        if module is not run.model.get_submodule(site)
    }
    modules = {name: module for name, module in run.model.named_modules() if name and id(module) not in own}
    if stages is not None:
        wanted = [stages] if isinstance(stages, (int, str)) else list(stages)
        chosen = match_stages(run.model, wanted, stages_of(run))
    elif names is not None:
        chosen = match_names(modules, [names] if not isinstance(names, Iterable) or isinstance(names, str) else names)
    else:
        assert where is not None
        chosen = match_where(modules, where)
    return list(dict.fromkeys(chosen))


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
        if hasattr(run.model.get_submodule(host), CHILD):
            raise SiteError(f"{host!r} has an inserted block already: take it out with remove_, or choose another site")
    return hosts
