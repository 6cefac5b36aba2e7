# %% [markdown]
# # One attention block, written with einx and with torch.bmm
#
# This tutorial writes spatial multi-head attention in two ways: with named axes (einx), and with numbered axes (`view`,
# `permute`, `torch.bmm`). It compares the two line by line, changes the layout of both to windows, grids and
# three-dimensional feature maps, and shows which mistakes each of them detects. At the end you can write a custom
# attention pattern in one line.
#
# You need to know NumPy and 1×1 convolutions. The definition of attention is given below.
#
#     python examples/einx_vs_bmm.py
#
# The script takes about ten seconds.

# %%
import time

start = time.perf_counter()
import einx

import_seconds = time.perf_counter() - start
import torch

# %% [markdown]
# ## Attention, twice
#
# The same attention in einx, which names every axis, and in torch, which numbers them:

# %%
b, n, i, d = 2, 8, 196, 32  # batch, heads, query tokens (key tokens: j), width of a head
q, k, v = torch.randn(3, b, n, i, d)

logits = einx.dot("b n i d, b n j d -> b n i j", q, k)
weights = einx.softmax("b n i [j]", d**-0.5 * logits)
y = einx.dot("b n i j, b n j d -> b n i d", weights, v)

logits = torch.bmm(q.view(b * n, i, d), k.view(b * n, i, d).transpose(1, 2))
weights = torch.softmax(d**-0.5 * logits, dim=-1)
torch.testing.assert_close(y, torch.bmm(weights, v.view(b * n, i, d)).view(b, n, i, d))

# %% [markdown]
# The rest of this tutorial uses these modules, and float64.

# %%
import ast
import difflib
import inspect
import re
import textwrap
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch.nn.functional as F
from matplotlib.colors import ListedColormap
from torch import nn
from torch.testing import assert_close
from torch.utils.benchmark import Timer

import vision_attn as va
from vision_attn.attention.patterns import resolve_pattern
from vision_attn.networks.capture.figures import Figure, save_figure

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # so that equal results agree up to the last digits

# %% [markdown]
# ## The block
#
# A feature map has `b` images, `c` channels, the height `h` and the width `w`. Each position is a *token*, a vector of
# `c` numbers. A 1×1 convolution computes a query, a key and a value for each token. Their channels are split into `n`
# *heads* of width `d`, which are computed independently. In each head, the *logit* of query token `i` and key token `j`
# is `q_i · k_j / √d`. Softmax over `j` turns the logits into *weights*, which are positive and sum to 1. The output at
# `i` is the sum of the values, multiplied by these weights. A second 1×1 convolution combines the heads. In this
# tutorial, `h` always is a height, of the feature map or of a window, and never the number of heads.
#
# einx takes a string that names every axis of the inputs and of the output, and derives the operation from it. Three
# rules are enough to read all strings in this tutorial.
#
# **Parentheses ( ) combine several axes into one.** `(n d)` is one axis of length `n·d`, in which `d` varies faster. On
# the left side of the arrow the axis is split, on the right side the axes are merged.

# %%
one = torch.arange(6)
assert einx.id("(n d) -> n d", one, n=2).tolist() == [[0, 1, 2], [3, 4, 5]]
assert einx.id("(n d) -> (d n)", one, n=2).tolist() == [0, 3, 1, 4, 2, 5]

# %% [markdown]
# **Sizes are inferred.** In the example above, `n=2` is given and `d` is not; an axis of length 6 implies `d=3`. A size
# that cannot be inferred must be passed, and a size that contradicts the shape raises an error. `einx.matches` returns
# whether names and sizes fit a tensor.

# %%
assert einx.matches("(n d)", one, n=2, d=3)
assert not einx.matches("(n d)", one, n=4)

# %% [markdown]
# **Brackets [ ] mark the axes that a function is applied to.** `einx.softmax("i [j]", x)` computes a softmax over `j`
# for every `i`. `einx.id` only rearranges axes and needs no brackets. In `einx.dot`, an axis that occurs in both inputs
# and not in the output is summed over, and the brackets may be omitted. (Texts about einx 0.3 use `einx.rearrange` for
# `einx.id`.)

# %%
x = torch.randn(3, 5)
assert_close(einx.softmax("i [j]", x).sum(dim=1), torch.ones(3))
assert_close(einx.dot("i j, k j -> i k", x, x), x @ x.T)
assert_close(einx.dot("i [j], k [j] -> i k", x, x), x @ x.T)

# %% [markdown]
# ## The two implementations
#
# Both implementations use the same two convolutions and therefore have the same state dict. The output channels of
# `qkv` are ordered as `(qkv n d)`: all queries, then all keys, then all values, each ordered by head.


# %%
class Projections(nn.Module):
    """The two 1×1 convolutions of an attention block."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (channels // num_heads) ** -0.5
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)


class EinxAttention(Projections):
    def forward(self, x):
        _, _, h, _ = x.shape  # (b, c, h, w)
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
        qkv = self.qkv(x).view(b, 3, n, d, h * w).permute(1, 0, 2, 4, 3)  # (3, b, n, h·w, d)
        q, k, v = qkv.reshape(3, b * n, h * w, d)  # (b·n, h·w, d) each
        logits = torch.bmm(q, k.transpose(1, 2)) * self.scale  # (b·n, h·w, h·w)
        weights = torch.softmax(logits, dim=2)
        y = torch.bmm(weights, v).view(b, n, h * w, d).permute(0, 1, 3, 2)  # (b, n, d, h·w)
        return self.proj(y.reshape(b, c, h, w))


# %% [markdown]
# ## Line by line
#
# The following cells run the five steps of both implementations on the same tensors. `b`, `n`, `d`, `h` and `w` have
# different sizes, so that no axis can be mistaken for another. After each step, `compare` asserts that the axes have
# the expected names and that both tensors contain the same numbers in the same order, and prints the shapes.

# %%
b, n, d, h, w = 2, 3, 4, 5, 7
c = n * d
assert len({b, n, d, h, w}) == 5
SIZES = {"qkv": 3, "b": b, "n": n, "d": d, "h": h, "w": w, "i": h * w, "j": h * w}


def compare(step, axes_einx, einx_result, axes_bmm, bmm_result):
    assert einx.matches(axes_einx, einx_result, **SIZES)
    assert einx.matches(axes_bmm, bmm_result, **SIZES)
    assert_close(einx_result.flatten(), bmm_result.flatten())
    pairs = (axes_einx, einx_result), (axes_bmm, bmm_result)
    shapes = [f"{names} = {' '.join(map(str, result.shape))}" for names, result in pairs]
    print(f"{step:<9} {shapes[0]:<35} {shapes[1]}")


einx_block, bmm_block = EinxAttention(c, n), BmmAttention(c, n)
bmm_block.load_state_dict(einx_block.state_dict(), strict=True)
x = torch.randn(b, c, h, w)
qkv = einx_block.qkv(x).detach()
print(f"{'step':<9} {'einx':<35} bmm")

# %% [markdown]
# **Split.** The channel axis is split into three axes, and the two spatial axes are merged into one. einx needs only
# the two sizes that cannot be inferred. In the bmm version, `view` splits the channels, `permute` lists the old axis
# numbers in the new order, and `reshape`, which copies the data, merges the heads into the batch, because `torch.bmm`
# has one batch axis.

# %%
q, k, v = einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, n=n)

qkv_bmm = qkv.view(b, 3, n, d, h * w).permute(1, 0, 2, 4, 3)
q_bmm, k_bmm, v_bmm = qkv_bmm.reshape(3, b * n, h * w, d)
assert qkv_bmm.data_ptr() == qkv.data_ptr() != q_bmm.data_ptr()

for name, einx_result, bmm_result in (("q", q, q_bmm), ("k", k, k_bmm), ("v", v, v_bmm)):
    compare(f"split, {name}", "b n (h w) d", einx_result, "(b n) (h w) d", bmm_result)

# %% [markdown]
# **Logits.** Queries and keys are the same tokens under two names, `i` and `j`, and the sum runs over `d`. `torch.bmm`
# sums over the last axis of its first argument and the middle axis of its second argument, so the keys are transposed.

# %%
logits = einx.dot("b n i d, b n j d -> b n i j", q, k) * d**-0.5

logits_bmm = torch.bmm(q_bmm, k_bmm.transpose(1, 2)) * d**-0.5

compare("logits", "b n i j", logits, "(b n) i j", logits_bmm)

# %% [markdown]
# **Softmax.** The softmax runs over the keys: `[j]` in einx, `dim=2` in torch.

# %%
weights = einx.softmax("b n i [j]", logits)

weights_bmm = torch.softmax(logits_bmm, dim=2)

assert (weights > 0).all()
assert_close(weights.sum(dim=3), torch.ones(b, n, h * w))
compare("softmax", "b n i j", weights, "(b n) i j", weights_bmm)

# %% [markdown]
# **Weighted values.** The sum runs over `j`.

# %%
y = einx.dot("b n i j, b n j d -> b n i d", weights, v)

y_bmm = torch.bmm(weights_bmm, v_bmm)

compare("values", "b n i d", y, "(b n) i d", y_bmm)

# %% [markdown]
# **Merge.** This step reverses the split. The argument `h=h` determines how the tokens are split into rows; `w`, `n`
# and `d` are inferred. The bmm version separates the heads from the batch, moves the width in front of the tokens, and
# copies the data.

# %%
merged = einx.id("b n (h w) d -> b (n d) h w", y, h=h)

merged_bmm = y_bmm.view(b, n, h * w, d).permute(0, 1, 3, 2).reshape(b, c, h, w)

assert merged_bmm.data_ptr() != y_bmm.data_ptr()
compare("merge", "b (n d) h w", merged, "b (n d) h w", merged_bmm)

# %% [markdown]
# ## The complete modules are equal
#
# The outputs of the two modules agree, and so do the gradients of every parameter and of the input.


# %%
def output_and_gradients(block):
    inputs = {"x": x.clone().requires_grad_(), **dict(block.named_parameters())}
    output = block(inputs["x"])
    loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    return {"output": output, **dict(zip(inputs, torch.autograd.grad(loss, inputs.values()), strict=True))}


expected = output_and_gradients(bmm_block)
assert_close(output_and_gradients(einx_block), expected)
print("\nequal in both versions: the output and the gradients of", ", ".join(list(expected)[1:]))

# %% [markdown]
# Both outputs also agree with torch's fused attention between the same convolutions, and with `va.Attention2d`, which
# loads the same state dict, for each of its implementations. `impl="flex"` is left out because FlexAttention does not
# support float64.

# %%
with torch.no_grad():
    fused = einx.id("b n (h w) d -> b (n d) h w", F.scaled_dot_product_attention(q, k, v), h=h)
    assert_close(einx_block.proj(fused), expected["output"])
    block = va.Attention2d(c, n)
    block.load_state_dict(einx_block.state_dict(), strict=True)
    impls = [impl for impl in va.implementations.IMPLS if impl != "flex"]
    for impl in impls:
        with va.use_impl(block, impl):
            assert_close(block(x), expected["output"])
assert_close(output_and_gradients(block), expected)
print("The output also equals F.scaled_dot_product_attention and va.Attention2d with impl =", ", ".join(impls))

# %% [markdown]
# ## What einx runs
#
# einx compiles a string and the shapes of its inputs to a Python function. With `graph=True` it returns the code of
# this function instead of calling it. For the first line of the block, the function consists of the same three
# operations as the bmm version: a view, a permutation and a reshape. The sizes are constants in the code, so einx
# generates a new function for every new shape.

# %%
code = einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, n=n, graph=True)
generated = {}
exec(code, generated)
assert torch.equal(generated["op"](qkv), torch.stack([q, k, v]))
assert re.findall(r"torch\.(\w+)\(", code) == ["reshape", "permute", "reshape"]
assert f"({b}, 3, {n}, {d}, {h}, {w})" in code
assert code != einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv[..., 1:], qkv=3, n=n, graph=True)
print(f"\nThe function that einx generates for the first line:\n{textwrap.indent(code.strip(), '    ')}")

# %% [markdown]
# ## Comparison

# %%
ROWS = """
topic              | einx                                        | bmm
batch              | `b`, a separate axis in every line          | merged with the heads, b * n, and split again
channels           | order stated in `(qkv n d)`                 | order of the arguments of view
heads              | `n`, size given once                        | at several axis numbers, once part of b * n
head width         | `d`, inferred                               | computed, c // n; at several axis numbers
space              | `h w`, as tokens `(h w)`                    | product h * w
rearrangement      | one string: before -> after                 | view, permute with axis numbers, reshape
contraction        | name that is missing in the output          | last axis with middle axis
softmax            | `[j]`                                       | dim=2
new layouts        | another string                              | other sizes and axis numbers, twice
readability        | axes named in every line                    | axes must be remembered
errors             | expression, axes and sizes                  | requested sizes and number of elements
dynamic shapes     | constants: an export has one size           | symbols: an export can have any size
"""
table = [[cell.strip() for cell in row.split("|")] for row in ROWS.strip().splitlines()]
print()
for row in table:
    print("{:<18} {:<44} {}".format(*row))

# %% [markdown]
# Batch, rearrangement, contraction and softmax were demonstrated above. The other rows follow one by one.
#
# *Channels.* Channel `d=3` of the keys in head `n=2` must be output channel `1·n·d + 2·d + 3` of the convolution,
# because the keys are the second of the three parts.

# %%
channel = 1 * n * d + 2 * d + 3
assert torch.equal(k[:, 2, :, 3], qkv[:, channel].flatten(1))
assert torch.equal(k_bmm.view(b, n, h * w, d)[:, 2, :, 3], qkv[:, channel].flatten(1))

# %% [markdown]
# *Heads and head width.* einx infers either of them from the other, and raises an error if both are missing.
# `message_of` returns the message of an error; for einx, only the part before the list of arguments.


# %%
def message_of(call):
    try:
        call()
    except (einx.errors.EinxError, RuntimeError) as error:
        return str(error).partition("The operation was called")[0].strip()
    raise AssertionError("no error was raised")


names = "b (qkv n d) h w"
assert einx.solve_axes(names, qkv, qkv=3, n=n)["d"] == d
assert einx.solve_axes(names, qkv, qkv=3, d=d)["n"] == n
message = message_of(lambda: einx.solve_axes(names, qkv, qkv=3))
assert "Failed to uniquely determine the size of the axes d, n" in message

# %% [markdown]
# *Space.* Tokens are in row-major order: the position in row `r` and column `s` is token `r·w + s`.

# %%
r, s = 3, 2
assert torch.equal(q[:, :, r * w + s].flatten(1), qkv[:, :c, r, s])

# %% [markdown]
# *Readability* cannot be asserted. It is possible, however, to count the numbers in the code that refer to an axis by
# its index: in `permute`, `transpose`, `softmax`, and after `.shape`.


# %%
def axis_numbers(code):
    """Return the axis numbers in Python code."""
    nodes = []
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("permute", "transpose", "softmax"):
            nodes += [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
            nodes.append(node.slice)
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int)]


counts = [len(axis_numbers(inspect.getsource(version.forward))) for version in (EinxAttention, BmmAttention)]
assert counts == [0, 12]
print("\naxis numbers in the two forward methods: einx {}, bmm {}".format(*counts))

# %% [markdown]
# *Dynamic shapes.* `torch.export` records a network as a graph, with symbols for the sizes that are declared as
# dynamic. The functions that einx generates contain the sizes as constants, so the einx version can be exported for one
# size only. When the module is called directly, it accepts any size.


# %%
def can_export(block, dynamic_axes):
    """Return True if the block can be exported with dynamic axes and the export is correct for another size."""
    try:
        shapes = {"x": dict.fromkeys(dynamic_axes, torch.export.Dim.DYNAMIC)}
        exported = torch.export.export(block, (x,), dynamic_shapes=shapes).module()
        larger = torch.randn([length + (axis in dynamic_axes) for axis, length in enumerate(x.shape)])
        return torch.allclose(exported(larger), block(larger))
    except Exception:  # the type depends on the versions of torch and einx
        return False


with torch.no_grad():
    assert can_export(bmm_block, dynamic_axes=(0, 2, 3))
    assert can_export(einx_block, dynamic_axes=())
    assert not can_export(einx_block, dynamic_axes=(0, 2, 3))
    larger = torch.randn(b + 1, c, h + 1, w + 1)
    assert_close(einx_block(larger), bmm_block(larger))

# %% [markdown]
# Layouts and errors are covered in separate sections below, and so is speed, which is not in the table.
#
# ## New layouts in einx
#
# In full attention, every position attends to every position: there are `(h w)²` logits. A *pattern* divides the
# positions into *groups*: positions attend to each other only within a group. The groups become part of the batch axis,
# so each group is computed independently. The computation within a group is the same for all patterns and is written
# once for each implementation, as a function of the tensor between the two convolutions. The pattern is the argument
# `line`: an einx expression with `b n d` and the axes of the feature map on the left side.


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
# The ellipsis `...` represents the axes of the feature map, however many there are. The inverse operation is the same
# string with its two sides exchanged, `f"{tokens} -> {maps}"`. `einx.solve_axes` returns the size of every name,
# because the inverse cannot infer all of them.

# %%
WINDOW = "b n d (gh h) (gw w) -> (b gh gw) n (h w) d"
maps = torch.randn(2, 3, 4, 14, 21)
before, after = WINDOW.split(" -> ")
groups = einx.id(f"{before} -> {after}", maps, h=7, w=7)
sizes = einx.solve_axes(before, maps, h=7, w=7)
assert groups.shape == (2 * 2 * 3, 3, 49, 4)
assert torch.equal(einx.id(f"{after} -> {before}", groups, **sizes), maps)
print("\nsizes that einx infers in a feature map of 14×21 from h=7, w=7:", sizes)

# %% [markdown]
# In this line, `(gh h)` splits the height into `gh` windows of `h` rows. Because `h` varies faster, the positions of a
# window are adjacent. With the order exchanged, `(h gh)` and `(w gw)`, the groups are grids: a grid contains every
# `gh`-th row and every `gw`-th column. `gh` and `gw` are part of the batch axis, so positions of different windows do
# not attend to each other. These are the edits in einx:


# %%
def einx_full(qkv, n):
    return attend_einx(qkv, n, "b n d h w -> b n (h w) d")


def einx_window(qkv, n, side):
    return attend_einx(qkv, n, "b n d (gh h) (gw w) -> (b gh gw) n (h w) d", h=side, w=side)


def einx_grid(qkv, n, side):
    return attend_einx(qkv, n, "b n d (h gh) (w gw) -> (b gh gw) n (h w) d", h=side, w=side)


# %% [markdown]
# Three-dimensional feature maps of videos or volumes have one more axis, `t`.


# %%
def einx_volume(qkv, n):
    return attend_einx(qkv, n, "b n d t h w -> b n (t h w) d")


def einx_volume_window(qkv, n, side):
    return attend_einx(qkv, n, "b n d (gt t) (gh h) (gw w) -> (b gt gh gw) n (t h w) d", t=side, h=side, w=side)


# %% [markdown]
# ## New layouts in bmm
#
# The same five patterns follow with numbered axes. The computation within a group is again written once.


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
# The two functions of each pair return the same output, which also equals the output of the library's block with this
# pattern and the same parameters. The parameters of the two-dimensional block also serve for three dimensions, with one
# more axis of length 1 in each kernel.

# %%
state = block.state_dict()
state_3d = {name: value[..., None] if value.ndim == 4 else value for name, value in state.items()}
map_2d, map_3d = torch.randn(2, c, 14, 21), torch.randn(2, c, 4, 6, 8)
PAIRS = {
    "full": (einx_full, bmm_full, va.Attention2d(c, n)),
    "windows": (partial(einx_window, side=7), partial(bmm_window, side=7), va.Attention2d(c, n, pattern=va.Window(7))),
    "grids": (partial(einx_grid, side=7), partial(bmm_grid, side=7), va.Attention2d(c, n, pattern=va.Grid(7))),
    "volumes": (einx_volume, bmm_volume, va.blocks.Attention3d(c, n)),
    "windows in volumes": (
        partial(einx_volume_window, side=2),
        partial(bmm_volume_window, side=2),
        va.blocks.Attention3d(c, n, pattern=va.Window(2)),
    ),
}

with torch.no_grad():
    for with_einx, with_bmm, library_block in PAIRS.values():
        volume = isinstance(library_block, va.blocks.Attention3d)
        library_block.load_state_dict(state_3d if volume else state, strict=True)
        x = map_3d if volume else map_2d
        expected = library_block(x)
        assert_close(library_block.proj(with_einx(library_block.qkv(x), n)), expected)
        assert_close(library_block.proj(with_bmm(library_block.qkv(x), n)), expected)
print("\nequal in einx, in bmm and in the library:", ", ".join(PAIRS))

# %% [markdown]
# ## What an edit costs
#
# The next cell prints the difference between the source code of full attention and of windows: `-` marks removed lines
# and `+` marks added lines.


# %%
def changed_lines(before, after, mark):
    """Return the lines of two function bodies that were removed, with mark "-", or added, with mark "+"."""
    bodies = [inspect.getsource(function).splitlines()[1:] for function in (before, after)]
    return [line[2:].strip() for line in difflib.ndiff(*bodies) if line.startswith(mark)]


for version, before, after in (("einx", einx_full, einx_window), ("bmm", bmm_full, bmm_window)):
    print(f"\nfull attention to windows in {version}:")
    for mark in "-+":
        print("\n".join(f"  {mark} {line}" for line in changed_lines(before, after, mark)))

# %% [markdown]
# The table counts, for every edit, the added lines and the axis numbers in them. Signatures are not counted; they
# change in the same way in both versions. In einx, each edit is one line without an axis number. From full attention to
# volumes, the bmm version needs no new axis numbers either, because it multiplies the sides of the feature map anyway.

# %%
EDITS = {
    "full to windows": ((einx_full, einx_window), (bmm_full, bmm_window)),
    "windows to grids": ((einx_window, einx_grid), (bmm_window, bmm_grid)),
    "full to volumes": ((einx_full, einx_volume), (bmm_full, bmm_volume)),
    "volumes to windows in volumes": ((einx_volume, einx_volume_window), (bmm_volume, bmm_volume_window)),
}


def cost(edit):
    lines = changed_lines(*edit, "+")
    return len(lines), sum(len(axis_numbers(line)) for line in lines)


print(f"\n{'edit':<30} einx: lines, axis numbers    bmm: lines, axis numbers")
for name, (einx_edit, bmm_edit) in EDITS.items():
    assert cost(einx_edit) == (1, 0)
    assert (cost(bmm_edit)[1] == 0) == (name == "full to volumes")
    print("{:<30} {:>11}{:>14} {:>14}{:>14}".format(name, *cost(einx_edit), *cost(bmm_edit)))

# %% [markdown]
# The table compares functions that are written by hand. A bmm version could also take the sizes for `view` and the
# order for `permute` as arguments, but these have to be derived for each pattern. They follow from the einx expression.
# The library therefore stores the expression and derives the torch code from it: `va.Window(7)` is a name for the
# expression of windows together with its sizes.

# %%
line = resolve_pattern(va.Window(7)).expand_to_rank(2).rearrangement
assert line.einx == WINDOW
assert torch.equal(eval(line.torch, {"maps": maps, **sizes}), groups)
print(f"\nva.Window(7)      {line.einx}\nin torch          {line.torch}")

# %% [markdown]
# The library also accepts feature maps whose sides are not multiples of the window. It pads them and masks the padding,
# so a window at the border computes full attention between its actual positions. In a feature map of 10×15 with windows
# of 7×7, the last three rows of the last column form one such window.

# %%
with torch.no_grad():
    x = torch.randn(2, c, 10, 15)
    full_block, window_block = PAIRS["full"][2], PAIRS["windows"][2]
    assert_close(window_block(x)[..., 7:, 14:], full_block(x[..., 7:, 14:]))

# %% [markdown]
# ## Exercise with solution
#
# *In a feature map of 14 rows and 21 columns, each position attends to every third column within its half of the rows.*
# The halves are contiguous like windows, so the height is `(g h)` with `g=2`. The columns are spread out as in a grid,
# so the width is `(w s)` with `s=3`. Positions in the other half, or with another remainder of the column number, must
# not be attended to: `g` and `s` become part of the batch.

# %%
CUSTOM = "b n d (g h) (w s) -> (b g s) n (h w) d"
custom_block = va.Attention2d(c, n, pattern=va.Pattern(CUSTOM, g=2, s=3))
custom_block.load_state_dict(state, strict=True)
with torch.no_grad():
    expected = custom_block.proj(attend_einx(custom_block.qkv(map_2d), n, CUSTOM, g=2, s=3))
    assert_close(custom_block(map_2d), expected)
line = custom_block.resolved_pattern.rearrangement
print(f"the exercise      {line.einx}\nin torch          {line.torch}")

# %% [markdown]
# To find the positions that one position attends to, number all positions, apply the expression to the numbers as if
# they were a feature map, and select the group that contains the marked position. The attention weights of the
# library's blocks agree with the result, and so does a direct definition with the row and column numbers. Shifted
# windows, halos and neighborhoods are not one expression: their positions are those with a positive weight.


# %%
def attended(line, marked, **sizes):
    """Return a mask of the positions, ``(14, 21)``, that the marked position attends to."""
    numbers = torch.arange(14 * 21).view(1, 1, 1, 14, 21)
    groups = einx.id(line, numbers, **sizes)[:, 0, :, 0]
    return torch.isin(numbers, groups[(groups == marked).any(dim=1)]).view(14, 21)


EXPRESSIONS = {  # with its sizes, by the argument of the block
    'pattern="full"': ("b n d h w -> b n (h w) d", {}),
    'pattern="rows"': ("b n d h w -> (b h) n w d", {}),
    'pattern="columns"': ("b n d h w -> (b w) n h d", {}),
    "pattern=va.Window(7)": (WINDOW, {"h": 7, "w": 7}),
    "pattern=va.Grid(7)": ("b n d (h gh) (w gw) -> (b gh gw) n (h w) d", {"h": 7, "w": 7}),
    "pattern=va.Pattern(CUSTOM, g=2, s=3)": (CUSTOM, {"g": 2, "s": 3}),
}
OTHERS = ("pattern=va.Window(7, shift=3)", "pattern=va.Halo(7, halo_size=3)", "pattern=va.Neighborhood(7)")
row, column = 4, 10
marked = row * 21 + column


def weights_of(argument, maps):
    """Return the attention weights of the marked position, ``(14, 21)``, in the first head of a block."""
    block = eval(f"va.Attention2d(c, n, {argument})")
    return block.attention_weights(maps, queries=torch.tensor([marked]))[0, 0, 0].detach().view(14, 21)


masks = {argument: weights_of(argument, map_2d) > 0 for argument in (*EXPRESSIONS, *OTHERS)}
for argument, (line, sizes) in EXPRESSIONS.items():
    assert torch.equal(attended(line, marked, **sizes), masks[argument])
rows, columns = torch.arange(14)[:, None], torch.arange(21)
window, grid, custom, shifted, halo, neighborhood = list(masks.values())[3:]
assert torch.equal(window, (rows // 7 == row // 7) & (columns // 7 == column // 7))
assert torch.equal(grid, (rows % 2 == row % 2) & (columns % 3 == column % 3))
assert torch.equal(custom, (rows // 7 == row // 7) & (columns % 3 == column % 3))
assert torch.equal(shifted, ((rows + 4) // 7 == (row + 4) // 7) & ((columns + 4) // 7 == (column + 4) // 7))
assert torch.equal(halo, (rows < 10) & (columns >= 4) & (columns < 17))
assert torch.equal(neighborhood, ((rows - row).abs() <= 3) & ((columns - column).abs() <= 3))

# %% [markdown]
# A position encoding changes the attention weights by position. On a feature map with the same features everywhere,
# attention without an encoding has equal weights, so the differences are due to the encoding. These blocks are not
# trained: a table has another random value for each offset, and its decomposed form is a sum over rows and columns.

# %%
POSITIONS = ("va.RelPosTable((14, 21))", "va.RelPosDecomposed((14, 21))", "va.AbsPos((14, 21))", "va.Rope()",
             "va.SinCos()", "va.ConditionalPos(3)")  # fmt: skip
same = torch.randn(1, c, 1, 1).expand(1, c, 14, 21)
torch.testing.assert_close(weights_of("", same), torch.full((14, 21), 1 / 294))
effects = {f"position={position}": weights_of(f"position={position}", same).log() for position in POSITIONS}

# %%
figure = Figure(figsize=(9.6, 13), layout="constrained")
figure.get_layout_engine().set(hspace=0.06, h_pad=0.06, w_pad=0.06)
axes = figure.subplots(5, 3, sharex=True, sharey=True)
order = sorted(masks, key=lambda argument: argument not in EXPRESSIONS or "CUSTOM" in argument)
for ax, argument in zip(axes.flat, (*order, *effects), strict=True):
    if argument in masks:
        shown = masks[argument].int()
        shown[row, column] = 2
        colors = ListedColormap(["#e6e6e6", "#0072b2", "#e69f00"])
        ax.pcolormesh(shown.numpy(), cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=0.6)
        line = EXPRESSIONS.get(argument, ("",))[0]
        ax.set_title(line.replace("CUSTOM", "…"), family="monospace", fontsize=8, loc="left")
    else:
        ax.pcolormesh(effects[argument].numpy(), cmap="Blues", edgecolors="white", linewidth=0.6)
        ax.plot(column + 0.5, row + 0.5, "s", color="#e69f00", ms=6)
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.set_xlabel(argument, family="monospace", fontsize=9)
    for spine in ax.spines.values():
        spine.set_visible(False)
axes[0, 0].invert_yaxis()
title = "The orange position attends to itself and to the blue positions.\n"
title += "Last two rows: its weights for equal features, by position encoding"
figure.suptitle(title, fontsize=12, x=0.02, ha="left")
save_figure(figure, OUTPUT / "einx_patterns.png")
print(f"\nwritten: {OUTPUT / 'einx_patterns.png'}")
figure

# %% [markdown]
# ## Speed
#
# The next cell measures the forward pass of both versions and of torch's fused kernel (`impl="sdpa"`, the library's
# default) with the same parameters, on a small and a larger feature map, with one thread. The three are measured in
# turns, and each round yields a ratio to the fused block. The table contains the median of the ratios and, in
# parentheses, the interquartile range. The results depend on your machine, so nothing is asserted about them.

# %%
timed = {"fused": va.Attention2d(64, 8), "bmm": BmmAttention(64, 8), "einx": EinxAttention(64, 8)}
for block in timed.values():
    block.load_state_dict(timed["fused"].state_dict(), strict=True)
    block.float()

print(f"\n{'time relative to the fused block':<40} {'bmm':<20} einx")
for batch, side in ((4, 8), (1, 24)):
    x = torch.randn(batch, 64, side, side, dtype=torch.float32)
    timers = {name: Timer("block(x)", globals={"block": block, "x": x}) for name, block in timed.items()}
    with torch.inference_mode():
        rounds = [
            {name: timer.blocked_autorange(min_run_time=0.01).mean for name, timer in timers.items()} for _ in range(9)
        ]
    ratios = []
    for name in ("bmm", "einx"):
        low, middle, high = quantiles([times[name] / times["fused"] for times in rounds], n=4)
        ratios.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    print(f"{f'{side}×{side}, 64 channels, batch {batch}':<40} {ratios[0]:<20} {ratios[1]}")

# %% [markdown]
# The first call at a new size takes longer, because einx generates new functions for new shapes. Below, both versions
# are called twice for each of three sizes. Importing einx takes additional time, once per process.


# %%
def time_call(block, x):
    start = time.perf_counter()
    block(x)
    return time.perf_counter() - start


with torch.inference_mode():
    inputs = [torch.randn(1, 64, 8, width, dtype=torch.float32) for width in range(9, 12)]
    first_to_later = {}
    for name in ("bmm", "einx"):
        first, later = ([time_call(timed[name], x) for x in inputs] for _ in range(2))
        first_to_later[name] = median(first) / median(later)
print("\ntime relative to later calls at the same size")
print("  the first call: bmm {bmm:.0f}, einx {einx:.0f}".format(**first_to_later))
print(f"  importing einx: {import_seconds / median(later):.0f}")

# %% [markdown]
# ## Errors for wrong sizes


# %%
def report(mistake, with_einx, with_torch):
    messages = message_of(with_einx), message_of(with_torch)
    print("\n{}\n  einx:\n{}\n  torch:\n{}".format(mistake, *(textwrap.indent(text, "    ") for text in messages)))
    return messages


# %% [markdown]
# **A feature map whose sides are not multiples of the window**, 8×6 with windows of 4. einx prints the equation that
# has no solution, with the names on one side and the sizes on the other. `view` prints the number of elements.

# %%
maps = torch.arange(8 * 6).view(1, 1, 1, 8, 6)
not_multiple = partial(einx.id, WINDOW, maps, h=4, w=4), partial(maps.view, 1, 1, 1, 8 // 4, 4, 6 // 4, 4)

from_einx, from_torch = report("a feature map of 8×6 in windows of 4", *not_multiple)
assert "b n d (gh h) (gw w) = 1 1 1 8 6\n    h = 4\n    w = 4" in from_einx
assert from_torch == "shape '[1, 1, 1, 2, 4, 1, 4]' is invalid for input of size 48"

# %% [markdown]
# `view` infers a size that is given as `-1`. With `-1`, the number of windows along the height becomes three, although
# only two windows fit, and the first window no longer holds 4 rows and 4 columns, but the first 16 positions in memory.

# %%
inferred = partial(maps.view, 1, 1, 1, -1, 4, 6 // 4, 4)
assert inferred().shape[3] == 3
first = inferred()[0, 0, 0, 0, :, 0]
rows, columns = (first // 6).unique().tolist(), (first % 6).unique().tolist()
assert (rows, columns) == ([0, 1, 2], [0, 1, 2, 3, 4, 5])
print(f"\nWith -1 in view there is no error; the first window of 4×4 contains rows {rows} and columns {columns}.")

# %% [markdown]
# **A wrong number of channels**, 35 instead of 36.

# %%
too_few = qkv[:, 1:].contiguous()
channels = (
    partial(einx.id, "b (qkv n d) h w -> qkv b n (h w) d", too_few, qkv=3, n=n),
    partial(too_few.view, b, 3, n, d, -1),
)

from_einx, from_torch = report("35 channels instead of 36", *channels)
assert "b (qkv n d) h w = 2 35 5 7\n    qkv = 3\n    n = 3" in from_einx
assert from_torch == "shape '[2, 3, 3, 4, -1]' is invalid for input of size 2450"

# %% [markdown]
# **A misspelled axis**, `k` instead of `j`: einx marks the name that it cannot resolve. The bmm version has no names;
# the closest mistake is a wrong axis number, and `permute` only reports that a number occurs twice.

# %%
misspelled = (
    partial(einx.dot, "b n i d, b n k d -> b n i j", q, k),
    partial(qkv.view(b, 3, n, d, -1).permute, 1, 0, 2, 4, 4),
)

from_einx, from_torch = report("a misspelled axis, a wrong axis number", *misspelled)
assert "size of the axis j" in from_einx
assert "^" in from_einx
assert "duplicate dims are not allowed" in from_torch

# %% [markdown]
# einx does not detect every misspelling: a size for a name that occurs in no axis is ignored. The mistake is detected
# only if another size then remains unknown.

# %%
assert torch.equal(einx.id("b n (h w) d -> b (n d) h w", y, h=h, head_width=99), merged)
assert "axes d, n" in message_of(lambda: einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, heads=n))

# %% [markdown]
# ## Detected and undetected mistakes
#
# The table contains the mistakes from above and some more, for both versions. If a mistake raises no error, `outcome`
# asserts that the result has the same number of elements as the correct result, where there is one, and different
# values. `undetected` is the dangerous case.


# %%
def outcome(call, correct):
    try:
        result = call().flatten()
    except (einx.errors.EinxError, RuntimeError):
        return "error"
    assert correct is None or len(result) == correct.numel()
    assert correct is None or not torch.allclose(result, correct.flatten())
    return "undetected"


def check(mistake, with_einx, with_bmm, *, correct=None, expected):
    assert (outcome(with_einx, correct), outcome(with_bmm, correct)) == expected
    print("{:<48} {:<11} {}".format(mistake, *expected))


print(f"\n{'mistake':<48} {'einx':<11} bmm")
check("sides not multiples of the window", *not_multiple, expected=("error", "error"))
check("sides not multiples of the window, -1 in view", not_multiple[0], inferred, expected=("error", "undetected"))
check("35 channels instead of 36", *channels, expected=("error", "error"))
check("misspelled axis, wrong axis number", *misspelled, expected=("error", "error"))

# %% [markdown]
# *Memory is read in another order than it was written*: keys are viewed as `(d, j)` instead of being transposed, and
# heads are merged without `permute`. No einx expression does this; the table uses the most similar mistakes.

# %%
check(
    "keys reshaped instead of transposed",
    lambda: einx.dot("b n i d, b n d j -> b n i j", q, k),
    lambda: torch.bmm(q_bmm, k_bmm.reshape(b * n, d, h * w)),
    correct=torch.bmm(q_bmm, k_bmm.transpose(1, 2)),
    expected=("error", "undetected"),
)
check(
    "head width omitted (einx), no permute (bmm)",
    lambda: einx.id("b n (h w) d -> b n h w", y, h=h),
    lambda: y_bmm.reshape(b, c, h, w),
    correct=merged,
    expected=("error", "undetected"),
)

# %% [markdown]
# *The correct axes in the wrong order.* einx follows the names, which describe a valid but different operation.

# %%
check(
    "heads and head width exchanged",
    lambda: einx.id("b (qkv d n) h w -> qkv b n (h w) d", qkv, qkv=3, n=n),
    lambda: qkv.view(b, 3, d, n, h * w).permute(1, 0, 3, 4, 2),
    correct=torch.stack([q, k, v]),
    expected=("undetected", "undetected"),
)
check(
    "height and width of the feature map exchanged",
    lambda: einx.id("b n (w h) d -> b (n d) h w", y, h=h),
    lambda: y_bmm.view(b, n, w, h, d).permute(0, 1, 4, 3, 2).reshape(b, c, h, w),
    correct=merged,
    expected=("undetected", "undetected"),
)
check(
    "softmax over the queries",
    lambda: einx.softmax("b n [i] j", logits),
    lambda: torch.softmax(logits_bmm, dim=1),
    correct=weights,
    expected=("undetected", "undetected"),
)

# %% [markdown]
# In summary, einx raises an error for a size that contradicts another size, and for a name that is undefined or that
# disappears. It does not detect names in the wrong order, and neither does bmm. Only a comparison with another
# implementation finds these mistakes, as in the first half of this tutorial.
#
# ## Which one to use
#
# Use einx to read attention and to change its layout: an edit is one string, and the error for a wrong size contains
# the names of the axes. Use torch with explicit axis order to export a network for any size, or if the first call at a
# new size must be fast. With this library you do not have to choose: the same state dict runs with both, `pattern=`
# takes the einx expression, and the fused kernel processes the groups that the expression defines.
