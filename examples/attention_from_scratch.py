# %% [markdown]
# # Attention from scratch
#
# After this page you can write attention down from memory: softmax, one head, the causal mask, batches, several heads,
# layer normalisation and the transformer block, each in a few lines of NumPy. Each is compared with the module of torch
# that computes it, and then with the blocks of `vision_attn` on the maps of a CNN. It ends with the question of how
# attention can be made cheaper, answered by a measurement on your machine. You need to know NumPy's `@` and
# broadcasting, and what a layer of a network is.
#
# `python examples/attention_from_scratch.py` takes about ten seconds. What the text says of shapes and numbers is
# asserted below it; times are printed.

# %%
import os
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import from_numpy, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

import vision_attn as va
from vision_attn.attention import reference
from vision_attn.networks.figures import Figure, save_figure
from vision_attn.networks.insertion import count_macs

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_default_dtype(torch.float64)  # so that what is equal is equal to twelve decimals
rng = np.random.default_rng(0)

# %% [markdown]
# Three functions serve the comparisons. `check` asserts that two arrays have one shape and the same numbers, up to the
# rounding of float64, and prints by how much they differ; `differ` asserts the opposite. `drawn` draws all parameters
# of a torch module at random: a bias that starts at 0, or a factor that starts at 1, would hide that somebody left it
# out.


# %%
def check(what, ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, equal_nan=False, strict=True)
    print(f"  {what:<60} {ours.shape!s:<16} {abs(ours - theirs).max():.0e}")


def differ(one, other):
    assert abs(np.asarray(one) - np.asarray(other)).max() > 1e-3


def drawn(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval(), {name: value.numpy() for name, value in module.state_dict().items()}


# %% [markdown]
# ## Softmax
#
# Softmax makes weights of any numbers, called logits: `exp(l_j) / Σ exp(l_j')`, the sum over all `j'`. The weights are
# positive and sum to 1. Computed as it is written it fails from a logit of 710 on, where `exp` leaves the range of
# float64. A number added to all logits cancels in the fraction. So the largest is subtracted first, and `exp` gets
# nothing above 0.


# %%
def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


large = np.array([709.0, 710.0])
with np.errstate(over="ignore", invalid="ignore"):
    assert np.isinf(np.exp(large)).tolist() == [False, True]
    as_written = np.exp(large) / np.exp(large).sum()
print("Softmax")
print("  of 709 and 710, as written:", as_written, "  with 710 subtracted first:", softmax(large).round(3))
assert np.isnan(as_written[1])

print(f"\n  {'what is compared':<60} {'shape':<16} difference")
logits = rng.standard_normal((3, 5))
assert (softmax(logits) > 0).all()
check("the weights of each row, summed", softmax(logits).sum(axis=-1), np.ones(3))
check("softmax of the same logits, 700 more each", softmax(logits + 700), softmax(logits))
check("softmax, with torch", softmax(logits), torch.softmax(from_numpy(logits), dim=-1))

# %% [markdown]
# ## Attention of one head
#
# The input is a row of *tokens*, vectors of `c` channels: words, or the positions of a feature map. Three linear layers
# make of each token a *query*, a *key* and a *value*. The query says what token `i` looks for, the key what token `j`
# offers: their dot product is the logit of the pair. Softmax over `j` turns the logits of a query into weights, and the
# output of token `i` is the sum of all values by these weights. A last linear layer projects it. In *self*-attention
# queries, keys and values come from the same tokens.
#
#     q, k, v = x W_qᵀ + b_q,  x W_kᵀ + b_k,  x W_vᵀ + b_v      (i, c) -> (i, d), (j, d), (j, e)
#     y       = softmax(q kᵀ · d^-½) v                          (i, e)
#     out     = y W_oᵀ + b_o                                    (i, c)
#
# `d` is the width of queries and keys, `e` that of values; here both are `c`. In the matrix `q kᵀ` rows are queries and
# columns are keys. `torch.nn.MultiheadAttention` keeps `W_q`, `W_k` and `W_v` in one matrix, `in_proj_weight`, one
# below the other. The functions count their axes from the end, so that they run as they are when more axes come in
# front; `.mT` exchanges the last two.


# %%
def linear(x, weight, bias):
    return x @ weight.T + bias


def attend(q, k, v, mask=0.0):
    weights = softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask)
    return weights @ v, weights


def self_attention(x, p, mask=0.0):
    q, k, v = np.split(linear(x, p["in_proj_weight"], p["in_proj_bias"]), 3, axis=-1)
    y, weights = attend(q, k, v, mask)
    return linear(y, p["out_proj.weight"], p["out_proj.bias"]), weights


def by_torch(module, x, mask=None, **options):
    x = from_numpy(x)
    return module(x, x, x, attn_mask=None if mask is None else from_numpy(mask), **options)


# %%
tokens, c = 6, 8
one_head, one_p = drawn(nn.MultiheadAttention(c, num_heads=1, batch_first=True))
x = rng.standard_normal((tokens, c))
y, weights = self_attention(x, one_p)
print("\nOne head, with torch")
check("output", y, by_torch(one_head, x)[0])
check("weights", weights, by_torch(one_head, x)[1])

# %% [markdown]
# **Why `d^-½`?** The dot product of two vectors of `d` independent numbers with mean 0 and variance 1 is a sum of `d`
# products with mean 0 and variance 1: its variance is `d`. Without the factor logits grow with the width, and softmax
# puts nearly all weight on one key before anything has been learned. The slope of a weight `p` by its own logit is `p
# (1 - p)`, which is near 0 there: such logits learn little ([Vaswani et al., 2017](https://arxiv.org/abs/1706.03762),
# section 3.2.1). With the factor the variance is 1 at every width. The table is of queries and 16 keys drawn at random:
# the largest weight and its slope, means over 500 queries.

# %%
step = np.array([1e-6, 0, 0, 0, 0])
first = softmax(logits)[:, 0]
slope = (softmax(logits + step) - softmax(logits - step))[:, 0] / 2e-6
np.testing.assert_allclose(slope, first * (1 - first), atol=1e-9)

print("\n         variance   softmax(q·k)      softmax(q·k · d^-½)")
print("     d     of q·k   largest  slope    largest  slope")
for d in (4, 64, 1024):
    q, k = rng.standard_normal((500, 1, d)), rng.standard_normal((500, 16, d))
    dots = (q @ k.mT)[:, 0]
    plain, scaled = softmax(dots).max(axis=-1), softmax(dots * d**-0.5).max(axis=-1)
    slopes = [(p * (1 - p)).mean() for p in (plain, scaled)]
    print(f"{d:>6} {dots.var():>10.1f} {plain.mean():>9.2f} {slopes[0]:>6.2f} {scaled.mean():>10.2f} {slopes[1]:>6.2f}")
    assert abs(dots.var() / d - 1) < 0.1
    assert 0.2 < scaled.mean() < 0.3  # at every width
assert plain.mean() > 0.9
assert slopes[0] < slopes[1] / 4

# %% [markdown]
# ## The causal mask
#
# A model that predicts the next token must not look at it. A mask is added to the logits: `-inf` where the key is later
# than the query, above the diagonal, and 0 elsewhere. `exp(-inf)` is 0, so the weights of later tokens are exactly 0.
# Nothing leaks from the future: with other tokens from the fourth on, the outputs of the first three stay as they were.

# %%
may = np.tri(tokens, dtype=bool)  # query i may attend to key j where j <= i
causal = np.where(may, 0.0, -np.inf)
print(f"\nThe causal mask, of four tokens\n{causal[:4, :4]}\n")
y, weights = self_attention(x, one_p, causal)
check("output", y, by_torch(one_head, x, causal)[0])
check("weights", weights, by_torch(one_head, x, causal)[1])
assert (weights[~may] == 0).all()

changed = x.copy()
changed[3:] = rng.standard_normal((tokens - 3, c))
check("output of the first three, with other tokens after them", self_attention(changed, one_p, causal)[0][:3], y[:3])
differ(self_attention(changed, one_p)[0][:3], self_attention(x, one_p)[0][:3])  # without the mask they do change

# %% [markdown]
# **A mask of booleans has two opposite meanings in torch.** To `MultiheadAttention` True means *blocked*; to
# `scaled_dot_product_attention`, and to `vision_attn`, True means *may attend*. The wrong one raises no error. The
# causal mask taken the other way round lets each token see its future only, and the last one, which has none, nothing.
#
# **A query that may attend to nothing** has only logits of `-inf`. Softmax as above makes NaN of them, and so does
# `MultiheadAttention`; in the next layer of attention every token that looks at it is NaN as well. In `vision_attn` the
# weights of such a query are zeros, and the block gives the bias of its last layer: in the definition in NumPy,
# `reference`, and in each of the implementations, `va.IMPLS`. `"flex"` is left out, since FlexAttention does not
# compute in float64.

# %%
q, k, v = rng.standard_normal((3, 1, 1, tokens, c))
fused = F.scaled_dot_product_attention(*map(from_numpy, (q, k, v)), attn_mask=from_numpy(may))
check("scaled_dot_product_attention, True = may attend", attend(q, k, v, causal)[0], fused)
check("MultiheadAttention, True = blocked", y, by_torch(one_head, x, ~may)[0])
future, future_weights = by_torch(one_head, x, may)  # the wrong way round
assert (future_weights.numpy()[:-1][may[:-1]] == 0).all()
assert future.isnan().any(dim=-1).tolist() == [False] * (tokens - 1) + [True]
assert by_torch(one_head, future.numpy())[0].isnan().all()

with np.errstate(invalid="ignore"):
    nothing = softmax(np.full(3, -np.inf))
zeros = reference.softmax(np.full(3, -np.inf))
print("  softmax of nothing but -inf, as above:", nothing, "  in vision_attn.attention.reference:", zeros)
assert np.isnan(nothing).all()
assert (zeros == 0).all()
block, state = drawn(va.Attention1d(c, num_heads=1))
outputs = []
impls = [impl for impl in va.IMPLS if impl != "flex"]
for impl in impls:
    va.set_impl_(block, impl)
    outputs.append(block(from_numpy(x.T[None]), from_numpy(~may)))  # maps (b, c, w): tokens in the last axis
last = torch.cat(outputs)[:, :, -1]
check("the last token, in each implementation: the bias", last, np.tile(state["proj.bias"], (len(impls), 1)))

# %% [markdown]
# ## Batches, and why attention needs a batched product
#
# `b` examples are put into one array `(b, i, c)`. For a linear layer that is nothing new: every example meets the same
# weights, so the tokens of all examples are stacked into one matrix, and one product does them all.

# %%
b = 3
x = rng.standard_normal((b, tokens, c))
layer = one_p["in_proj_weight"], one_p["in_proj_bias"]
one_by_one = np.stack([linear(example, *layer) for example in x])
print("\nBatches, with one example after the other")
check("linear layer: stacked rows", linear(x.reshape(b * tokens, c), *layer).reshape(b, tokens, 3 * c), one_by_one)

# %% [markdown]
# In `q kᵀ` both factors belong to the example. Stacked rows would give every query with every key of every example:
# `b²` blocks, of which the `b` on the diagonal are wanted. What is wanted is `b` small products: a loop over the
# examples, or what `@` does with the axes in front, or one call of `torch.bmm`, the batched matrix multiplication.

# %%
q, k, v = np.split(one_by_one, 3, axis=-1)
one_by_one = np.stack([q[example] @ k[example].T for example in range(b)])
stacked = q.reshape(b * tokens, c) @ k.reshape(b * tokens, c).T
assert stacked.size == b * one_by_one.size
diagonal = stacked.reshape(b, tokens, b, tokens)[range(b), :, range(b)]
check("q kᵀ: diagonal blocks of the stacked rows", diagonal, one_by_one)
check("q kᵀ: @", q @ k.mT, one_by_one)
check("q kᵀ: torch.bmm", torch.bmm(from_numpy(q), from_numpy(k).mT), one_by_one)
for what, ours, theirs in zip(
    ("output", "weights"), self_attention(x, one_p, causal), by_torch(one_head, x, causal), strict=True
):
    check(f"self_attention as it is, {what}, with torch", ours, theirs)

# %% [markdown]
# ## Several heads
#
# One head gives each token one set of weights over the others. With `n` heads it has `n` sets: the channels of queries,
# keys and values are split into `n` groups of `d = c / n`, each group attends by itself, and the results are merged
# again, side by side, before the last layer. A head is one more axis in front, `(b, n, i, d)`, so `attend` runs as it
# is, and `b · n` examples of one head are what `torch.bmm` sees. torch averages the weights over the heads unless told
# not to.


# %%
def split(x, n):
    b, i, c = x.shape
    return x.reshape(b, i, n, c // n).swapaxes(1, 2)


def merge(y):
    b, n, i, e = y.shape
    return y.swapaxes(1, 2).reshape(b, i, n * e)


def multi_head(x, p, n, mask=0.0):
    qkv = np.split(linear(x, p["in_proj_weight"], p["in_proj_bias"]), 3, axis=-1)
    y, weights = attend(*(split(part, n) for part in qkv), mask)
    return linear(merge(y), p["out_proj.weight"], p["out_proj.bias"]), weights


# %%
n = 2
two_heads, two_p = drawn(nn.MultiheadAttention(c, n, batch_first=True))
y, weights = multi_head(x, two_p, n, causal)
print("\nSeveral heads, with torch")
check("output", y, by_torch(two_heads, x, causal)[0])
check("weights, by head", weights, by_torch(two_heads, x, causal, average_attn_weights=False)[1])
check("weights, averaged", weights.mean(axis=1), by_torch(two_heads, x, causal)[1])
q, k, _ = np.split(linear(x, two_p["in_proj_weight"], two_p["in_proj_bias"]), 3, axis=-1)
first = slice(c // n)  # the channels of the first head
check("weights of the first head alone", attend(q[..., first], k[..., first], x, causal)[1], weights[:, 0])
q, k = split(q, n), split(k, n)
logits = q @ k.mT
q, k = (from_numpy(part).reshape(b * n, tokens, c // n) for part in (q, k))
check("q kᵀ: torch.bmm over b · n", torch.bmm(q, k.mT).reshape(b, n, tokens, tokens), logits)

# %% [markdown]
# ## Layer normalisation
#
# The channels of each token are brought to mean 0 and variance 1, each token by itself, and then multiplied by a factor
# and moved by a bias, one a channel, which are learned ([Ba et al., 2016](https://arxiv.org/abs/1607.06450)). The
# variance is the mean of the squares, divided by `c` and not by `c - 1`; `eps` keeps a token whose channels are all
# equal from being divided by 0.


# %%
def layer_norm(x, weight, bias, eps=1e-5):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


norm, norm_p = drawn(nn.LayerNorm(c))
print("\nLayer normalisation, with torch")
check("of tokens", layer_norm(x, **norm_p), norm(from_numpy(x)))
check("of channels that are all equal: the bias", layer_norm(np.full(c, 3.0), **norm_p), norm_p["bias"])

# %% [markdown]
# ## The transformer block
#
# Attention moves information between tokens; two linear layers with a ReLU between them then work on each token by
# itself. Both are added to what went into them, and in the original form each sum is normalised (*post-norm*):
#
#     y   = norm1(x + attention(x))
#     out = norm2(y + W_2 relu(W_1 y + b_1) + b_2)


# %%
def transformer_block(x, p, n, mask=0.0):
    attention = {name.removeprefix("self_attn."): value for name, value in p.items()}
    y = layer_norm(x + multi_head(x, attention, n, mask)[0], p["norm1.weight"], p["norm1.bias"])
    hidden = np.maximum(linear(y, p["linear1.weight"], p["linear1.bias"]), 0)
    return layer_norm(y + linear(hidden, p["linear2.weight"], p["linear2.bias"]), p["norm2.weight"], p["norm2.bias"])


encoder, encoder_p = drawn(nn.TransformerEncoderLayer(c, n, dim_feedforward=2 * c, dropout=0.0, batch_first=True))
print("\nTransformer block, with torch")
check("output", transformer_block(x, encoder_p, n), encoder(from_numpy(x)))
check("output, causal", transformer_block(x, encoder_p, n, causal), encoder(from_numpy(x), from_numpy(causal)))

# %% [markdown]
# ## The same numbers on maps
#
# A CNN has maps `(b, c, h, w)` in the place of `(b, i, c)`: channels first, and the tokens are the positions, row by
# row. A linear layer on every token is there a 1×1 convolution, and its weight `(out, in)` becomes `(out, in, 1, 1)`.
# With the names changed, all that was checked above loads into the blocks of `vision_attn`: on `(b, c, w)`, on maps of
# one row, and on maps of `h` rows. `vision_attn.attention.reference`, the definition that the library is tested
# against, agrees as well.

# %%
RENAMED = {"self_attn.": "attn.", "in_proj_": "qkv.", "out_proj.": "proj.", "linear1": "fc1", "linear2": "fc2"}


def load_from(block, module, axes=2):
    state = {}
    for name, value in module.state_dict().items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        state[name] = value.reshape(*value.shape, *[1] * axes) if value.dim() == 2 else value
    block.load_state_dict(state)
    return block.eval()


h, w = 2, 3
expected, weights = multi_head(x, two_p, n, causal)
row = x.mT  # (b, c, i)
rows = row.reshape(b, c, h, w)
flat = load_from(va.Attention1d(c, n, causal=True), two_heads, axes=1)
block = load_from(va.Attention2d(c, n, causal=True), two_heads)
print("\nOn maps, with the above")
check("Attention1d, (b, c, w)", flat(from_numpy(row)), expected.mT)
check("Attention2d, one row", block(from_numpy(row[:, :, None])), expected.mT[:, :, None])
check("Attention2d, h×w", block(from_numpy(rows)), expected.mT.reshape(b, c, h, w))
check("Attention2d, h×w, weights by head", block.attention_weights(from_numpy(rows)), weights)
state = {name: value.numpy() for name, value in block.state_dict().items()}
check("reference, h×w", reference.attention_map(rows, state, n, causal=True), expected.mT.reshape(b, c, h, w))
transformer = va.TransformerBlock2d(c, n, mlp_ratio=2, norm_first=False, activation="relu", causal=True)
y = load_from(transformer, encoder)(from_numpy(rows))
check("TransformerBlock2d, h×w", y, transformer_block(x, encoder_p, n, causal).mT.reshape(b, c, h, w))

# %% [markdown]
# ## Attention does not know where things are
#
# Nothing in the equation but the mask asks where a token stands: with the tokens in another order the outputs come out
# in that order, otherwise unchanged. A sentence and its words in a heap are the same to it, and so are a map and its
# shuffled positions. That is why blocks take `position=`. With one, here rotary positions, which turn queries
# and keys by an angle that grows with the position, shuffling changes the result.

# %%
order = rng.permutation(tokens)
shuffled = x[:, order].mT.reshape(b, c, h, w)
plain = load_from(va.Attention2d(c, n), two_heads)
placed = load_from(va.Attention2d(c, n, position=va.Rope2d()), two_heads)
print("\nTokens in another order")
check("outputs, in that order", multi_head(x[:, order], two_p, n)[0], multi_head(x, two_p, n)[0][:, order])
check("Attention2d, h×w", plain(from_numpy(shuffled)).flatten(2), plain(from_numpy(rows)).flatten(2)[:, :, order])
differ(placed(from_numpy(shuffled)).flatten(2), placed(from_numpy(rows)).flatten(2)[:, :, order])

# %% [markdown]
# ## Can attention be cheaper?
#
# The matrix of weights has tokens² entries in each head. A map of 64×64 has 4,096 tokens, and its matrix 17 million
# entries. There are three ways out.
#
# - **Fused**: the same attention, computed piece by piece, so that no more than a piece of the matrix exists at a time
#   ([Dao et al., 2022](https://arxiv.org/abs/2205.14135)). The multiply-adds stay, the memory goes.
# - **Sparse**: a token attends to some others only ([Child et al., 2019](https://arxiv.org/abs/1904.10509)); on maps,
#   to those in its own window ([Liu et al., 2021](https://arxiv.org/abs/2103.14030)). Tokens of different windows do
#   not see each other.
# - **Low rank**: the matrix is a product of a tall and a wide one, `softmax_d(q) softmax_j(k)ᵀ`, the first softmax over
#   the channels of a query, the second over the tokens ([Shen et al., 2021](https://arxiv.org/abs/1812.01243)). A
#   product may be computed from either end: `q' (k'ᵀ v)` needs `d · e` numbers in the middle, and no matrix of tokens
#   by tokens.
#
# First the matrices themselves, with one set of weights, on a row of 64 positions and one head of `d = 8`.

# %%
full, _ = drawn(va.Attention2d(8, num_heads=1))
windowed = va.Attention2d(8, num_heads=1, pattern=va.Window(8))
low_rank = va.LinearAttention2d(8, num_heads=1)
windowed.load_state_dict(full.state_dict())
low_rank.load_state_dict(full.state_dict())
row = torch.randn(1, 8, 1, 64)
q, k, v = np.split(full.qkv(row)[0, :, 0].T.numpy(), 3, axis=-1)  # (i, d), (j, d), (j, e)
wide = softmax(k.T)  # (d, j)
matrices = {
    "full": full.attention_weights(row)[0, 0].numpy(),
    "windowed": windowed.attention_weights(row)[0, 0].numpy(),
    "linear": softmax(q) @ wide,
}
print("\nThe matrix of weights, and the block that it is of")
for (name, matrix), block in zip(matrices.items(), (full, windowed, low_rank), strict=True):
    check(name, full.proj(from_numpy((matrix @ v).T[None, :, None])), block(row))
    np.testing.assert_allclose(matrix.sum(axis=-1), 1)
check("linear, keys and values first", softmax(q) @ (wide @ v), matrices["linear"] @ v)
assert (wide @ v).shape == (8, 8)

# %% [markdown]
# The matrix of full attention here has full rank: its rows are independent. That of windows is zero outside of the
# blocks on its diagonal. That of linear attention has rank `d` at most, whatever it is trained to be: each of its rows
# is a mixture of the same 8.

# %%
zero = {name: (matrix == 0).mean() for name, matrix in matrices.items()}
rank = {name: int(np.linalg.matrix_rank(matrix)) for name, matrix in matrices.items()}
inside = np.kron(np.eye(8), np.ones((8, 8))) == 1
assert ((matrices["windowed"] > 0) == inside).all()
assert rank == {"full": 64, "windowed": 64, "linear": 8}

figure = Figure(figsize=(9.4, 3.2), layout="constrained")
for axis, (name, matrix) in zip(figure.subplots(1, 3, sharey=True), matrices.items(), strict=True):
    shown = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=0.4)
    axis.set_title(f"{name}: rank {rank[name]}, {100 * zero[name]:g} % zeros", fontsize=10)
    axis.set_xlabel("key $j$")
    axis.set_xticks([0, 16, 32, 48])
    axis.set_yticks([0, 16, 32, 48])
figure.axes[0].set_ylabel("query $i$")
figure.colorbar(shown, ax=figure.axes, label="weight of the pair", extend="max")
save_figure(figure, OUTPUT / "attention_matrices.png")
print(f"\nThe three matrices as pictures: {OUTPUT / 'attention_matrices.png'}")
figure

# %% [markdown]
# Now what they cost. The projections take `4 c²` multiply-adds a token, and what is between them `2 c` for every key
# that a query meets: all tokens, the 64 of its window, or, in linear attention, as many as `d`. So the tokens² of full
# attention cost more than its projections only on a map of more than `2 c` tokens.
#
# From here on all is float32, as one would run it. Full attention in its two forms is the same function. The other two
# are not, though they load the same weights; only on a map of one window, 8×8, windowed attention is full attention.

# %%
torch.set_default_dtype(torch.float32)
c, n, d = 32, 1, 32
blocks = {
    "full, written out": va.Attention2d(c, n, impl="bmm"),
    "full, fused": va.Attention2d(c, n, impl="sdpa"),
    "windowed": va.Attention2d(c, n, pattern=va.Window(8)),
    "linear": va.LinearAttention2d(c, n),
}
for block in blocks.values():
    block.load_state_dict(blocks["full, fused"].state_dict())
sides = (8, 16, 32, 64)  # each with four times the tokens of the one before
maps = {side: torch.randn(1, c, side, side) for side in sides}
one_window, four_windows = ({name: block(maps[side]) for name, block in blocks.items()} for side in (8, 16))
torch.testing.assert_close(four_windows["full, written out"], four_windows["full, fused"])
torch.testing.assert_close(one_window["windowed"], one_window["full, fused"])
differ(four_windows["windowed"], four_windows["full, fused"])
differ(four_windows["linear"], four_windows["full, fused"])

multiply_adds = {}
for side, x in maps.items():
    tokens = side * side
    for (name, block), keys in zip(blocks.items(), (tokens, tokens, 64, d), strict=True):
        multiply_adds[name, side] = tokens * (4 * c**2 + 2 * c * keys)
        assert multiply_adds[name, side] == count_macs(block, x.shape)
for side in sides:
    projections = side**2 * 4 * c**2
    assert (multiply_adds["full, fused", side] > 2 * projections) == (side**2 > 2 * c)

# %% [markdown]
# The calls are timed in turns, so that whatever else your machine does falls on all of them alike, and the median of
# three rounds counts. Memory is the most that tensors take at one moment of a call: torch's profiler records the bytes
# of each tensor when it is allocated, and the same number below zero when it is released, and the peak is the largest
# sum up to some moment. From 32×32 to 64×64 there are four times as many tokens. Written out, memory grows by nearly
# 16, as the matrix does: not quite, since the map beside it grows by 4. The others grow by 4 at most.

# %%
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler does not report that there is no GPU


def peak_memory(call):
    """Return the peak memory of a call in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes)) / 2**20


threads = torch.get_num_threads()
seconds, peak = {}, {}
for side, x in maps.items():
    calls = {name: partial(block, x) for name, block in blocks.items()}
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    rounds = [
        {name: timer.blocked_autorange(min_run_time=0.01).mean for name, timer in timers.items()} for _ in range(3)
    ]
    for name, call in calls.items():
        seconds[name, side] = np.array([times[name] for times in rounds])
        peak[name, side] = peak_memory(call)
growth = {name: peak[name, 64] / peak[name, 32] for name in blocks}
assert 15 < growth["full, written out"] < 16
# Less than 4 where a kernel's own room, which is the same for every map, is counted with it.
assert all(growth[name] <= 4 for name in blocks if name != "full, written out")

relative = {key: np.median(taken / seconds["full, fused", key[1]]) for key, taken in seconds.items()}
share = {key: count / multiply_adds["full, fused", key[1]] for key, count in multiply_adds.items()}
print(f"\nFour attentions, {c} channels, one head, by the side of the map; threads: {threads}")
print(f"{'':<20}{'multiply-adds, full = 1':^28} {'time, fused = 1':^28} {'peak MiB':^28}")
print(f"{'':<20}" + " ".join(["".join(f"{side:>7}" for side in sides)] * 3))
for name in blocks:
    numbers = ((share, "7.3f"), (relative, "7.2f"), (peak, "7.1f"))
    columns = ["".join(format(of[name, side], form) for side in sides) for of, form in numbers]
    print(f"  {name:<18}" + " ".join(columns))

# %%
figure = Figure(figsize=(9.5, 4.2), layout="constrained")
left, right = figure.subplots(1, 2)
at = [side**2 for side in sides]
colors, lines = ("#000000", "#0072B2", "#D55E00", "#009E73"), ("o-", "s-", "^-", "D--")
for name, color, line in zip(blocks, colors, lines, strict=True):
    left.plot(at, [1e3 * np.median(seconds[name, side]) for side in sides], line, color=color, label=name)
    right.plot(at, [peak[name, side] for side in sides], line, color=color, label=name)
for axis, title in ((left, "time of a call, ms"), (right, "peak memory of a call, MiB")):
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(at, [f"{side**2:,}\n{side}×{side}" for side in sides])
    axis.set_xlabel("tokens, and the map that has them")
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
save_figure(figure, OUTPUT / "efficient_attention.png")
print(f"\nTime and memory against tokens: {OUTPUT / 'efficient_attention.png'}")
figure

# %% [markdown]
# Fused attention is the same function as the one written out, which is there to be read. Windowed and linear attention
# are other functions, and nothing here says how accurate a network is with them: that takes training it with either.
# On maps of which size each of them pays is said below, from what was just measured on your machine.


# %%
def verdict(name, than):
    wins = [relative[name, side] < relative[than, side] for side in sides]
    since = next((side for place, side in enumerate(sides) if all(wins[place:])), None)
    print(f"  {name}, against {than}:", f"faster from {since}×{since} on" if since else "not faster at 64×64")
    ratio, work = relative[than, 64] / relative[name, 64], multiply_adds[than, 64] / multiply_adds[name, 64]
    memory = f"{peak[name, 64]:.1f} MiB in the place of {peak[than, 64]:.1f}"
    print(f"    at 64×64 time divided by {ratio:.1f}, multiply-adds by {work:.1f}; {memory}")


print("\nMeasured here")
verdict("full, fused", "full, written out")
verdict("windowed", "full, fused")
verdict("linear", "full, fused")
