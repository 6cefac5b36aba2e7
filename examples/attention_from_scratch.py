# %% [markdown]
# # Attention from scratch
#
# This tutorial builds attention in NumPy, a few lines at a time: softmax, one head, the causal mask, batches, several
# heads, layer normalization and the transformer block. Each part is compared with the torch module that computes it,
# and then with the blocks of `vision_attn` on the feature maps of a CNN. The last section measures on your machine how
# much cheaper windowed and linear attention are.
#
# You need to know NumPy's `@` and broadcasting, and what a layer of a neural network is.
#
#     python examples/attention_from_scratch.py
#
# The script takes about ten seconds. Assertions check every statement about shapes and numbers; times are measured and
# printed.

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
from vision_attn.networks.capture.figures import Figure, save_figure
from vision_attn.networks.inspection.costs import count_macs

OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)
torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
torch.set_default_dtype(torch.float64)  # so that equal results agree to twelve decimals
rng = np.random.default_rng(0)

# %% [markdown]
# Three helper functions are used for the comparisons. `check` asserts that two arrays have the same shape and the same
# numbers, up to float64 rounding, and prints the largest difference. `differ` asserts the opposite. `randomized` fills
# all parameters of a torch module with random numbers, because a bias that is initialized to 0 or a factor that is
# initialized to 1 would hide an implementation that leaves it out.


# %%
def check(name, actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12, equal_nan=False, strict=True)
    print(f"  {name:<60} {actual.shape!s:<16} {abs(actual - expected).max():.0e}")


def differ(a, b):
    assert abs(np.asarray(a) - np.asarray(b)).max() > 1e-3


def randomized(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval(), {name: value.numpy() for name, value in module.state_dict().items()}


# %% [markdown]
# ## Softmax
#
# Softmax turns arbitrary numbers, the *logits*, into weights: `exp(l_j) / Σ exp(l_j')`, where the sum runs over all
# `j'`. The weights are positive and sum to 1.
#
# Evaluated literally, the formula fails for logits of 710 and above, because `exp` exceeds the range of float64. A
# constant that is added to all logits cancels in the fraction. The implementation therefore subtracts the largest logit
# first, so that `exp` never receives a number above 0.


# %%
def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


large = np.array([709.0, 710.0])
with np.errstate(over="ignore", invalid="ignore"):
    assert np.isinf(np.exp(large)).tolist() == [False, True]
    literal = np.exp(large) / np.exp(large).sum()
print("Softmax")
print("  of 709 and 710, literally:", literal, "  after subtracting 710:", softmax(large).round(3))
assert np.isnan(literal[1])

print(f"\n  {'comparison':<60} {'shape':<16} difference")
logits = rng.standard_normal((3, 5))
assert (softmax(logits) > 0).all()
check("sum of the weights of each row, 1", softmax(logits).sum(axis=-1), np.ones(3))
check("softmax after adding 700 to all logits", softmax(logits + 700), softmax(logits))
check("softmax, torch.softmax", softmax(logits), torch.softmax(from_numpy(logits), dim=-1))

# %% [markdown]
# ## Attention with one head
#
# The input is a sequence of *tokens*: vectors of `c` channels, which represent words or the positions of a feature map.
# Three linear layers turn each token into a *query*, a *key* and a *value*. The query of token `i` describes what the
# token searches for, and the key of token `j` describes what the token contains. The dot product of the two is the
# logit of this pair. Softmax over `j` turns the logits of one query into weights. The output of token `i` is the sum of
# all values, multiplied by these weights, and a final linear layer projects it. In *self*-attention, queries, keys and
# values are computed from the same tokens.
#
#     q, k, v = x W_qᵀ + b_q,  x W_kᵀ + b_k,  x W_vᵀ + b_v      (i, c) -> (i, d), (j, d), (j, e)
#     y       = softmax(q kᵀ · d^-½) v                          (i, e)
#     out     = y W_oᵀ + b_o                                    (i, c)
#
# Here `d` is the width of queries and keys, and `e` is the width of values; in this example both are equal to `c`. In
# the matrix `q kᵀ`, rows are queries and columns are keys. `torch.nn.MultiheadAttention` stacks `W_q`, `W_k` and `W_v`
# vertically in one matrix, `in_proj_weight`.
#
# The functions below count axes from the end, so they also work when batch and head axes are added in front. `.mT`
# transposes the last two axes.


# %%
def linear(x, weight, bias):
    return x @ weight.T + bias  # (i, in) -> (i, out)


def attend(q, k, v, mask=0.0):
    weights = softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask)  # (i, d), (j, d) -> (i, j)
    return weights @ v, weights  # (i, e), (i, j)


def self_attention(x, p, mask=0.0):
    q, k, v = np.split(linear(x, p["in_proj_weight"], p["in_proj_bias"]), 3, axis=-1)  # (i, c) each
    y, weights = attend(q, k, v, mask)  # (i, c), (i, j)
    return linear(y, p["out_proj.weight"], p["out_proj.bias"]), weights


def torch_attention(module, x, mask=None, **options):
    x = from_numpy(x)
    return module(x, x, x, attn_mask=None if mask is None else from_numpy(mask), **options)


# %%
tokens, c = 6, 8
one_head, one_p = randomized(nn.MultiheadAttention(c, num_heads=1, batch_first=True))
x = rng.standard_normal((tokens, c))
y, weights = self_attention(x, one_p)
print("\nOne head, compared with torch")
check("output", y, torch_attention(one_head, x)[0])
check("weights", weights, torch_attention(one_head, x)[1])

# %% [markdown]
# **Why the factor `d^-½`?** Take two vectors of `d` independent numbers with mean 0 and variance 1. Their dot product
# is a sum of `d` products with mean 0 and variance 1, so its variance is `d`. Without the factor, logits grow with the
# width, and softmax puts nearly all weight on one key before any training. The derivative of a weight `p` with respect
# to its own logit is `p (1 - p)`, which is close to 0 for such weights, so the layer learns slowly ([Vaswani et al.,
# 2017](https://arxiv.org/abs/1706.03762), section 3.2.1). With the factor, the variance is 1 at every width.
#
# The table shows the largest weight and its slope for random queries and 16 random keys, as means over 500 queries.

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
# A model that predicts the next token must not attend to that token. A *mask* is added to the logits: `-inf` above the
# diagonal, where the key comes after the query, and 0 elsewhere. Because `exp(-inf)` is 0, the weights of later tokens
# are exactly 0. No information from later tokens reaches earlier ones: if all tokens from the fourth on are replaced,
# the outputs of the first three tokens do not change.

# %%
allowed = np.tri(tokens, dtype=bool)  # query i may attend to key j if j <= i
causal = np.where(allowed, 0.0, -np.inf)  # (i, j)
print(f"\nThe causal mask of four tokens\n{causal[:4, :4]}\n")
y, weights = self_attention(x, one_p, causal)
check("output", y, torch_attention(one_head, x, causal)[0])
check("weights", weights, torch_attention(one_head, x, causal)[1])
assert (weights[~allowed] == 0).all()

changed = x.copy()
changed[3:] = rng.standard_normal((tokens - 3, c))
check("first three outputs, later tokens replaced", self_attention(changed, one_p, causal)[0][:3], y[:3])
differ(self_attention(changed, one_p)[0][:3], self_attention(x, one_p)[0][:3])  # without the mask they change

# %% [markdown]
# **Boolean masks have two opposite meanings in torch.** In `MultiheadAttention`, True means *blocked*. In
# `scaled_dot_product_attention` and in `vision_attn`, True means *may attend*. The wrong convention raises no error. If
# the causal mask is inverted, each token attends only to later tokens, and the last token attends to nothing.
#
# **If a query may not attend to any key**, all of its logits are `-inf`. The softmax above then returns NaN, and so
# does `MultiheadAttention`. In the next attention layer, every token that attends to this one becomes NaN as well. In
# `vision_attn`, the weights of such a query are zeros, and the output of the block is the bias of its last layer. This
# holds for every name in `va.implementations.IMPLS`. `"flex"` is left out here, because FlexAttention does not
# support float64.

# %%
q, k, v = rng.standard_normal((3, 1, 1, tokens, c))
fused = F.scaled_dot_product_attention(*map(from_numpy, (q, k, v)), attn_mask=from_numpy(allowed))
check("scaled_dot_product_attention, True = may attend", attend(q, k, v, causal)[0], fused)
check("MultiheadAttention, True = blocked", y, torch_attention(one_head, x, ~allowed)[0])
inverted, inverted_weights = torch_attention(one_head, x, allowed)  # the wrong convention
assert (inverted_weights.numpy()[:-1][allowed[:-1]] == 0).all()
assert inverted.isnan().any(dim=-1).tolist() == [False] * (tokens - 1) + [True]
assert torch_attention(one_head, inverted.numpy())[0].isnan().all()

with np.errstate(invalid="ignore"):
    fully_masked = softmax(np.full(3, -np.inf))
print("  softmax of three logits of -inf, as above:", fully_masked)
assert np.isnan(fully_masked).all()
block, state = randomized(va.blocks.Attention1d(c, num_heads=1))
outputs = []
impls = [impl for impl in va.implementations.IMPLS if impl != "flex"]
for impl in impls:
    va.set_impl_(block, impl)
    outputs.append(block(from_numpy(x.T[None]), from_numpy(~allowed)))  # (b, c, w): tokens in the last axis
last = torch.cat(outputs)[:, :, -1]
check("last token in each implementation, the bias", last, np.tile(state["proj.bias"], (len(impls), 1)))

# %% [markdown]
# ## Batches, and why attention needs a batched product
#
# A batch of `b` examples is one array of shape `(b, i, c)`. A linear layer needs no change for it: every example is
# multiplied by the same weights, so the tokens of all examples can be stacked into one matrix, and a single product
# computes the complete batch.

# %%
b = 3
x = rng.standard_normal((b, tokens, c))
layer = one_p["in_proj_weight"], one_p["in_proj_bias"]
one_by_one = np.stack([linear(example, *layer) for example in x])
print("\nBatches, compared with a loop over the examples")
check("linear layer of stacked rows", linear(x.reshape(b * tokens, c), *layer).reshape(b, tokens, 3 * c), one_by_one)

# %% [markdown]
# In `q kᵀ`, both factors belong to one example. The product of stacked rows would contain the dot product of every
# query with every key of every example: `b²` blocks, of which only the `b` blocks on the diagonal are needed. The
# result consists of `b` small products. They can be computed by a loop over the examples, by `@`, which treats the
# leading axes as a batch, or by one call of `torch.bmm`, the batched matrix multiplication.

# %%
q, k, v = np.split(one_by_one, 3, axis=-1)  # (b, i, c) each
one_by_one = np.stack([q[example] @ k[example].T for example in range(b)])  # (b, i, j)
stacked = q.reshape(b * tokens, c) @ k.reshape(b * tokens, c).T  # (b·i, b·j)
assert stacked.size == b * one_by_one.size
diagonal = stacked.reshape(b, tokens, b, tokens)[range(b), :, range(b)]  # (b, i, j)
check("q kᵀ, diagonal blocks of the stacked rows", diagonal, one_by_one)
check("q kᵀ, @", q @ k.mT, one_by_one)
check("q kᵀ, torch.bmm", torch.bmm(from_numpy(q), from_numpy(k).mT), one_by_one)
for name, actual, expected in zip(
    ("output", "weights"), self_attention(x, one_p, causal), torch_attention(one_head, x, causal), strict=True
):
    check(f"self_attention on a batch, {name}, compared with torch", actual, expected)

# %% [markdown]
# ## Several heads
#
# One head computes one set of weights for each token. With `n` heads, each token has `n` sets: the channels of queries,
# keys and values are split into `n` groups of `d = c / n` channels, each group computes attention separately, and the
# results are concatenated before the last layer. The heads are one more leading axis, `(b, n, i, d)`. Therefore
# `attend` works without changes, and `torch.bmm` receives a batch of `b · n` single heads. torch averages the returned
# weights over the heads, unless `average_attn_weights=False` is passed.


# %%
def split_heads(x, n):
    b, i, c = x.shape
    return x.reshape(b, i, n, c // n).swapaxes(1, 2)  # (b, i, c) -> (b, n, i, d)


def merge_heads(y):
    b, n, i, e = y.shape
    return y.swapaxes(1, 2).reshape(b, i, n * e)  # (b, n, i, e) -> (b, i, c)


def multi_head(x, p, n, mask=0.0):
    qkv = np.split(linear(x, p["in_proj_weight"], p["in_proj_bias"]), 3, axis=-1)  # (b, i, c) each
    y, weights = attend(*(split_heads(part, n) for part in qkv), mask)  # (b, n, i, d), (b, n, i, j)
    return linear(merge_heads(y), p["out_proj.weight"], p["out_proj.bias"]), weights


# %%
n = 2
two_heads, two_p = randomized(nn.MultiheadAttention(c, n, batch_first=True))
y, weights = multi_head(x, two_p, n, causal)
print("\nSeveral heads, compared with torch")
check("output", y, torch_attention(two_heads, x, causal)[0])
check("weights of each head", weights, torch_attention(two_heads, x, causal, average_attn_weights=False)[1])
check("weights, mean over heads", weights.mean(axis=1), torch_attention(two_heads, x, causal)[1])
q, k, _ = np.split(linear(x, two_p["in_proj_weight"], two_p["in_proj_bias"]), 3, axis=-1)
first = slice(c // n)  # the channels of the first head
check("weights of the first head, separately", attend(q[..., first], k[..., first], x, causal)[1], weights[:, 0])
q, k = split_heads(q, n), split_heads(k, n)  # (b, n, i, d)
logits = q @ k.mT  # (b, n, i, j)
q, k = (from_numpy(part).reshape(b * n, tokens, c // n) for part in (q, k))  # (b·n, i, d)
check("q kᵀ, torch.bmm over b · n", torch.bmm(q, k.mT).reshape(b, n, tokens, tokens), logits)

# %% [markdown]
# ## Layer normalization
#
# Layer normalization shifts and scales the channels of each token to mean 0 and variance 1, and then multiplies each
# channel by a learned factor and adds a learned bias ([Ba et al., 2016](https://arxiv.org/abs/1607.06450)). The
# variance is the mean of the squares: the sum is divided by `c`, not by `c - 1`. The constant `eps` prevents a division
# by 0 for a token whose channels are all equal.


# %%
def layer_norm(x, weight, bias, eps=1e-5):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


norm, norm_p = randomized(nn.LayerNorm(c))
print("\nLayer normalization, compared with torch")
check("tokens", layer_norm(x, **norm_p), norm(from_numpy(x)))
check("token with equal channels, the bias", layer_norm(np.full(c, 3.0), **norm_p), norm_p["bias"])

# %% [markdown]
# ## The transformer block
#
# Attention moves information between tokens. Two linear layers with a ReLU between them then process each token
# separately. Both parts are residual: their output is added to their input. In the original form, each sum is
# normalized afterwards (*post-norm*):
#
#     y   = norm1(x + attention(x))                         (b, i, c)
#     out = norm2(y + W_2 relu(W_1 y + b_1) + b_2)          (b, i, c)


# %%
def transformer_block(x, p, n, mask=0.0):
    attention = {name.removeprefix("self_attn."): value for name, value in p.items()}
    y = layer_norm(x + multi_head(x, attention, n, mask)[0], p["norm1.weight"], p["norm1.bias"])
    hidden = np.maximum(linear(y, p["linear1.weight"], p["linear1.bias"]), 0)
    return layer_norm(y + linear(hidden, p["linear2.weight"], p["linear2.bias"]), p["norm2.weight"], p["norm2.bias"])


encoder, encoder_p = randomized(nn.TransformerEncoderLayer(c, n, dim_feedforward=2 * c, dropout=0.0, batch_first=True))
print("\nTransformer block, compared with torch")
check("output", transformer_block(x, encoder_p, n), encoder(from_numpy(x)))
check("output, causal", transformer_block(x, encoder_p, n, causal), encoder(from_numpy(x), from_numpy(causal)))

# %% [markdown]
# ## The same numbers on feature maps
#
# A CNN has feature maps of shape `(b, c, h, w)` instead of `(b, i, c)`: the channels come first, and the tokens are the
# positions, row by row. A linear layer that is applied to every token becomes a 1×1 convolution, and its weight of
# shape `(out, in)` becomes `(out, in, 1, 1)`. After renaming the keys, all state dicts from above load into the blocks
# of `vision_attn`: into `Attention1d` for sequences `(b, c, w)`, and into `Attention2d` for feature maps with one or
# several rows.

# %%
RENAMED = {"self_attn.": "attn.", "in_proj_": "qkv.", "out_proj.": "proj.", "linear1": "fc1", "linear2": "fc2"}


def load_from(block, module, axes=2):
    """Load the parameters of a torch module, with 1×1 kernels of so many axes for its linear layers."""
    state = {}
    for name, value in module.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = value.reshape(*value.shape, *[1] * axes) if value.dim() == 2 else value
    block.load_state_dict(state)
    return block.eval()


h, w = 2, 3
expected, weights = multi_head(x, two_p, n, causal)
row = x.mT  # (b, c, i)
rows = row.reshape(b, c, h, w)
block_1d = load_from(va.blocks.Attention1d(c, n, causal=True), two_heads, axes=1)
block = load_from(va.Attention2d(c, n, causal=True), two_heads)
print("\nFeature maps, compared with the NumPy functions")
check("Attention1d, (b, c, w)", block_1d(from_numpy(row)), expected.mT)
check("Attention2d, one row", block(from_numpy(row[:, :, None])), expected.mT[:, :, None])
check("Attention2d, h×w", block(from_numpy(rows)), expected.mT.reshape(b, c, h, w))
check("Attention2d, h×w, weights of each head", block.attention_weights(from_numpy(rows)), weights)
transformer = va.blocks.TransformerBlock2d(c, n, mlp_ratio=2, norm_first=False, activation="relu", causal=True)
y = load_from(transformer, encoder)(from_numpy(rows))
check("TransformerBlock2d, h×w", y, transformer_block(x, encoder_p, n, causal).mT.reshape(b, c, h, w))

# %% [markdown]
# ## Attention ignores positions
#
# Apart from the mask, nothing in the equation depends on the position of a token. If the tokens are permuted, the
# outputs are permuted in the same way and do not change otherwise. Attention therefore cannot distinguish a sentence
# from its shuffled words, or a feature map from its shuffled positions. For this reason the blocks have the argument
# `position=`. The example uses rotary position embeddings, which rotate queries and keys by an angle that grows with
# the position; with them, shuffling the positions changes the result.

# %%
order = rng.permutation(tokens)
shuffled = x[:, order].mT.reshape(b, c, h, w)
plain = load_from(va.Attention2d(c, n), two_heads)
rotary = load_from(va.Attention2d(c, n, position=va.Rope()), two_heads)
print("\nPermuted tokens")
check("permuted outputs", multi_head(x[:, order], two_p, n)[0], multi_head(x, two_p, n)[0][:, order])
check("Attention2d, h×w", plain(from_numpy(shuffled)).flatten(2), plain(from_numpy(rows)).flatten(2)[:, :, order])
differ(rotary(from_numpy(shuffled)).flatten(2), rotary(from_numpy(rows)).flatten(2)[:, :, order])

# %% [markdown]
# ## Can attention be cheaper?
#
# The matrix of weights has tokens² entries in each head. A feature map of 64×64 has 4,096 tokens, and its matrix has 17
# million entries. There are three approaches to reduce the cost.
#
# - **Fused**: compute the same attention block by block, so that only one block of the matrix is in memory at a time
#   ([Dao et al., 2022](https://arxiv.org/abs/2205.14135)). The number of MACs (multiply-accumulate operations) does not
#   change, but the memory for the matrix is saved.
# - **Sparse**: let each token attend to some of the tokens only ([Child et al.,
#   2019](https://arxiv.org/abs/1904.10509)), for example to the positions of its own window ([Liu et al.,
#   2021](https://arxiv.org/abs/2103.14030)). Tokens of different windows do not attend to each other.
# - **Low rank**: replace the matrix by the product of a tall and a wide matrix, `softmax_d(q) softmax_j(k)ᵀ`, with the
#   first softmax over the channels of a query and the second over the tokens ([Shen et al.,
#   2021](https://arxiv.org/abs/1812.01243)). Because matrix products are associative, `q' (k'ᵀ v)` can be computed from
#   the right: the intermediate result has `d · e` numbers, and no matrix of tokens by tokens is needed.
#
# First, compare the matrices. All three use the same parameters, on a row of 64 positions with one head of `d = 8`.

# %%
full, _ = randomized(va.Attention2d(8, num_heads=1))
windowed = va.Attention2d(8, num_heads=1, pattern=va.Window(8))
low_rank = va.blocks.LinearAttention2d(8, num_heads=1)
windowed.load_state_dict(full.state_dict())
low_rank.load_state_dict(full.state_dict())
row = torch.randn(1, 8, 1, 64)
q, k, v = np.split(full.qkv(row)[0, :, 0].T.numpy(), 3, axis=-1)  # (i, d), (j, d), (j, e)
wide = softmax(k.T)  # (d, j)
matrices = {
    "full": full.attention_weights(row)[0, 0].numpy(),
    "windowed": windowed.attention_weights(row)[0, 0].numpy(),
    "linear": softmax(q) @ wide,  # (i, d), (d, j) -> (i, j)
}
print("\nMatrix of weights times values, compared with the block")
for (name, matrix), block in zip(matrices.items(), (full, windowed, low_rank), strict=True):
    check(name, full.proj(from_numpy((matrix @ v).T[None, :, None])), block(row))
    np.testing.assert_allclose(matrix.sum(axis=-1), 1)
check("linear, product of keys and values first", softmax(q) @ (wide @ v), matrices["linear"] @ v)
assert (wide @ v).shape == (8, 8)

# %% [markdown]
# In this example the matrix of full attention has full rank: its rows are linearly independent. The matrix of windowed
# attention is zero outside the blocks on its diagonal. The matrix of linear attention has at most rank `d`, regardless
# of its training, because each row is a combination of the same 8 rows.

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
figure.colorbar(shown, ax=figure.axes, label="attention weight", extend="max")
save_figure(figure, OUTPUT / "attention_matrices.png")
print(f"\nFigure of the three matrices: {OUTPUT / 'attention_matrices.png'}")
figure

# %% [markdown]
# Next, compare the cost. The projections need `4 c²` MACs per token. The attention between them needs `2 c` MACs for
# every key that a query attends to: all tokens in full attention, 64 in windowed attention, and effectively `d` in
# linear attention. The quadratic part of full attention therefore costs more than its projections only if the feature
# map has more than `2 c` tokens.
#
# From here on, everything is computed in float32, as in practice. The two versions of full attention are the same
# function. Windowed and linear attention are different functions, although they load the same parameters. Only on a
# feature map of one window, 8×8, is windowed attention equal to full attention.

# %%
torch.set_default_dtype(torch.float32)
c, n, d = 32, 1, 32
blocks = {
    "full, explicit": va.Attention2d(c, n, impl="bmm"),
    "full, fused": va.Attention2d(c, n, impl="sdpa"),
    "windowed": va.Attention2d(c, n, pattern=va.Window(8)),
    "linear": va.blocks.LinearAttention2d(c, n),
}
for block in blocks.values():
    block.load_state_dict(blocks["full, fused"].state_dict())
sides = (8, 16, 32, 64)  # each feature map has four times the tokens of the previous one
maps = {side: torch.randn(1, c, side, side) for side in sides}
one_window, four_windows = ({name: block(maps[side]) for name, block in blocks.items()} for side in (8, 16))
torch.testing.assert_close(four_windows["full, explicit"], four_windows["full, fused"])
torch.testing.assert_close(one_window["windowed"], one_window["full, fused"])
differ(four_windows["windowed"], four_windows["full, fused"])
differ(four_windows["linear"], four_windows["full, fused"])

macs = {}
for side, x in maps.items():
    tokens = side * side
    for (name, block), keys in zip(blocks.items(), (tokens, tokens, 64, d), strict=True):
        macs[name, side] = tokens * (4 * c**2 + 2 * c * keys)
        assert macs[name, side] == count_macs(block, x.shape)
for side in sides:
    projections = side**2 * 4 * c**2
    assert (macs["full, fused", side] > 2 * projections) == (side**2 > 2 * c)

# %% [markdown]
# The calls are timed in turns, so that other load on the machine affects all of them equally, and the median of three
# rounds is reported. Memory is the peak of all tensors that are allocated during a call: torch's profiler records a
# positive number of bytes when a tensor is allocated and a negative number when it is released, and the peak is the
# largest running sum.
#
# From 32×32 to 64×64 the number of tokens grows by a factor of 4. With the matrix in memory, the peak grows by nearly
# 16, as the matrix does. The factor stays below 16 because the peak includes the feature map, which grows by a factor
# of 4 only. For the other blocks, memory grows by at most 4.

# %%
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's warning that there is no GPU


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
assert 15 < growth["full, explicit"] < 16
# The factor is below 4 if a kernel allocates a workspace whose size does not depend on the feature map.
assert all(growth[name] <= 4 for name in blocks if name != "full, explicit")

relative_time = {key: np.median(times / seconds["full, fused", key[1]]) for key, times in seconds.items()}
relative_macs = {key: count / macs["full, fused", key[1]] for key, count in macs.items()}
print(f"\nFour kinds of attention by the side of the feature map; {c} channels, one head, threads: {threads}")
print(f"{'':<20}{'MACs, full = 1':^28} {'time, fused = 1':^28} {'peak memory, MiB':^28}")
print(f"{'':<20}" + " ".join(["".join(f"{side:>7}" for side in sides)] * 3))
for name in blocks:
    quantities = ((relative_macs, "7.3f"), (relative_time, "7.2f"), (peak, "7.1f"))
    columns = ["".join(format(values[name, side], form) for side in sides) for values, form in quantities]
    print(f"  {name:<18}" + " ".join(columns))

# %%
figure = Figure(figsize=(9.5, 4.2), layout="constrained")
left, right = figure.subplots(1, 2)
at = [side**2 for side in sides]
colors, lines = ("#000000", "#0072B2", "#D55E00", "#009E73"), ("o-", "s-", "^-", "D--")
for name, color, line in zip(blocks, colors, lines, strict=True):
    left.plot(at, [1e3 * np.median(seconds[name, side]) for side in sides], line, color=color, label=name)
    right.plot(at, [peak[name, side] for side in sides], line, color=color, label=name)
for axis, title in ((left, "time per call, ms"), (right, "peak memory per call, MiB")):
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(at, [f"{side**2:,}\n{side}×{side}" for side in sides])
    axis.set_xlabel("number of tokens and size of the feature map")
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
save_figure(figure, OUTPUT / "efficient_attention.png")
print(f"\nFigure of time and memory by number of tokens: {OUTPUT / 'efficient_attention.png'}")
figure

# %% [markdown]
# Fused attention computes the same function as the explicit version, which exists to be read. Windowed and linear
# attention are different functions. These measurements do not show how accurate a network is with them; that requires
# training. The lines below state from which size on each of them is faster on your machine.


# %%
def report_speedup(name, baseline):
    faster = [relative_time[name, side] < relative_time[baseline, side] for side in sides]
    smallest = next((side for index, side in enumerate(sides) if all(faster[index:])), None)
    result = f"faster from {smallest}×{smallest} on" if smallest else "not faster at 64×64"
    print(f"  {name}, compared with {baseline}: {result}")
    speedup, reduction = relative_time[baseline, 64] / relative_time[name, 64], macs[baseline, 64] / macs[name, 64]
    memory = f"{peak[name, 64]:.1f} MiB instead of {peak[baseline, 64]:.1f} MiB"
    print(f"    at 64×64: {speedup:.1f} times as fast, MACs divided by {reduction:.1f}, {memory}")


print("\nOn this machine")
report_speedup("full, fused", "full, explicit")
report_speedup("windowed", "full, fused")
report_speedup("linear", "full, fused")
