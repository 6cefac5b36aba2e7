"""Where to insert attention and where not, from the maps of a network and what a block costs on them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vision_attn.checkpoints.specification import SPECIFICATIONS
from vision_attn.inspection.memory import IMPLS_COUNTED
from vision_attn.inspection.network import Share
from vision_attn.inspection.sites import Cost, Site, heads_for
from vision_attn.inspection.units import gibi, listed
from vision_attn.patterns import Window

__all__ = ["Proposal", "code", "memory_warnings", "propose", "size_warnings"]

#: Sides of the maps that full attention suits: below, it mixes little; above, its cost outgrows the network's.
SHORTEST, LONGEST = 7, 32

#: Sides of windows, the most usual first.
WINDOWS = (7, 8, 6, 9, 10, 5)

#: A proposal that adds more than this share to a network's multiply-adds is followed by a cheaper one, ...
DEAR = 0.25

#: ... whose heads are the first of these wide that does not.
NARROW = (64, 32, 16, 8)


@dataclass(frozen=True)
class Proposal:
    """What to insert where, why, and what it costs."""

    #: where
    sites: tuple[Site, ...]
    #: of :func:`vision_attn.insert_`: ``stages`` and what differs from the default block
    arguments: Mapping[str, Any]
    #: in a few words
    why: str
    #: of all its blocks together
    cost: Share
    #: bytes that training keeps for the backward pass of a batch, with ``impl="sdpa"``
    saved: int

    def call(self, example_input: tuple[int, ...] | None = None) -> str:
        """The call, as one writes it; for images of another size than the model's own, with their shape."""
        arguments = {**self.arguments, **({} if example_input is None else {"example_input": example_input})}
        return f"va.insert_(model, {', '.join(f'{name}={code(value)}' for name, value in arguments.items())})"

    def command(self, model: str, img_size: int | None = None) -> str:
        """The same as flags of ``vision-attn train``."""
        size = "" if img_size is None else f" --img-size {img_size}"
        heads = f" --num-heads {self.arguments['num_heads']}" if "num_heads" in self.arguments else ""
        stages = " ".join(map(str, self.arguments["stages"]))
        others = {name: value for name, value in self.arguments.items() if name not in ("stages", "num_heads")}
        words = " ".join(shlex.quote(f"{name}={code(value).removeprefix('va.')}") for name, value in others.items())
        options = f" --block-options {words}" if words else ""
        return f"vision-attn train --data FOLDER --model {model}{size} --insert {stages}{heads}{options}"


def code(value: object) -> str:
    """A value as one writes it in a call.

    >>> code(Window(7)), code((1, 2))
    ('va.Window(7)', '(1, 2)')
    """
    if isinstance(value, Window):
        shift = f", shift={value.shift}" if value.shift else ""
        return f"va.Window({value.size}{shift})"
    return f"va.{value!r}" if type(value).__name__ in SPECIFICATIONS else repr(value)


def propose(
    sites: Sequence[Site],
    whole: Share,
    cost: Callable[[Site, int, dict[str, Any]], Cost],
    *,
    num_heads: int = 8,
    options: Mapping[str, Any] | None = None,
) -> list[Proposal]:
    """What is worth trying first: late stages, on maps between 7×7 and 32×32, and windows on a larger one."""
    asked = dict(options or {})

    def proposal(chosen: Sequence[Site], why: str, **options: Any) -> Proposal:
        heads = heads_for(math.gcd(*(site.channels for site in chosen)), num_heads)
        costs = [cost(site, heads, {**asked, **options}) for site in chosen]
        indices = [index_of(site, len(sites)) for site in chosen]
        arguments = {"stages": indices, **({"num_heads": heads} if heads != 8 else {}), **asked, **options}
        together = Share(sum(one.parameters for one in costs), sum(one.multiply_adds for one in costs))
        return Proposal(tuple(chosen), arguments, why, together, sum(one.saved["sdpa"] for one in costs))

    learning = [site for site in sites if site.learns and not site.occupied]
    late = [site for site in learning if min(sides(site)) >= SHORTEST and max(sides(site)) <= LONGEST][-2:]
    small = [site for site in learning if min(sides(site)) > 2 and max(sides(site)) <= LONGEST][-1:]
    large = [site for site in learning if max(sides(site)) > LONGEST][-1:]
    found = []
    if late:
        found.append(proposal(late, "late, with enough positions to mix and few enough to compare all"))
        if found[0].cost.multiply_adds > DEAR * whole.multiply_adds and not {"key_dim", "value_dim"} & set(asked):
            width = next((d for d in NARROW if narrower(late, d, whole) <= DEAR), NARROW[-1])
            narrow = proposal(late, "the same with narrower heads, for less", key_dim=width, value_dim=width)
            found += [narrow] if narrow.cost.multiply_adds < found[0].cost.multiply_adds else []
    elif small:
        found.append(proposal(small, "the latest with something to mix, if not much: a larger input is better"))
    if large and not asked:
        window = window_for(large[0])
        why = f"finer detail, in windows: comparing all {large[0].tokens:,} positions costs too much"
        found.append(proposal(large, why, pattern=Window(window)))
    return found


def narrower(sites: Sequence[Site], width: int, whole: Share) -> float:
    """About the share that projections to heads of a width add to the network's multiply-adds."""
    added = sum(4 * site.channels * site.cost.num_heads * width * site.tokens for site in sites)
    return added / max(1, whole.multiply_adds)


def sides(site: Site) -> tuple[int, int]:
    return site.height, site.width


def index_of(site: Site, count: int) -> int:
    """The last two stages are counted from the end."""
    assert site.stage is not None
    return site.stage - count if count - site.stage <= 2 else site.stage


def window_for(site: Site) -> int:
    """A usual side that divides the map; else the most usual, which pads it."""
    return next((side for side in WINDOWS if site.height % side == site.width % side == 0), WINDOWS[0])


def size_warnings(sites: Sequence[Site], image: tuple[int, int]) -> list[str]:
    """A line for each map on which attention has next to nothing to mix."""
    lines = []
    for site in sites:
        if max(sides(site)) <= 2:
            larger = "×".join(str(-(-SHORTEST * pixels // 2)) for pixels in image)
            # An image of any size up to the network's reduction makes one position: that tells no size to take.
            size = f" ({larger} makes it about {SHORTEST}×{SHORTEST})" if min(sides(site)) == 2 else ""
            little = "nothing" if site.tokens == 1 else "next to nothing"
            lines.append(
                f"{name_of(site)}: the map is {site.size}, attention has {little} to mix: choose an earlier stage or "
                f"a larger input{size}"
            )
    return lines


def memory_warnings(sites: Sequence[Site], batch_size: int, limit: int, *, together: bool) -> list[str]:
    """What training would keep for the backward pass beyond a limit, and what to do about it."""
    groups = [list(sites)] if together else [[site] for site in sites]
    by_impls: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for group in groups:
        saved = {impl: sum(site.cost.saved[impl] for site in group) for impl in IMPLS_COUNTED}
        over = tuple(impl for impl in IMPLS_COUNTED if saved[impl] > limit)
        if over:
            name = name_of(group[0]) if len(group) == 1 else f"the {len(group)} blocks together"
            by_impls.setdefault(over, []).append((name, min(saved[impl] for impl in over)))
    lines = []
    for impls, found in by_impls.items():
        names, amounts = listed([name for name, _ in found]), listed([gibi(amount) for _, amount in found])
        remedy = (
            "take a later stage, a smaller input or a smaller batch"
            if "sdpa" in impls
            else "take impl='sdpa', a pattern with fewer keys (va.Window(7)), kv_stride, or a later stage"
        )
        lines.append(
            f"{names}: with {listed(impls, 'or')} training keeps {amounts} for {batch_size:,} images, more than the "
            f"memory limit of {gibi(limit)}: {remedy}"
        )
    return lines


def name_of(site: Site) -> str:
    return site.path if site.stage is None else f"stage {site.stage} ({site.path})"
