# %% [markdown]
# # Attention along any axes of any tensor: the equations of Keras
#
# `keras.layers.MultiHeadAttention` attends over a sequence, a map or a volume, along all of its axes or some of them,
# with one piece of code: it writes its einsum equations when it is built and knows how many axes there are. After this
# page you can write these equations yourself, read one letter by letter, say which pattern of this library a layer's
# `attention_axes` is, and move the weights of such a layer into one of our blocks. Assumed: NumPy, and that attention
# is `softmax(scale q kᵀ) v`.
#
#     python examples/keras_equations.py
#
# It takes about five seconds, two of them for loading Keras, and runs without Keras too. Keras computes with one of
# several libraries, its backend, and reads which one from the environment when it is imported: here it is torch.

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
from vision_attn.networks.convert.equations import attention_equations, attention_pattern, projection_equation
from vision_attn.networks.figures import Figure, save_figure

try:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
except ImportError:
    keras = None

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # differences below are then of the order 1e-15
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Rank: the number of axes
#
# The word has two meanings. In linear algebra the rank of a matrix is how many of its rows are linearly independent.
# Here, as in Keras, the rank of a tensor is the number of its axes, whatever is in them. In the table below every row
# is a multiple of the first: it has rank 2 as a tensor and rank 1 as a matrix.

# %%
table = np.outer([1, 2, 3], [1, 10, 100, 1000])
print(table)
print(f"axes: {table.ndim}   linearly independent rows: {np.linalg.matrix_rank(table)}\n")
assert (table.ndim, np.linalg.matrix_rank(table)) == (2, 1)

# %% [markdown]
# A batch of sequences `(b, w, c)` has rank 3, of maps `(b, h, w, c)` rank 4, of volumes `(b, t, h, w, c)` rank 5, with
# `b` the batch, `t h w` the axes of positions (time, height and width), and `c` the channels. Keras has the channels
# last; so has this page.

# %%
AXES = {"sequence": "bwc", "map": "bhwc", "volume": "bthwc"}
SIZES = {"b": 2, "t": 3, "h": 4, "w": 5, "c": 8, "n": 2, "d": 4}
inputs = {name: torch.randn([SIZES[axis] for axis in axes]) for name, axes in AXES.items()}
assert [x.dim() for x in inputs.values()] == [3, 4, 5]

# %% [markdown]
# ## One equation for one rank
#
# Attention begins with a projection: at each position the channels become `n` heads of width `d`, by a kernel
# `(c, n, d)`. In einsum each letter names one axis. A letter on both sides of the arrow is an axis that stays; one that
# is missing on the right is summed over, which is called contracting it. The projection of a sequence is
# `bwc,cnd->bwnd`, and no other rank can be put into it.

# %%
kernel = torch.randn(8, 2, 4)
assert torch.einsum("bwc,cnd->bwnd", inputs["sequence"], kernel).shape == (2, 5, 2, 4)
try:
    torch.einsum("bwc,cnd->bwnd", inputs["map"], kernel)
except RuntimeError as error:
    refusal = str(error)
assert "(3) does not match the number of dimensions (4)" in refusal
print(f"a map in the equation of a sequence:\n    {refusal}\n")

# %% [markdown]
# The equation for any rank has three groups of letters, each as long as it has to be:
#
#     free bound, bound output -> free output
#
# The *free* axes, batch and positions, are those that stay. The *bound* axes, channels, are contracted. The *output*
# axes, heads and width, come from the kernel and take their place. Keras does not choose the letters by meaning but
# takes them from the alphabet in turn, and from here on so does this page: in `abc`, `a` is the first axis, the batch,
# and `b` the second, a position.

# %%
letters = iter(string.ascii_lowercase)
free, bound, output = ("".join(islice(letters, count)) for count in (3, 1, 2))
equation = f"{free}{bound},{bound}{output}->{free}{output}"
print("the projection of a map:", equation)
assert equation == "abcd,def->abcef"
assert torch.einsum(equation, inputs["map"], kernel).shape == (2, 4, 5, 2, 4)

# %% [markdown]
# `projection_equation` returns this equation, the letters of the bias (those of the output: a bias `(n, d)` is added
# along the last axes of the result) and the rank of the result. After attention, the output projection goes back from
# heads and width to channels: it contracts two axes. Each of these projections is one product of matrices, with the
# bound axes flattened to one and the output axes to one.

# %%
projections = {name: (axes, "c", "nd") for name, axes in AXES.items()}
projections["output of a map"] = ("bhwnd", "nd", "c")
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
# For a projection einsum's ellipsis, which stands for any number of axes, would do as well. Attention needs the letters
# one by one: keys get other ones than queries along some axes, and along which is a choice.

# %%
kernel = torch.randn(8, 2, 4)
by_ellipsis = torch.einsum("...c,cnd->...nd", inputs["map"], kernel)
assert_close(by_ellipsis, torch.einsum("abcd,def->abcef", inputs["map"], kernel))

# %% [markdown]
# ## Keys get letters of their own, on the attended axes only
#
# Queries and keys of a sequence are `(b, w, n, d)`, four letters `abcd`. If the keys had the same letters, a query
# would meet only the key at its own position. The *logits* are the products of every query with every key, so the keys'
# second axis needs a letter of its own, the next free one: `e`. It stays in the result, as a second axis of positions.
# Keras writes the keys first in the equation, and the heads before both axes of positions in the result: `acbe`.

# %%
q, k = torch.randn(2, 2, 5, 2, 4)
logits = torch.einsum("aecd,abcd->acbe", k, q)
met = torch.einsum("abcd,abcd->acb", k, q)
assert logits.shape == (2, 2, 5, 5)  # batch, heads, queries, keys
assert_close(met, logits.diagonal(dim1=2, dim2=3))
assert attention_equations(rank=4, attention_axes=(1,))[0] == "aecd,abcd->acbe"

# %% [markdown]
# The queries and keys of a map, `(b, h, w, n, d)`, have two axes of positions, and thus a choice. `attention_axes` are
# those that get a second letter, counted from 0, the batch. `attention_equations` takes them, and the rank after the
# projection, one more than that of the input. Along axis 1, `h`, the first of its two equations reads:

# %%
ROLES = {
    (True, True, True): "shared: one attention for each of its values",
    (True, True, False): "contracted: summed over in each product",
    (False, True, True): "positions of queries",
    (True, False, True): "positions of keys",
}


def read(equation, axes):
    """Print one line a letter: its axis, the tensors that have it, and what that makes it."""
    tensors = equation.replace("->", ",").split(",")
    axis_of = {letter: axis for names in tensors[:2] for letter, axis in zip(names, axes, strict=True)}
    print(f"\n{equation}\naxis  key  query  logits  role")
    for letter in sorted(axis_of):
        there = tuple(letter in names for names in tensors)
        key, query, logits = (letter if found else "" for found in there)
        print(f"{axis_of[letter]:<4}  {key:<3}  {query:<5}  {logits:<6}  {ROLES[there]}")
    return [axis_of[letter] for letter in tensors[2]]


dot, combine, rank = attention_equations(rank=5, attention_axes=(1,))
assert read(dot, "bhwnd") == ["b", "w", "n", "h", "h"]

# %% [markdown]
# The logits begin with the axes that queries and keys share: batch, `w` and heads. No query has a logit with a key of
# another `w`: this is attention inside each column of the map, as if each column were a sequence.

# %%
q, k = torch.randn(2, *(2, 4, 5, 2, 4))  # b h w n d
columns = [torch.einsum("aecd,abcd->acbe", k[:, :, w], q[:, :, w]) for w in range(5)]
assert_close(torch.einsum(dot, k, q), torch.stack(columns, dim=1))

# %% [markdown]
# ## Softmax over several axes, and back to positions
#
# The logits end with the axes of the keys, as many as are attended. The weights of one query are to sum to 1 over all
# of its keys, so softmax goes over all these axes at once: they are flattened into one. Over `w` and then over
# `h` is something else: the weights of a query on a map of 4×5 then sum to 5.
#
# The second equation multiplies the weights with the values, contracts the keys' letters, and puts the queries' axes
# back into their places. With it attention for any rank and any axes has six lines. `scale` is `d ** -0.5`.


# %%
def attend(q, k, v, axes):
    dot, combine, rank = attention_equations(q.dim(), axes)
    logits = torch.einsum(dot, k, q) * q.shape[-1] ** -0.5
    keys = rank - len(axes)
    weights = logits.flatten(keys).softmax(-1).view_as(logits)
    return torch.einsum(combine, weights, v)


v = torch.randn(2, 4, 5, 2, 3)  # b h w n e, where e is the width of values, which may be another
y = attend(q, k, v, axes=(1, 2))
assert y.shape == (2, 4, 5, 2, 3)
one_sequence = attend(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), axes=(1,))
assert_close(y.flatten(1, 2), one_sequence)  # along all axes: the sequence of all positions

ones = torch.ones_like(v)
assert_close(attend(q, k, ones, axes=(1, 2)), ones)  # weights that sum to 1
logits = torch.einsum(attention_equations(5, (1, 2))[0], k, q)
assert_close(logits.softmax(-1).softmax(-2).sum((-2, -1)), torch.full((2, 2, 4, 5), 5.0))

# %% [markdown]
# Both equations for every choice of axes; and how many logits one input of 5, 4×5 or 3×4×5 positions has in one head:
# its positions, times those that each of them attends to.


# %%
def choices(rank, orders=combinations):
    """Every choice among the axes of an input that are neither batch nor channels."""
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
# Axes may be given in any order. The axes of the weights then stand in that order, and the output is the same. Negative
# axes count from the last one. The last axis is `d` here; a layer of Keras, and `attention_pattern` below, count on the
# input, where it is `c`: -2 there is the last axis of positions, which is -3 here.

# %%
q, k, v = torch.randn(3, *(2, 4, 5, 2, 4))
assert attention_equations(5, (1, 2))[0] == "afgde,abcde->adbcfg"
assert attention_equations(5, (2, 1))[0] == "afgde,abcde->adcbgf"
assert_close(attend(q, k, v, (2, 1)), attend(q, k, v, (1, 2)))
assert attention_equations(5, (-3,)) == attention_equations(5, (2,))

# %% [markdown]
# ## Against Keras
#
# The whole layer is three projections, attention, and the output projection. Its parameters are four kernels with a
# bias each, here at random in Keras's shapes. Values may have a width of their own, `e`.


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
# Keras builds its equations by two private functions. Ours return the same for inputs of rank 3 to 6 and every choice
# of axes in every order.

# %%
if keras is None:
    print("\nAgainst Keras: skipped, here and at the end, since it is not installed (pip install keras)")
else:
    builders = importlib.import_module("keras.src.layers.attention.multi_head_attention")
    ordered = [(rank + 1, axes) for rank in range(3, 7) for axes in choices(rank, orders=permutations)]
    for rank, axes in ordered:
        assert attention_equations(rank, axes) == builders._build_attention_equation(rank, axes)
    for counts in product(range(2, 6), (1, 2), (1, 2)):
        assert projection_equation(*counts) == builders._build_proj_equation(*counts)
    print(f"\nKeras {keras.__version__}: the same equations for {len(ordered)} choices of rank and axes")

# %% [markdown]
# And the layer computes what the equations say. It is called with query, *value*, key, in this order; a key that is
# left out is the value. The last assertion gives them in the other order and gets another result, with no complaint.


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
        # Asked for the weights too, it goes by its equations for a sequence as well, and not by a fused kernel.
        y, _ = layer(query, value, key, return_attention_scores=True)
        expected = layer_by_equations(query, key, value, parameters, axes)
        assert_close(y, expected)
        print(f"    {name:<8} axes {axes!s:<6}  greatest difference {(y - expected).abs().max():.0e}")
    assert torch.equal(layer(query, value), layer(query, value, value))
    assert (layer(query, key, value) - expected).abs().max() > 0.01

# %% [markdown]
# ## The weights, in a block of ours
#
# A block has one convolution for queries, keys and values, with its rows ordered (qkv, heads, width), and one for the
# output. A kernel of Keras has the same numbers with the channels first:
#
#     qkv.weight    flatten (c, n, d) to (c, n·d), transpose to (n·d, c); queries, keys, values one below the other
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
    return block(x.movedim(-1, 1)).movedim(1, -1)  # our blocks have the channels second


block = va.Attention2d(c, n, key_dim=d, value_dim=e)
block.load_state_dict(state_dict_of(parameters, positions=2))
x = inputs["map"]
full = layer_by_equations(x, x, x, parameters, axes=(1, 2))
assert_close(run(block, x), full)
print("\n" + "\n".join(f"{name:<12} {tuple(tensor.shape)}" for name, tensor in block.state_dict().items()))

# %% [markdown]
# Shapes do not tell a right order from a wrong one. With width before heads everything fits, loads, and computes
# something else; only comparing outputs finds it.

# %%
swapped = [(kernel.transpose(1, 2), bias.T) for kernel, bias in parameters[:3]]
block.load_state_dict(state_dict_of([*swapped, parameters[3]], positions=2))
error = (run(block, x) - full).abs().max()
assert error > 0.01
print(f"loaded with width before heads: no complaint, and outputs wrong by up to {error:.1f}\n")

# %% [markdown]
# ## Attention axes are patterns
#
# In this library a *pattern* says which positions attend to each other, by a name or by one line of einx that makes
# groups of tokens out of the map: tokens of one group attend to each other and to no others. Attended axes are the
# tokens, all others belong to the groups. So `(1,)` of a map is attention in its columns and `(2,)` in its rows;
# attention along one axis is called axial. In a volume `(2, 3)` is attention in space only, `(1,)` in time only.
# `attention_pattern` translates, and with the same weights the block with that pattern and the equations are equal for
# every choice of axes.

# %%
BLOCKS = {"sequence": va.Attention1d, "map": va.Attention2d, "volume": va.Attention3d}
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
# Which positions one position attends to, taken from the equations: the gradient of its output is zero at every value
# that it does not read.


# %%
def attended(size, axes, position):
    q, k = torch.zeros(2, 1, *size, 1, 1)
    v = torch.zeros_like(q, requires_grad=True)
    attend(q, k, v, axes)[0, *position].sum().backward()
    seen = (v.grad[0, ..., 0, 0] > 0).int()
    assert seen.sum() == np.prod([size[axis - 1] for axis in axes])
    seen[position] = 2
    return seen


# %% [markdown]
# A map in the upper row, the three frames of a volume in the lower one; the queries are those of the orange position.

# %%
figure = Figure(figsize=(10, 3.8), layout="constrained")
figure.get_layout_engine().set(w_pad=0.1)
panels = figure.subplots(2, 3, height_ratios=(5, 3)).flat
labels = {"#e4e4e4": "not attended to", "#56b4e9": "attended to", "#d55e00": "the position itself, attended to as well"}
chosen = [("map", (1,)), ("map", (2,)), ("map", (1, 2)), ("volume", (1,)), ("volume", (2, 3)), ("volume", (1, 3))]
for panel, (name, axes) in zip(panels, chosen, strict=True):
    names = AXES[name][1:-1]
    seen = attended([SIZES[axis] for axis in names], axes, position=(1, 1, 3)[-len(names) :])
    frames = seen.reshape(-1, *seen.shape[-2:])
    for t, frame in enumerate(frames):
        columns = np.arange(SIZES["w"] + 1) + t * (SIZES["w"] + 1)
        rows = np.arange(SIZES["h"] + 1)
        colours = ListedColormap(list(labels))
        panel.pcolormesh(columns, rows, frame, cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=2)
    panel.set(aspect="equal", xticks=[], yticks=[], xlabel="w", frame_on=False)
    panel.set_ylabel("h", rotation=0, va="center")
    panel.invert_yaxis()
    if name == "volume":
        panel.set_xticks([2.5, 8.5, 14.5], ["t = 0", "t = 1", "t = 2"])
        panel.tick_params(length=0)
    along = " and ".join(names[axis - 1] for axis in axes)
    panel.set_title(f"{name}, axes {axes}: along {along}", fontsize=11)
handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
save_figure(figure, OUTPUT / "keras_axes.png")
print(f"\nwritten: {OUTPUT / 'keras_axes.png'}")
figure

# %% [markdown]
# ## From the layer to the block
#
# `va.convert.from_layer` does this with a layer of Keras that is built: it reads out the kernels, arranges them as
# above, and takes the pattern from `attention_axes`. Masks mean the same on both sides: True is *may attend*. Keras's
# mask has the axes of its logits without heads, here `(b, h, w, h, w)`; ours counts the positions of a map in a row.

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
    print("layers of Keras as blocks: the same weights, patterns and outputs, and the same with a mask")
