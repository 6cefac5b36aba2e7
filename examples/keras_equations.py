# %% [markdown]
# # Attention along any axes of any tensor: the equations of Keras
#
# `keras.layers.MultiHeadAttention` attends over sequences, images or volumes, along all of their axes or some of them,
# with the same code: it generates its einsum equations when it is built and knows the number of axes. This tutorial
# explains how to write these equations and read them letter by letter, which pattern of this library corresponds to the
# `attention_axes` of a layer, and how to load the weights of such a layer into a block. You need to know NumPy, and
# that attention is `softmax(scale q kᵀ) v`.
#
#     python examples/keras_equations.py
#
# The script takes about five seconds, including two seconds to import Keras, and also runs without Keras. Keras uses
# one of several libraries as its backend, which an environment variable selects before the import; here it is torch.

# %%
import importlib
import os
import string
from itertools import combinations, islice, permutations, product
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from torch.testing import assert_close

import vision_attn as va
from vision_attn.convert import attention_equations, attention_pattern, projection_equation
from vision_attn.networks.capture.figures import Figure, save_figure

try:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
except ImportError:
    keras = None

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # rounding errors are then about 1e-15
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Rank: the number of axes
#
# The word has two meanings. In linear algebra, the rank of a matrix is the number of its linearly independent rows. In
# this tutorial, as in Keras, the rank of a tensor is the number of its axes, regardless of its values. In the table
# below, every row is a multiple of the first: its rank as a tensor is 2, and its rank as a matrix is 1.

# %%
table = np.outer([1, 2, 3], [1, 10, 100, 1000])
print(table)
print(f"axes: {table.ndim}   linearly independent rows: {np.linalg.matrix_rank(table)}\n")
assert (table.ndim, np.linalg.matrix_rank(table)) == (2, 1)

# %% [markdown]
# A batch of sequences `(b, w, c)` has rank 3, of feature maps `(b, h, w, c)` rank 4, and of volumes `(b, t, h, w, c)`
# rank 5. Here `b` is the batch, `t`, `h` and `w` are the position axes (time, height and width), and `c` are the
# channels. In Keras, and therefore in this tutorial, the channels are the last axis.

# %%
AXES = {"sequence": "bwc", "map": "bhwc", "volume": "bthwc"}
SIZES = {"b": 2, "t": 3, "h": 4, "w": 5, "c": 8, "n": 2, "d": 4}
inputs = {name: torch.randn([SIZES[axis] for axis in axes]) for name, axes in AXES.items()}
assert [x.dim() for x in inputs.values()] == [3, 4, 5]

# %% [markdown]
# ## One equation for one rank
#
# Attention starts with a projection: at each position, a kernel `(c, n, d)` turns the channels into `n` heads of width
# `d`. In einsum, each letter names one axis. A letter on both sides of the arrow is an axis that is kept. A letter that
# is missing on the right side is summed over, which is called contraction. The projection of a sequence is
# `bwc,cnd->bwnd`, and this equation accepts no other rank.

# %%
kernel = torch.randn(8, 2, 4)
assert torch.einsum("bwc,cnd->bwnd", inputs["sequence"], kernel).shape == (2, 5, 2, 4)
try:
    torch.einsum("bwc,cnd->bwnd", inputs["map"], kernel)
except RuntimeError as error:
    message = str(error)
assert "(3) does not match the number of dimensions (4)" in message
print(f"a feature map in the equation for sequences:\n    {message}\n")

# %% [markdown]
# The equation for any rank has three groups of letters, each of the required length:
#
#     free bound, bound output -> free output
#
# The *free* axes, batch and positions, are kept. The *bound* axes, the channels, are contracted. The *output* axes,
# heads and width, come from the kernel and replace the bound axes. Keras does not choose letters by their meaning, but
# takes them from the alphabet in order. From here on, this tutorial does the same: in `abc`, `a` is the first axis, the
# batch, and `b` is the second axis, a position.

# %%
letters = iter(string.ascii_lowercase)
free, bound, output = ("".join(islice(letters, count)) for count in (3, 1, 2))
equation = f"{free}{bound},{bound}{output}->{free}{output}"
print("projection of a feature map:", equation)
assert equation == "abcd,def->abcef"
assert torch.einsum(equation, inputs["map"], kernel).shape == (2, 4, 5, 2, 4)

# %% [markdown]
# `projection_equation` returns this equation, the letters of the bias, and the rank of the result. The bias has the
# letters of the output axes: a bias `(n, d)` is added along the last axes of the result. After attention, the output
# projection maps heads and width back to channels: it contracts two axes. Each of these projections is a matrix
# product, with the bound axes flattened to one axis and the output axes to another.

# %%
projections = {name: (axes, "c", "nd") for name, axes in AXES.items()}
projections["output, map"] = ("bhwnd", "nd", "c")
print(f"\n{'projection of':<16} {'free':>4} {'bound':>5} {'output':>6}   {'equation':<18} {'bias':<4}  rank")
for name, (axes, bound, output) in projections.items():
    counts = len(axes) - len(bound), len(bound), len(output)
    equation, bias, rank = projection_equation(*counts)
    x, kernel = (torch.randn([SIZES[axis] for axis in names]) for names in (axes, bound + output))
    y = torch.einsum(equation, x, kernel)
    matrix = kernel.flatten(len(bound)).flatten(0, len(bound) - 1)
    assert_close(y.flatten(-len(output)), x.flatten(-len(bound)) @ matrix)
    assert (y.dim(), len(bias)) == (rank, len(output))
    print(f"{name:<16} {counts[0]:>4} {counts[1]:>5} {counts[2]:>6}   {equation:<18} {bias:<4}  {rank}")

# %% [markdown]
# For a projection, einsum's ellipsis, which represents any number of axes, would be sufficient. Attention needs
# individual letters, because the keys have other letters than the queries along the attended axes, and these axes are a
# choice.

# %%
kernel = torch.randn(8, 2, 4)
with_ellipsis = torch.einsum("...c,cnd->...nd", inputs["map"], kernel)
assert_close(with_ellipsis, torch.einsum("abcd,def->abcef", inputs["map"], kernel))

# %% [markdown]
# ## Separate letters for keys, on the attended axes only
#
# Queries and keys of a sequence are `(b, w, n, d)`, four letters `abcd`. If the keys had the same letters, a query
# would be multiplied only with the key at its own position. The *logits* are the products of every query with every
# key, so the second axis of the keys needs a separate letter, the next unused one: `e`. It is kept in the result, as a
# second position axis. Keras writes the keys first in the equation, and the heads before both position axes in the
# result: `acbe`.

# %%
q, k = torch.randn(2, 2, 5, 2, 4)
logits = torch.einsum("aecd,abcd->acbe", k, q)
same_position = torch.einsum("abcd,abcd->acb", k, q)
assert logits.shape == (2, 2, 5, 5)  # batch, heads, queries, keys
assert_close(same_position, logits.diagonal(dim1=2, dim2=3))
assert attention_equations(rank=4, attention_axes=(1,))[0] == "aecd,abcd->acbe"

# %% [markdown]
# The queries and keys of a feature map, `(b, h, w, n, d)`, have two position axes, so there is a choice.
# `attention_axes` lists the axes with a second letter, counted from the batch, which is axis 0. `attention_equations`
# expects these axes and the rank after the projection, which is one more than the rank of the input. Along axis 1, `h`,
# the first of its two equations is:

# %%
ROLES = {
    (True, True, True): "shared: separate attention for each index",
    (True, True, False): "contracted: summed over in each product",
    (False, True, True): "positions of queries",
    (True, False, True): "positions of keys",
}


def explain(equation, axes):
    """Print one line per letter: its axis, the tensors that contain it, and its role."""
    tensors = equation.replace("->", ",").split(",")
    axis_of = {letter: axis for names in tensors[:2] for letter, axis in zip(names, axes, strict=True)}
    print(f"\n{equation}\naxis  key  query  logits  role")
    for letter in sorted(axis_of):
        occurs = tuple(letter in names for names in tensors)
        key, query, logits = (letter if found else "" for found in occurs)
        print(f"{axis_of[letter]:<4}  {key:<3}  {query:<5}  {logits:<6}  {ROLES[occurs]}")
    return [axis_of[letter] for letter in tensors[2]]


dot, combine, rank = attention_equations(rank=5, attention_axes=(1,))
assert explain(dot, "bhwnd") == ["b", "w", "n", "h", "h"]

# %% [markdown]
# The logits begin with the axes that queries and keys share: batch, `w` and heads. No query has a logit with a key of
# another `w`: this is attention within each column of the feature map, as if each column were a separate sequence.

# %%
q, k = torch.randn(2, *(2, 4, 5, 2, 4))  # b h w n d
columns = [torch.einsum("aecd,abcd->acbe", k[:, :, w], q[:, :, w]) for w in range(5)]
assert_close(torch.einsum(dot, k, q), torch.stack(columns, dim=1))

# %% [markdown]
# ## Softmax over several axes, and back to positions
#
# The last axes of the logits are the attended axes of the keys. The weights of one query must sum to 1 over all of its
# keys, so the softmax runs over all these axes together, which are flattened into one. A softmax over `w` followed by a
# softmax over `h` is a different operation: the weights of a query on a feature map of 4×5 then sum to 5.
#
# The second equation multiplies the weights with the values, contracts the letters of the keys, and restores the order
# of the query axes. With it, attention for any rank and any axes takes six lines. `scale` is `d ** -0.5`.


# %%
def attend(q, k, v, axes):
    dot, combine, rank = attention_equations(q.dim(), axes)
    logits = torch.einsum(dot, k, q) * q.shape[-1] ** -0.5
    first_key_axis = rank - len(axes)
    weights = logits.flatten(first_key_axis).softmax(-1).view_as(logits)
    return torch.einsum(combine, weights, v)


v = torch.randn(2, 4, 5, 2, 3)  # b h w n e, where the width of values, e, may differ from d
y = attend(q, k, v, axes=(1, 2))
assert y.shape == (2, 4, 5, 2, 3)
one_sequence = attend(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), axes=(1,))
assert_close(y.flatten(1, 2), one_sequence)  # attention along all axes treats all positions as one sequence

ones = torch.ones_like(v)
assert_close(attend(q, k, ones, axes=(1, 2)), ones)  # the weights sum to 1
logits = torch.einsum(attention_equations(5, (1, 2))[0], k, q)
assert_close(logits.softmax(-1).softmax(-2).sum((-2, -1)), torch.full((2, 2, 4, 5), 5.0))

# %% [markdown]
# The table lists both equations for every choice of axes, and the number of logits in one head for an input of 5, 4×5
# or 3×4×5 positions: the number of positions, multiplied by the number of positions that each of them attends to.


# %%
def choices(rank, orders=combinations):
    """Return every choice of attention axes: axes of the input that are neither batch nor channels."""
    positions = range(1, rank - 1)
    return [axes for count in positions for axes in orders(positions, count)]


print(f"\n{'input':<9} {'axes':<10} {'along':<5} {'key, query -> logits':<23}  {'weights, value -> y':<23} logits")
for name, axes in AXES.items():
    q = torch.zeros([1, *(SIZES[axis] for axis in axes[1:-1]), 1, 1])
    for chosen in choices(len(axes)):
        dot, combine, rank = attention_equations(q.dim(), chosen)
        along = "".join(axes[axis] for axis in chosen)
        count = torch.einsum(dot, q, q).numel()
        assert count == q.numel() * np.prod([SIZES[axis] for axis in along])
        print(f"{name:<9} {chosen!s:<10} {along:<5} {dot:<23}  {combine:<23} {count:>6}")

# %% [markdown]
# Axes may be passed in any order. The weights then have their axes in this order, and the output is the same. Negative
# axes are counted from the last axis. In these equations the last axis is `d`. A Keras layer, and `attention_pattern`
# below, count the axes of the input, whose last axis is `c`: -2 is the last position axis there, which is -3 here.

# %%
q, k, v = torch.randn(3, *(2, 4, 5, 2, 4))
assert attention_equations(5, (1, 2))[0] == "afgde,abcde->adbcfg"
assert attention_equations(5, (2, 1))[0] == "afgde,abcde->adcbgf"
assert_close(attend(q, k, v, (2, 1)), attend(q, k, v, (1, 2)))
assert attention_equations(5, (-3,)) == attention_equations(5, (2,))

# %% [markdown]
# ## Comparison with Keras
#
# The complete layer consists of three projections, attention, and the output projection. Its parameters are four
# kernels with one bias each, which are random here and have the shapes of Keras. Values may have a different width,
# `e`.


# %%
def layer_by_equations(query, key, value, parameters, axes):
    *projections, (kernel, bias) = parameters
    equation, _, _ = projection_equation(query.dim() - 1, 1, 2)
    projected = zip((query, key, value), projections, strict=True)
    q, k, v = (torch.einsum(equation, x, kernel) + bias for x, (kernel, bias) in projected)
    equation, _, _ = projection_equation(query.dim() - 1, 2, 1)
    return torch.einsum(equation, attend(q, k, v, axes), kernel) + bias


c, n, d, e = 8, 2, 3, 5
shapes = [((c, n, d), (n, d)), ((c, n, d), (n, d)), ((c, n, e), (n, e)), ((n, e, c), (c,))]
parameters = [(torch.randn(kernel) / 2, torch.randn(bias)) for kernel, bias in shapes]  # query, key, value, output

# %% [markdown]
# Keras generates its equations with two private functions. The functions of this library return the same equations for
# inputs of rank 3 to 6 and every choice of axes in every order.

# %%
if keras is None:
    print("\nKeras is not installed: its comparisons are skipped, here and at the end. Run: pip install keras")
else:
    builders = importlib.import_module("keras.src.layers.attention.multi_head_attention")
    ordered = [(rank + 1, axes) for rank in range(3, 7) for axes in choices(rank, orders=permutations)]
    for rank, axes in ordered:
        assert attention_equations(rank, axes) == builders._build_attention_equation(rank, axes)
    for counts in product(range(2, 6), (1, 2), (1, 2)):
        assert projection_equation(*counts) == builders._build_proj_equation(*counts)
    print(f"\nKeras {keras.__version__}: the same equations for {len(ordered)} choices of rank and axes")

# %% [markdown]
# The layer also computes the result of the equations. It is called with query, *value* and key, in this order; if the
# key is omitted, the value is used as key. The last assertion passes key and value in the other order: the result is
# different, and no error is raised.


# %%
def keras_layer(axes, shape):
    layer = keras.layers.MultiHeadAttention(n, d, value_dim=e, attention_axes=axes, dtype="float64")
    layer.build(shape, shape)
    layer.set_weights([tensor for pair in parameters for tensor in pair])
    return layer


if keras is not None:
    for name, axes in [("sequence", (1,)), ("map", (1,)), ("map", (2,)), ("map", (1, 2)), ("volume", (2, 3))]:
        query, key, value = torch.randn(3, *inputs[name].shape)
        layer = keras_layer(axes, query.shape)
        # With return_attention_scores, the layer uses its equations for sequences too, instead of a fused kernel.
        y, _ = layer(query, value, key, return_attention_scores=True)
        expected = layer_by_equations(query, key, value, parameters, axes)
        assert_close(y, expected)
        print(f"    {name:<8} axes {axes!s:<6}  largest difference {(y - expected).abs().max():.0e}")
    assert torch.equal(layer(query, value), layer(query, value, value))
    assert (layer(query, key, value) - expected).abs().max() > 0.01

# %% [markdown]
# ## Load the weights into a block
#
# A block of this library has one convolution for queries, keys and values, whose rows are ordered as (qkv, heads,
# width), and one convolution for the output. The kernels of Keras contain the same numbers with the channels first:
#
#     qkv.weight    flatten (c, n, d) to (c, n·d), transpose to (n·d, c); stack queries, keys, values vertically
#     qkv.bias      flatten (n, d) to n·d, in the same order
#     proj.weight   flatten (n, e, c) to (n·e, c), transpose to (c, n·e)


# %%
def state_dict_of(parameters, positions):
    *qkv, (out_kernel, out_bias) = parameters
    rows = torch.cat([kernel.flatten(1).T for kernel, _ in qkv])
    bias = torch.cat([bias.flatten() for _, bias in qkv])
    out_rows = out_kernel.flatten(0, 1).T
    rows, out_rows = (matrix[(...,) + (None,) * positions] for matrix in (rows, out_rows))  # 1×1 convolutions
    return {"qkv.weight": rows, "qkv.bias": bias, "proj.weight": out_rows, "proj.bias": out_bias}


def run(block, x):
    return block(x.movedim(-1, 1)).movedim(1, -1)  # in this library, channels are the second axis


block = va.Attention2d(c, n, key_dim=d, value_dim=e)
block.load_state_dict(state_dict_of(parameters, positions=2))
x = inputs["map"]
full = layer_by_equations(x, x, x, parameters, axes=(1, 2))
assert_close(run(block, x), full)
print("\n" + "\n".join(f"{name:<12} {tuple(tensor.shape)}" for name, tensor in block.state_dict().items()))

# %% [markdown]
# Shapes do not reveal a wrong order. If the width comes before the heads, all shapes fit and the weights load, but the
# block computes a different function. Only a comparison of outputs detects the mistake.

# %%
swapped = [(kernel.transpose(1, 2), bias.T) for kernel, bias in parameters[:3]]
block.load_state_dict(state_dict_of([*swapped, parameters[3]], positions=2))
error = (run(block, x) - full).abs().max()
assert error > 0.01
print(f"loaded with width before heads: no error is raised, but outputs differ by up to {error:.1f}\n")

# %% [markdown]
# ## Attention axes are patterns
#
# In this library, a *pattern* defines which positions attend to each other. It is a name or an einx expression that
# divides the feature map into groups of tokens: tokens attend to each other within their group only. The attended axes
# are the tokens, and all other axes are part of the groups. For a feature map, `(1,)` is attention within columns and
# `(2,)` within rows; attention along one axis is called axial attention. For a volume, `(2, 3)` is attention in space
# only and `(1,)` in time only. `attention_pattern` returns the pattern for a choice of axes. For every choice, the
# block with this pattern and the same weights agrees with the equations.

# %%
BLOCKS = {"sequence": va.blocks.Attention1d, "map": va.Attention2d, "volume": va.blocks.Attention3d}
print(f"{'input':<9} {'axes':<10} {'along':<6} pattern")
for name, axes in AXES.items():
    x = inputs[name]
    for chosen in choices(len(axes)):
        pattern = attention_pattern(chosen, rank=len(axes))
        block = BLOCKS[name](c, n, key_dim=d, value_dim=e, pattern=pattern)
        block.load_state_dict(state_dict_of(parameters, positions=len(axes) - 2))
        assert_close(run(block, x), layer_by_equations(x, x, x, parameters, chosen))
        print(f"{name:<9} {chosen!s:<10} {''.join(axes[axis] for axis in chosen):<6} {pattern}")

assert [attention_pattern(axes, rank=4) for axes in ((1,), (2,), (-2,), None)] == ["columns", "rows", "rows", "full"]

# %% [markdown]
# The equations also determine which positions one position attends to: the gradient of its output with respect to a
# value is zero if the position does not attend to this value.


# %%
def attended(size, axes, position):
    q, k = torch.zeros(2, 1, *size, 1, 1)
    v = torch.zeros_like(q, requires_grad=True)
    attend(q, k, v, axes)[0, *position].sum().backward()
    positions = (v.grad[0, ..., 0, 0] > 0).int()
    assert positions.sum() == np.prod([size[axis - 1] for axis in axes])
    positions[position] = 2
    return positions


# %% [markdown]
# The upper row of the figure shows a feature map, and the lower row the three frames of a volume. The query is at the
# orange position.

# %%
figure = Figure(figsize=(10, 3.8), layout="constrained")
figure.get_layout_engine().set(w_pad=0.1)
panels = figure.subplots(2, 3, height_ratios=(5, 3)).flat
labels = {"#e4e4e4": "not attended to", "#56b4e9": "attended to", "#d55e00": "query, which also attends to itself"}
chosen = [("map", (1,)), ("map", (2,)), ("map", (1, 2)), ("volume", (1,)), ("volume", (2, 3)), ("volume", (1, 3))]
for panel, (name, axes) in zip(panels, chosen, strict=True):
    names = AXES[name][1:-1]
    positions = attended([SIZES[axis] for axis in names], axes, position=(1, 1, 3)[-len(names) :])
    frames = positions.reshape(-1, *positions.shape[-2:])
    for t, frame in enumerate(frames):
        columns = np.arange(SIZES["w"] + 1) + t * (SIZES["w"] + 1)
        rows = np.arange(SIZES["h"] + 1)
        colors = ListedColormap(list(labels))
        panel.pcolormesh(columns, rows, frame, cmap=colors, vmin=0, vmax=2, edgecolors="white", linewidth=2)
    panel.set(aspect="equal", xticks=[], yticks=[], xlabel="w", frame_on=False)
    panel.set_ylabel("h", rotation=0, va="center")
    panel.invert_yaxis()
    if name == "volume":
        panel.set_xticks([2.5, 8.5, 14.5], ["t = 0", "t = 1", "t = 2"])
        panel.tick_params(length=0)
    along = " and ".join(names[axis - 1] for axis in axes)
    panel.set_title(f"{name}, axes {axes}: along {along}", fontsize=11)
handles = [Patch(color=color, label=label) for color, label in labels.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
save_figure(figure, OUTPUT / "keras_axes.png")
print(f"\nwritten: {OUTPUT / 'keras_axes.png'}")
figure

# %% [markdown]
# ## Convert the layer
#
# `va.convert.from_layer` converts a Keras layer that has been built: it reads the kernels, rearranges them as above,
# and derives the pattern from `attention_axes`. Masks have the same meaning in both libraries: True is *may attend*. A
# mask in Keras has the axes of its logits without heads, here `(b, h, w, h, w)`; in this library, the positions of a
# feature map are one flattened axis.

# %%
if keras is not None:
    for name, axes in [("map", None), ("map", (1,)), ("map", (-2,)), ("volume", (2, 3))]:
        x = inputs[name]
        layer = keras_layer(axes, x.shape)
        block = va.convert.from_layer(layer)
        assert_close(block.state_dict(), state_dict_of(parameters, positions=x.dim() - 2), rtol=0, atol=0)
        assert block.pattern == attention_pattern(axes, rank=x.dim())
        assert_close(run(block, x), layer(x, x))

    x, mask = inputs["map"], torch.rand(2, 4, 5, 4, 5) < 0.5
    layer = keras_layer(None, x.shape)
    block = va.convert.from_layer(layer)
    y = block(x.movedim(-1, 1), mask=mask.view(2, 1, 20, 20)).movedim(1, -1)
    assert_close(y, layer(x, x, attention_mask=mask))
    print("converted Keras layers: weights, patterns and outputs agree, with and without a mask")
