# %% [markdown]
# # One attention block, written with einx and with torch.bmm
#
# After this page you can read and write spatial multi-head attention in two ways, by the names of the axes (einx) and
# by their places (`view`, `permute`, `torch.bmm`); say what a change of layout costs in each; write an attention
# pattern of your own in one line; and know which mistakes each form reports and which it computes without a word.
# Assumed: NumPy, and what a 1×1 convolution is. Of attention only its definition is used, and it is given below.
#
#     python examples/einx_vs_bmm.py
#
# It takes about ten seconds.

# %%
import ast
import difflib
import inspect
import re
import textwrap
import time
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from torch import nn
from torch.testing import assert_close
from torch.utils.benchmark import Timer

import vision_attn as va
from vision_attn.attention.patterns import resolve_pattern
from vision_attn.networks.figures import Figure, save_figure

began = time.perf_counter()
import einx  # noqa: E402 - what importing it costs is one of the questions

seconds_to_import = time.perf_counter() - began

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that "equal" below means equal up to the last digits

# %% [markdown]
# ## The block
#
# A feature map has `b` images, `c` channels and the sides `h` and `w`. Each of its positions becomes a *token*, a
# vector of numbers. A 1×1 convolution makes three tokens of it: a query, a key and a value. Their channels are divided
# among `n` *heads*, each `d` wide, which work side by side and do not see each other. In each head the *logit* of
# query token `i` and key token `j` is `q_i · k_j / √d`; softmax over `j` makes *weights* of the logits, positive and
# of sum 1; and the result at `i` is the sum of the values, weighted. A second 1×1 convolution mixes the heads. `h` is
# always a height, of the map or later of a window in it, never the heads.
#
# einx takes a string that names every axis of what goes in and of what comes out, and moves or computes what the
# string says. Three things are enough to read all strings on this page.
#
# **Brackets ( ) put several axes into one.** `(n d)` is one axis of `n·d` places, where `d` varies faster. On the left
# side of the arrow it is taken apart, on the right side put together.

# %%
one = torch.arange(6)
assert einx.id("(n d) -> n d", one, n=2).tolist() == [[0, 1, 2], [3, 4, 5]]
assert einx.id("(n d) -> (d n)", one, n=2).tolist() == [0, 3, 1, 4, 2, 5]

# %% [markdown]
# **Sizes are deduced.** `n=2` was given and `d` was not: of 6 places it must be 3. What no axis determines must be
# said, and what contradicts an axis is refused. `einx.matches` answers whether names and sizes fit a tensor.

# %%
assert einx.matches("(n d)", one, n=2, d=3)
assert not einx.matches("(n d)", one, n=4)

# %% [markdown]
# **Brackets [ ] mark what a function works on.** `einx.id` computes nothing and needs none; `einx.softmax("i [j]", x)`
# makes weights over `j` for every `i`. In `einx.dot` an axis that both inputs have and the output has not is summed
# over, and there the brackets may be left out. (Texts written for einx 0.3 say `einx.rearrange` for `einx.id`.)

# %%
x = torch.randn(3, 5)
assert_close(einx.softmax("i [j]", x).sum(dim=1), torch.ones(3))
assert_close(einx.dot("i j, k j -> i k", x, x), x @ x.T)
assert_close(einx.dot("i [j], k [j] -> i k", x, x), x @ x.T)

# %% [markdown]
# ## The two forms
#
# Both have the same two convolutions and so the same state dict. The output channels of `qkv` are ordered `(qkv n d)`:
# all queries before all keys before all values, and in each of them head after head.


# %%
class Projections(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (channels // num_heads) ** -0.5
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)


class EinxAttention(Projections):
    def forward(self, x):
        _, _, h, _ = x.shape
        q, k, v = einx.id("b (qkv n d) h w -> qkv b n (h w) d", self.qkv(x), qkv=3, n=self.num_heads)
        logits = einx.dot("b n i d, b n j d -> b n i j", q, k) * self.scale
        weights = einx.softmax("b n i [j]", logits)
        y = einx.dot("b n i j, b n j d -> b n i d", weights, v)
        return self.proj(einx.id("b n (h w) d -> b (n d) h w", y, h=h))


class BmmAttention(Projections):
    def forward(self, x):
        b, c, h, w = x.shape
        n = self.num_heads
        d = c // n
        qkv = self.qkv(x).view(b, 3, n, d, h * w).permute(1, 0, 2, 4, 3)
        q, k, v = qkv.reshape(3, b * n, h * w, d)
        logits = torch.bmm(q, k.transpose(1, 2)) * self.scale
        weights = torch.softmax(logits, dim=2)
        y = torch.bmm(weights, v).view(b, n, h * w, d).permute(0, 1, 3, 2)
        return self.proj(y.reshape(b, c, h, w))


# %% [markdown]
# ## Line by line
#
# Now the five steps, each in both forms on the same tensors. `b`, `n`, `d`, `h` and `w` differ, so that none can be
# taken for another. `compare` prints what each form holds after a step, asserts that the axes have the names that are
# printed, and that the numbers of both are the same, in the same order.

# %%
b, n, d, h, w = 2, 3, 4, 5, 7
c = n * d
assert len({b, n, d, h, w}) == 5
SIZES = {"qkv": 3, "b": b, "n": n, "d": d, "h": h, "w": w, "i": h * w, "j": h * w}


def compare(step, axes, in_einx, axes_bmm, in_bmm):
    assert einx.matches(axes, in_einx, **SIZES)
    assert einx.matches(axes_bmm, in_bmm, **SIZES)
    assert_close(in_einx.flatten(), in_bmm.flatten())
    shapes = [f"{names} = {' '.join(map(str, t.shape))}" for names, t in ((axes, in_einx), (axes_bmm, in_bmm))]
    print(f"{step:<9} {shapes[0]:<35} {shapes[1]}")


einx_block, bmm_block = EinxAttention(c, n), BmmAttention(c, n)
bmm_block.load_state_dict(einx_block.state_dict(), strict=True)
x = torch.randn(b, c, h, w)
qkv = einx_block.qkv(x).detach()
print(f"{'step':<9} {'einx':<35} bmm")

# %% [markdown]
# **Split.** One axis of channels becomes three, two axes of space become one. einx is told the two sizes that nothing
# else determines. In the bmm form `view` takes the channels apart, `permute` gives the new order as old places, and
# `reshape`, which copies, folds the heads into the batch, since `torch.bmm` has one batch axis.

# %%
q, k, v = einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, n=n)

qkv_bmm = qkv.view(b, 3, n, d, h * w).permute(1, 0, 2, 4, 3)
q_bmm, k_bmm, v_bmm = qkv_bmm.reshape(3, b * n, h * w, d)
assert qkv_bmm.data_ptr() == qkv.data_ptr() != q_bmm.data_ptr()

for name, in_einx, in_bmm in (("q", q, q_bmm), ("k", k, k_bmm), ("v", v, v_bmm)):
    compare(f"split, {name}", "b n (h w) d", in_einx, "(b n) (h w) d", in_bmm)

# %% [markdown]
# **Logits.** Queries and keys are the same tokens under two letters, `i` and `j`, and `d` is summed over. `torch.bmm`
# sums over the last axis of its first argument and the second of its other one, so the keys are transposed.

# %%
logits = einx.dot("b n i d, b n j d -> b n i j", q, k) * d**-0.5

logits_bmm = torch.bmm(q_bmm, k_bmm.transpose(1, 2)) * d**-0.5

compare("logits", "b n i j", logits, "(b n) i j", logits_bmm)

# %% [markdown]
# **Softmax.** Over the keys: `[j]`, or the axis with the number 2.

# %%
weights = einx.softmax("b n i [j]", logits)

weights_bmm = torch.softmax(logits_bmm, dim=2)

assert (weights > 0).all()
assert_close(weights.sum(dim=3), torch.ones(b, n, h * w))
compare("softmax", "b n i j", weights, "(b n) i j", weights_bmm)

# %% [markdown]
# **Weighted values.** Here `j` is summed over.

# %%
y = einx.dot("b n i j, b n j d -> b n i d", weights, v)

y_bmm = torch.bmm(weights_bmm, v_bmm)

compare("values", "b n i d", y, "(b n) i d", y_bmm)

# %% [markdown]
# **Merge.** The way back. `h=h` tells einx how to take the tokens apart; `w`, `n` and `d` follow. The bmm form takes
# the heads out of the batch, brings the width before the tokens, and copies.

# %%
merged = einx.id("b n (h w) d -> b (n d) h w", y, h=h)

merged_bmm = y_bmm.view(b, n, h * w, d).permute(0, 1, 3, 2).reshape(b, c, h, w)

assert merged_bmm.data_ptr() != y_bmm.data_ptr()
compare("merge", "b (n d) h w", merged, "b (n d) h w", merged_bmm)

# %% [markdown]
# ## The whole modules are equal
#
# forward, and in the gradient of every parameter and of the input.


# %%
def output_and_gradients(block):
    inputs = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
    output = block(inputs["x"])
    loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    return {"output": output, **dict(zip(inputs, torch.autograd.grad(loss, inputs.values()), strict=True))}


expected = output_and_gradients(bmm_block)
assert_close(output_and_gradients(einx_block), expected)
print("\nequal in both forms: the output and the gradients of", ", ".join(list(expected)[1:]))

# %% [markdown]
# They are also equal to torch's fused attention between the same convolutions, and to `va.Attention2d`, which loads
# the same state dict and runs it in each of its implementations. `impl="flex"` is left out, since FlexAttention does
# not compute in float64.

# %%
with torch.no_grad():
    fused = einx.id("b n (h w) d -> b (n d) h w", F.scaled_dot_product_attention(q, k, v), h=h)
    assert_close(einx_block.proj(fused), expected["output"])
    block = va.Attention2d(c, n)
    block.load_state_dict(einx_block.state_dict(), strict=True)
    impls = [impl for impl in va.IMPLS if impl != "flex"]
    for impl in impls:
        with va.use_impl(block, impl):
            assert_close(block(x), expected["output"])
assert_close(output_and_gradients(block), expected)
print("and the output to F.scaled_dot_product_attention and va.Attention2d with impl =", ", ".join(impls))

# %% [markdown]
# ## What einx runs
#
# einx turns a string and the shapes that it meets into a Python function. `graph=True` shows the function in place of
# calling it. For the first line of the block it consists of the same three calls as the bmm form: a view, a permute, a
# reshape. The sizes stand in it as numbers; other shapes get another function.

# %%
code = einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, n=n, graph=True)
made = {}
exec(code, made)
assert torch.equal(made["op"](qkv), torch.stack([q, k, v]))
assert re.findall(r"torch\.(\w+)\(", code) == ["reshape", "permute", "reshape"]
assert f"({b}, 3, {n}, {d}, {h}, {w})" in code
assert code != einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv[..., 1:], qkv=3, n=n, graph=True)
print(f"\nwhat einx makes of the first line:\n{textwrap.indent(code.strip(), '    ')}")

# %% [markdown]
# ## The comparison

# %%
ROWS = """
what               | einx                                        | bmm
batch              | `b`, an axis of its own in every line       | folded with the heads, b * n, and unfolded
channels           | `(qkv n d)` says how they are ordered       | the order of the arguments of view says it
heads              | `n`, its size given once                    | from place to place, and once inside of b * n
width of a head    | `d`, deduced                                | computed, c // n; from place to place
space              | `h w`, as tokens `(h w)`                    | the product h * w
rearrangement      | one string: before -> after                 | view, permute by numbers, reshape
contraction        | the name that the output lacks              | the last place with the middle one
softmax            | `[j]`                                       | dim=2
new layouts        | another string                              | other sizes and numbers, on both ways
readability        | every line says its axes                    | one has to keep them in mind
errors             | say the line, its axes and their sizes      | say the sizes wanted and a count of numbers
sizes at run time  | numbers in a graph: an export has one size  | may stay symbols: an export takes any size
"""
table = [[cell.strip() for cell in row.split("|")] for row in ROWS.strip().splitlines()]
print()
for row in table:
    print("{:<18} {:<44} {}".format(*row))

# %% [markdown]
# Batch, rearrangement, contraction and softmax were run above. The other rows, one after the other:
#
# *Channels.* Key `d=3` of head `n=2` must be the output channel `1·n·d + 2·d + 3` of the convolution: key is the
# second of the three.

# %%
channel = 1 * n * d + 2 * d + 3
assert torch.equal(k[:, 2, :, 3], qkv[:, channel].flatten(1))
assert torch.equal(k_bmm.view(b, n, h * w, d)[:, 2, :, 3], qkv[:, channel].flatten(1))

# %% [markdown]
# *Heads, width of a head.* einx deduces either from the other, and refuses to guess both. `said` returns what an error
# says; of einx's message the part before the list of arguments.


# %%
def said(call):
    try:
        call()
    except (einx.errors.EinxError, RuntimeError) as error:
        return str(error).partition("The operation was called")[0].strip()
    raise AssertionError("there was no error")


names = "b (qkv n d) h w"
assert einx.solve_axes(names, qkv, qkv=3, n=n)["d"] == d
assert einx.solve_axes(names, qkv, qkv=3, d=d)["n"] == n
assert "Failed to uniquely determine the size of the axes d, n" in said(lambda: einx.solve_axes(names, qkv, qkv=3))

# %% [markdown]
# *Space.* Tokens are row-major: the position in row `r` and column `s` is token `r·w + s`.

# %%
r, s = 3, 2
assert torch.equal(q[:, :, r * w + s].flatten(1), qkv[:, :c, r, s])

# %% [markdown]
# *Readability* cannot be asserted. What can be counted is how many numbers in the code stand for an axis by its place:
# in `permute`, `transpose`, `softmax` and after `.shape`.


# %%
def axis_numbers(code):
    """The numbers in Python code that stand for axes."""
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("permute", "transpose", "softmax"):
            found += [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
            found.append(node.slice)
    return [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, int)]


numbers = [len(axis_numbers(inspect.getsource(form.forward))) for form in (EinxAttention, BmmAttention)]
assert numbers == [0, 12]
print("\nnumbers that stand for axes, in the two forward methods: einx {}, bmm {}".format(*numbers))

# %% [markdown]
# *Sizes at run time.* `torch.export` records a network as a graph, with symbols in the place of sizes that it is to
# leave open. The functions that einx makes have numbers there, so the einx form can be exported for one size only.
# When the module itself is called, any size will do.


# %%
def exports(block, open_axes):
    """Whether the block can be recorded with these axes open and then agrees with itself where they are longer."""
    try:
        shapes = {"x": dict.fromkeys(open_axes, torch.export.Dim.DYNAMIC)}
        recorded = torch.export.export(block, (x,), dynamic_shapes=shapes).module()
        other = torch.randn([length + (axis in open_axes) for axis, length in enumerate(x.shape)])
        return torch.allclose(recorded(other), block(other))
    except Exception:  # which one depends on the versions of torch and einx
        return False


with torch.no_grad():
    assert exports(bmm_block, open_axes=(0, 2, 3))
    assert exports(einx_block, open_axes=())
    assert not exports(einx_block, open_axes=(0, 2, 3))
    other = torch.randn(b + 1, c, h + 1, w + 1)
    assert_close(einx_block(other), bmm_block(other))

# %% [markdown]
# Layouts and errors have sections of their own, and so has the row that is not in the table, speed.
#
# ## New layouts, in einx
#
# Full attention compares every position with every other one: `(h w)²` logits. A *pattern* says which positions see
# each other: they form a *group*, and the groups are put into the batch axis, where each is computed by itself. What
# happens inside of a group does not change, so it is written once for each form, here as functions of what lies
# between the two convolutions. The pattern is the argument `line`, in which `b n d` and the axes of the map are on the
# left.


# %%
def attend_einx(qkv, n, line, **sizes):
    maps, tokens = line.split(" -> ")
    heads = einx.id("b (qkv n d) ... -> qkv b n d ...", qkv, qkv=3, n=n)
    sizes = einx.solve_axes(f"qkv {maps}", heads, **sizes)
    q, k, v = einx.id(f"qkv {maps} -> qkv {tokens}", heads, **sizes)
    weights = einx.softmax("b n i [j]", einx.dot("b n i d, b n j d -> b n i j", q, k) * sizes["d"] ** -0.5)
    y = einx.dot("b n i j, b n j d -> b n i d", weights, v)
    return einx.id("b n d ... -> b (n d) ...", einx.id(f"{tokens} -> {maps}", y, **sizes))


# %% [markdown]
# The ellipsis `...` stands for the axes of the map, however many there are. The way back is the same string read from
# right to left, `f"{tokens} -> {maps}"`; `einx.solve_axes` gives the size of every name, which the way back cannot
# deduce.

# %%
WINDOW = "b n d (gh h) (gw w) -> (b gh gw) n (h w) d"
maps = torch.randn(2, 3, 4, 14, 21)
there, back = WINDOW.split(" -> ")
groups = einx.id(f"{there} -> {back}", maps, h=7, w=7)
sizes = einx.solve_axes(there, maps, h=7, w=7)
assert groups.shape == (2 * 2 * 3, 3, 49, 4)
assert torch.equal(einx.id(f"{back} -> {there}", groups, **sizes), maps)
print("\nsizes that einx deduces in a map of 14×21 from h=7, w=7:", sizes)

# %% [markdown]
# In this line `(gh h)` takes the height apart into `gh` windows of `h` positions: `h` varies faster, so the positions
# of a window lie side by side. Exchanged to `(h gh)` and `(w gw)`, the string says grids: a grid has one position out
# of every `gh` along the height. `gh` and `gw` stand in the batch axis, so windows do not see each other. Here are the
# edits in the einx form:


# %%
def einx_full(qkv, n):
    return attend_einx(qkv, n, "b n d h w -> b n (h w) d")


def einx_window(qkv, n, side):
    return attend_einx(qkv, n, "b n d (gh h) (gw w) -> (b gh gw) n (h w) d", h=side, w=side)


def einx_grid(qkv, n, side):
    return attend_einx(qkv, n, "b n d (h gh) (w gw) -> (b gh gw) n (h w) d", h=side, w=side)


# %% [markdown]
# Three-dimensional maps, as of video or volumes, have one more axis, `t`.


# %%
def einx_volume(qkv, n):
    return attend_einx(qkv, n, "b n d t h w -> b n (t h w) d")


def einx_volume_window(qkv, n, side):
    return attend_einx(qkv, n, "b n d (gt t) (gh h) (gw w) -> (b gt gh gw) n (t h w) d", t=side, h=side, w=side)


# %% [markdown]
# ## New layouts, in bmm
#
# The same five. What happens inside of a group is again written once.


# %%
def attend_bmm(q, k, v):
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * q.shape[2] ** -0.5, dim=2)
    return torch.bmm(weights, v)


def bmm_full(qkv, n):
    b, c, h, w = qkv.shape
    d = c // (3 * n)
    qkv = qkv.view(b, 3, n, d, h * w)
    qkv = qkv.permute(1, 0, 2, 4, 3)
    q, k, v = qkv.reshape(3, b * n, h * w, d)
    y = attend_bmm(q, k, v)
    y = y.view(b, n, h * w, d)
    y = y.permute(0, 1, 3, 2)
    return y.reshape(b, n * d, h, w)


def bmm_window(qkv, n, side):
    b, c, h, w = qkv.shape
    d, gh, gw = c // (3 * n), h // side, w // side
    qkv = qkv.view(b, 3, n, d, gh, side, gw, side)
    qkv = qkv.permute(1, 0, 4, 6, 2, 5, 7, 3)
    q, k, v = qkv.reshape(3, b * gh * gw * n, side * side, d)
    y = attend_bmm(q, k, v)
    y = y.view(b, gh, gw, n, side, side, d)
    y = y.permute(0, 3, 6, 1, 4, 2, 5)
    return y.reshape(b, n * d, h, w)


# %%
def bmm_grid(qkv, n, side):
    b, c, h, w = qkv.shape
    d, gh, gw = c // (3 * n), h // side, w // side
    qkv = qkv.view(b, 3, n, d, side, gh, side, gw)
    qkv = qkv.permute(1, 0, 5, 7, 2, 4, 6, 3)
    q, k, v = qkv.reshape(3, b * gh * gw * n, side * side, d)
    y = attend_bmm(q, k, v)
    y = y.view(b, gh, gw, n, side, side, d)
    y = y.permute(0, 3, 6, 4, 1, 5, 2)
    return y.reshape(b, n * d, h, w)


def bmm_volume(qkv, n):
    b, c, t, h, w = qkv.shape
    d = c // (3 * n)
    qkv = qkv.view(b, 3, n, d, t * h * w)
    qkv = qkv.permute(1, 0, 2, 4, 3)
    q, k, v = qkv.reshape(3, b * n, t * h * w, d)
    y = attend_bmm(q, k, v)
    y = y.view(b, n, t * h * w, d)
    y = y.permute(0, 1, 3, 2)
    return y.reshape(b, n * d, t, h, w)


def bmm_volume_window(qkv, n, side):
    b, c, t, h, w = qkv.shape
    d, gt, gh, gw = c // (3 * n), t // side, h // side, w // side
    qkv = qkv.view(b, 3, n, d, gt, side, gh, side, gw, side)
    qkv = qkv.permute(1, 0, 4, 6, 8, 2, 5, 7, 9, 3)
    q, k, v = qkv.reshape(3, b * gt * gh * gw * n, side * side * side, d)
    y = attend_bmm(q, k, v)
    y = y.view(b, gt, gh, gw, n, side, side, side, d)
    y = y.permute(0, 4, 8, 1, 5, 2, 6, 3, 7)
    return y.reshape(b, n * d, t, h, w)


# %% [markdown]
# Each pair is equal, and equal to the block of the library with that pattern and the same weights. The weights of the
# two-dimensional block serve for three dimensions too, with one more axis of length 1 in the kernels.

# %%
state = block.state_dict()
state_3d = {name: value[..., None] if value.ndim == 4 else value for name, value in state.items()}
map_2d, map_3d = torch.randn(2, c, 14, 21), torch.randn(2, c, 4, 6, 8)
PAIRS = {
    "full": (einx_full, bmm_full, va.Attention2d(c, n)),
    "windows": (partial(einx_window, side=7), partial(bmm_window, side=7), va.Attention2d(c, n, pattern=va.Window(7))),
    "grids": (partial(einx_grid, side=7), partial(bmm_grid, side=7), va.Attention2d(c, n, pattern=va.Grid(7))),
    "volumes": (einx_volume, bmm_volume, va.Attention3d(c, n)),
    "windows in volumes": (
        partial(einx_volume_window, side=2),
        partial(bmm_volume_window, side=2),
        va.Attention3d(c, n, pattern=va.Window(2)),
    ),
}

with torch.no_grad():
    for in_einx, in_bmm, ours in PAIRS.values():
        volume = isinstance(ours, va.Attention3d)
        ours.load_state_dict(state_3d if volume else state, strict=True)
        x = map_3d if volume else map_2d
        expected = ours(x)
        assert_close(ours.proj(in_einx(ours.qkv(x), n)), expected)
        assert_close(ours.proj(in_bmm(ours.qkv(x), n)), expected)
print("\nequal in einx, in bmm and in the library:", ", ".join(PAIRS))

# %% [markdown]
# ## What an edit costs
#
# From full attention to windows, as a comparison of the sources: below, `-` marks what goes and `+` what comes.


# %%
def changed(before, after, mark):
    """Lines in the bodies of two functions that only one has: with "-" the first, with "+" the second."""
    bodies = [inspect.getsource(function).splitlines()[1:] for function in (before, after)]
    return [line[2:].strip() for line in difflib.ndiff(*bodies) if line.startswith(mark)]


for form, before, after in (("einx", einx_full, einx_window), ("bmm", bmm_full, bmm_window)):
    print(f"\nfull to windows in {form}:")
    for mark in "-+":
        print("\n".join(f"  {mark} {line}" for line in changed(before, after, mark)))

# %% [markdown]
# The same for every edit, counted: new lines, and the numbers in them that stand for axes. The signatures, which
# change alike, are left out. In einx each edit is one line without a number. From full attention to volumes the bmm
# form has to find no new numbers either: it had multiplied the sides of the map from the start.

# %%
EDITS = {
    "full to windows": ((einx_full, einx_window), (bmm_full, bmm_window)),
    "windows to grids": ((einx_window, einx_grid), (bmm_window, bmm_grid)),
    "full to volumes": ((einx_full, einx_volume), (bmm_full, bmm_volume)),
    "volumes to windows in them": ((einx_volume, einx_volume_window), (bmm_volume, bmm_volume_window)),
}


def cost(edit):
    lines = changed(*edit, "+")
    return len(lines), sum(len(axis_numbers(line)) for line in lines)


print(f"\n{'edit':<28} einx: lines, numbers    bmm: lines, numbers")
for name, (in_einx, in_bmm) in EDITS.items():
    assert cost(in_einx) == (1, 0)
    assert (cost(in_bmm)[1] == 0) == (name == "full to volumes")
    print("{:<28} {:>11}{:>9} {:>14}{:>9}".format(name, *cost(in_einx), *cost(in_bmm)))

# %% [markdown]
# The count is fair to functions written by hand. The bmm form, too, could take the sizes for `view` and the order for
# `permute` as arguments; somebody has to work them out for each pattern. They follow from the line: so the library
# keeps the line and derives the torch form from it. `va.Window(7)` is a name for the line of windows and its sizes.

# %%
line = resolve_pattern(va.Window(7)).for_rank(2).line
assert line.einx == WINDOW
assert torch.equal(eval(line.torch, {"maps": maps, **sizes}), groups)
print(f"\nva.Window(7) is   {line.einx}\nin torch          {line.torch}")

# %% [markdown]
# The library also takes maps whose sides are no multiples of the window. It pads them and masks the padding, so that a
# window over the border is full attention between its real positions: in a map of 10×15, the last three rows of the
# last column are a window by themselves.

# %%
with torch.no_grad():
    x = torch.randn(2, c, 10, 15)
    full_block, window_block = PAIRS["full"][2], PAIRS["windows"][2]
    assert_close(window_block(x)[..., 7:, 14:], full_block(x[..., 7:, 14:]))

# %% [markdown]
# ## An exercise, solved
#
# *In a map with 14 rows and 21 columns, each position shall see every third column in its own half of the rows.* The
# halves lie apart as windows do, so the height is `(g h)` with `g=2`. The columns are spread as in a grid, so the
# width is `(w s)` with `s=3`. Positions of another half or another remainder are not seen: `g` and `s` go into the
# batch.

# %%
OWN = "b n d (g h) (w s) -> (b g s) n (h w) d"
own_block = va.Attention2d(c, n, pattern=va.Pattern(OWN, g=2, s=3))
own_block.load_state_dict(state, strict=True)
with torch.no_grad():
    expected = own_block.proj(attend_einx(own_block.qkv(map_2d), n, OWN, g=2, s=3))
    assert_close(own_block(map_2d), expected)
line = own_block.resolved_pattern.line
print(f"the exercise      {line.einx}\nin torch          {line.torch}")

# %% [markdown]
# What does a position see? Number the positions, apply the line to the numbers as if they were a map, and look up the
# group in which the marked one stands. The attention weights of the library's blocks say the same, and so does the
# exercise in words.


# %%
def seen(line, marked, **sizes):
    numbers = torch.arange(14 * 21).view(1, 1, 1, 14, 21)
    groups = einx.id(line, numbers, **sizes)[:, 0, :, 0]
    return torch.isin(numbers, groups[(groups == marked).any(dim=1)]).view(14, 21)


PANELS = {
    "full": ("full", "b n d h w -> b n (h w) d", {}),
    "rows": ("rows", "b n d h w -> (b h) n w d", {}),
    "columns": ("columns", "b n d h w -> (b w) n h d", {}),
    "windows, h = w = 7": (va.Window(7), WINDOW, {"h": 7, "w": 7}),
    "grids, h = w = 7": (va.Grid(7), "b n d (h gh) (w gw) -> (b gh gw) n (h w) d", {"h": 7, "w": 7}),
    "the exercise, g = 2, s = 3": (va.Pattern(OWN, g=2, s=3), OWN, {"g": 2, "s": 3}),
}
row, column = 4, 10
marked = row * 21 + column
for pattern, line, sizes in PANELS.values():
    looks = va.Attention2d(c, n, pattern=pattern).attention_weights(map_2d, queries=torch.tensor([marked]))
    assert torch.equal(seen(line, marked, **sizes), looks[0, 0, 0].view(14, 21) > 0)
rows, columns = torch.arange(14)[:, None], torch.arange(21)
assert torch.equal(seen(WINDOW, marked, h=7, w=7), (rows // 7 == row // 7) & (columns // 7 == column // 7))
assert torch.equal(
    seen(PANELS["grids, h = w = 7"][1], marked, h=7, w=7), (rows % 2 == row % 2) & (columns % 3 == column % 3)
)
assert torch.equal(seen(OWN, marked, g=2, s=3), (rows // 7 == row // 7) & (columns % 3 == column % 3))

# %%
figure = Figure(figsize=(10.5, 6.2), layout="constrained")
figure.get_layout_engine().set(hspace=0.08, h_pad=0.1)
axes = figure.subplots(2, 3, sharex=True, sharey=True)
for ax, (name, (_, line, sizes)) in zip(axes.flat, PANELS.items(), strict=True):
    shown = seen(line, marked, **sizes).int()
    shown[row, column] = 2
    colours = ListedColormap(["#e6e6e6", "#0072b2", "#e69f00"])
    ax.pcolormesh(shown.numpy(), cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=0.6)
    ax.set(aspect="equal", xticks=[0, 7, 14, 21], yticks=[0, 7, 14])
    ax.set_title(f"{name}: {int((shown > 0).sum())} of {shown.numel()}", fontsize=11, loc="left", pad=20)
    ax.text(0, 1.03, line, transform=ax.transAxes, family="monospace", fontsize=8)
axes[0, 0].invert_yaxis()
figure.supxlabel("column w, in positions", fontsize=10)
figure.supylabel("row h, in positions", fontsize=10)
figure.suptitle("What the orange position sees: itself and the blue ones", fontsize=12, x=0.06, ha="left")
save_figure(figure, OUTPUT / "einx_patterns.png")
print(f"\nwritten: {OUTPUT / 'einx_patterns.png'}")
figure

# %% [markdown]
# ## Speed
#
# Both forms and the fused kernel of torch (`impl="sdpa"`, the default of the library), forward, with the same weights,
# on a small map and a larger one, on one thread. They are measured in turns, and each round gives the ratio to the
# fused block; what is printed is the median and, in brackets, the middle half of the rounds. It depends on your
# machine, and nothing is asserted about it.

# %%
timed = {"fused": va.Attention2d(64, 8), "bmm": BmmAttention(64, 8), "einx": EinxAttention(64, 8)}
for block in timed.values():
    block.load_state_dict(timed["fused"].state_dict(), strict=True)
    block.float()

print(f"\n{'time, as a multiple of the fused block':<40} {'bmm':<20} einx")
for batch, side in ((4, 8), (1, 24)):
    x = torch.randn(batch, 64, side, side, dtype=torch.float32)
    timers = {name: Timer("block(x)", globals={"block": block, "x": x}) for name, block in timed.items()}
    with torch.inference_mode():
        rounds = [
            {name: timer.blocked_autorange(min_run_time=0.01).mean for name, timer in timers.items()} for _ in range(9)
        ]
    cells = []
    for name in ("bmm", "einx"):
        low, middle, high = quantiles([times[name] / times["fused"] for times in rounds], n=4)
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    print(f"{f'{side}×{side}, 64 channels, batch {batch}':<40} {cells[0]:<20} {cells[1]}")

# %% [markdown]
# The first call is another matter: for shapes that einx has not met it makes new functions. Below, three sizes of map
# are each given to both forms twice. Importing einx comes on top, once in a process.


# %%
def seconds_of(block, x):
    began = time.perf_counter()
    block(x)
    return time.perf_counter() - began


with torch.inference_mode():
    inputs = [torch.randn(1, 64, 8, width, dtype=torch.float32) for width in range(9, 12)]
    first_to_later = {}
    for name in ("bmm", "einx"):
        first, later = ([seconds_of(timed[name], x) for x in inputs] for _ in range(2))
        first_to_later[name] = median(first) / median(later)
print("\nthe first call at a size, in later calls: bmm {bmm:.0f}, einx {einx:.0f}".format(**first_to_later))
print(f"importing einx, in later calls of the einx form: {seconds_to_import / median(later):.0f}")

# %% [markdown]
# ## When a size is wrong


# %%
def report(mistake, in_einx, in_bmm):
    messages = said(in_einx), said(in_bmm)
    print("\n{}\n  einx:\n{}\n  torch:\n{}".format(mistake, *(textwrap.indent(text, "    ") for text in messages)))
    return messages


# %% [markdown]
# **A map whose sides are no multiples of the window**, 8×6 in windows of 4. einx prints the equation that has no
# solution, with the names on one side and the sizes on the other. `view` says how many numbers there are.

# %%
maps = torch.arange(8 * 6).view(1, 1, 1, 8, 6)
no_multiple = partial(einx.id, WINDOW, maps, h=4, w=4), partial(maps.view, 1, 1, 1, 8 // 4, 4, 6 // 4, 4)

from_einx, from_torch = report("a map of 8×6 in windows of 4", *no_multiple)
assert "b n d (gh h) (gw w) = 1 1 1 8 6\n    h = 4\n    w = 4" in from_einx
assert from_torch == "shape '[1, 1, 1, 2, 4, 1, 4]' is invalid for input of size 48"

# %% [markdown]
# `view` fills in a size that is written as `-1`. Left so, the number of windows along the height becomes three, where
# there is room for two, and the first of them does not hold 4 rows and 4 columns, but the first 16 positions in
# memory.

# %%
left_open = partial(maps.view, 1, 1, 1, -1, 4, 6 // 4, 4)
assert left_open().shape[3] == 3
first = left_open()[0, 0, 0, 0, :, 0]
rows, columns = (first // 6).unique().tolist(), (first % 6).unique().tolist()
assert (rows, columns) == ([0, 1, 2], [0, 1, 2, 3, 4, 5])
print(f"\nwith -1 in the view there is no error; the first window of 4×4 holds rows {rows} and columns {columns}")

# %% [markdown]
# **A wrong number of channels**, 35 in the place of 36.

# %%
too_few = qkv[:, 1:].contiguous()
channels = (
    partial(einx.id, "b (qkv n d) h w -> qkv b n (h w) d", too_few, qkv=3, n=n),
    partial(too_few.view, b, 3, n, d, -1),
)

from_einx, from_torch = report("35 channels for 36", *channels)
assert "b (qkv n d) h w = 2 35 5 7\n    qkv = 3\n    n = 3" in from_einx
assert from_torch == "shape '[2, 3, 3, 4, -1]' is invalid for input of size 2450"

# %% [markdown]
# **A misspelt axis**, `k` for `j`: einx marks the name that it cannot place. The bmm form has no names; what comes
# nearest is a wrong number, and `permute` says only that one stands there twice.

# %%
misspelt = (
    partial(einx.dot, "b n i d, b n k d -> b n i j", q, k),
    partial(qkv.view(b, 3, n, d, -1).permute, 1, 0, 2, 4, 4),
)

from_einx, from_torch = report("an axis misspelt, a number mistaken", *misspelt)
assert "size of the axis j" in from_einx
assert "^" in from_einx
assert "duplicate dims are not allowed" in from_torch

# %% [markdown]
# einx has a blind spot here: a size given to a name that is in no axis is passed over. It shows only if another size
# then stays unknown.

# %%
assert torch.equal(einx.id("b n (h w) d -> b (n d) h w", y, h=h, head_width=99), merged)
assert "axes d, n" in said(lambda: einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, heads=n))

# %% [markdown]
# ## What is refused, and what is computed without a word
#
# The mistakes so far and some more, in both forms. Where one is not refused, `outcome` asserts that the result has as
# many numbers as the right one, where there is a right one, and other ones. `silent` in the table is the bad case.


# %%
def outcome(call, right):
    try:
        result = call().flatten()
    except (einx.errors.EinxError, RuntimeError):
        return "refused"
    assert right is None or len(result) == right.numel()
    assert right is None or not torch.allclose(result, right.flatten())
    return "silent"


def check(mistake, in_einx, in_bmm, *, right=None, expected):
    assert (outcome(in_einx, right), outcome(in_bmm, right)) == expected
    print("{:<42} {:<9} {}".format(mistake, *expected))


print(f"\n{'mistake':<42} {'einx':<9} bmm")
check("a map that is no multiple of the window", *no_multiple, expected=("refused", "refused"))
check("the same, one size left open", no_multiple[0], left_open, expected=("refused", "silent"))
check("35 channels for 36", *channels, expected=("refused", "refused"))
check("an axis misspelt, a number mistaken", *misspelt, expected=("refused", "refused"))

# %% [markdown]
# *Memory read in another order than it was written in*: keys viewed as `(d, j)` where they should be transposed, and
# the heads merged on the way back without `permute`. einx has no line that does so; the nearest mistakes are these.

# %%
check(
    "keys viewed, not transposed",
    lambda: einx.dot("b n i d, b n d j -> b n i j", q, k),
    lambda: torch.bmm(q_bmm, k_bmm.reshape(b * n, d, h * w)),
    right=torch.bmm(q_bmm, k_bmm.transpose(1, 2)),
    expected=("refused", "silent"),
)
check(
    "merged without permute; width forgotten",
    lambda: einx.id("b n (h w) d -> b n h w", y, h=h),
    lambda: y_bmm.reshape(b, c, h, w),
    right=merged,
    expected=("refused", "silent"),
)

# %% [markdown]
# *The right axes in a wrong order.* einx does what the names say, and they say something else than was meant.

# %%
check(
    "heads and width exchanged",
    lambda: einx.id("b (qkv d n) h w -> qkv b n (h w) d", qkv, qkv=3, n=n),
    lambda: qkv.view(b, 3, d, n, h * w).permute(1, 0, 3, 4, 2),
    right=torch.stack([q, k, v]),
    expected=("silent", "silent"),
)
check(
    "height and width of the map exchanged",
    lambda: einx.id("b n (w h) d -> b (n d) h w", y, h=h),
    lambda: y_bmm.view(b, n, w, h, d).permute(0, 1, 4, 3, 2).reshape(b, c, h, w),
    right=merged,
    expected=("silent", "silent"),
)
check(
    "softmax over the queries",
    lambda: einx.softmax("b n [i] j", logits),
    lambda: torch.softmax(logits_bmm, dim=1),
    right=weights,
    expected=("silent", "silent"),
)

# %% [markdown]
# So einx refuses a size that contradicts another one, and a name that comes from nowhere or is lost on the way. Names
# in a wrong order it does not notice, no more than bmm does: only a comparison with another form finds them, as in the
# first half of this page.
#
# ## Which one, then
#
# To read attention, and to change its layout: einx, in which an edit is one string, and a wrong size is reported with
# the names of the axes. To export for any size, or where the first call at a new size must be quick: torch, with the
# order of the axes written out. In the library it is not a decision: the same state dict runs either way, `pattern=`
# takes the line, and the fused kernel runs on the groups that the line makes.
