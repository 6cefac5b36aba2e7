# %% [markdown]
# # Einsum: a cheat sheet, from the transpose to multi-head attention
#
# After this page you can read and write any product of tensors as one line that names its indices. Each operation is
# there in plain torch, in `torch.einsum`, in einsum with an ellipsis where that helps, and in einx: from row sums to
# multi-head attention. You will also know which parts of attention need float32, and the page ends with a table of
# all operations, to be printed. You need to know NumPy and the product of two matrices.
#
#     python examples/einsum_cheatsheet.py
#
# It takes about eight seconds, most of them for loading. What the text says of shapes and numbers is asserted below it.

# %%
import math
import re
from pathlib import Path

import einx
import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn
from torch.testing import assert_close

import vision_attn as va
from vision_attn.attention.implementations import attend
from vision_attn.networks.figures import Figure, save_figure
from vision_attn.networks.safe import write_atomically

torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# Each operation is a call of `row`, with its ways written as strings. The same strings are what is run, what is
# compared and what the table at the end prints, so every line of the table has run and none can drift away from what
# it does. What is summed is read off einsum's equation, by the rule of the next section.

# %%
rows = []
WAYS = ("torch", "einsum", "einsum with ellipsis", "einx")


def shape(tensor):
    return "×".join(map(str, tensor.shape)) or "()"


def row(operation, *, torch, einsum=None, ellipsis=None, einx):
    ways = dict(zip(WAYS, (torch, einsum, ellipsis, einx), strict=True))
    results = [eval(code, globals()) for code in ways.values() if code]
    for result in results:
        assert_close(result, results[0])
    operands = [globals().get(name) for name in re.findall(r"\w+", torch)]
    shapes = ", ".join(shape(one) for one in operands if isinstance(one, Tensor)) + " → " + shape(results[0])
    left, right = re.search('"(.*)->(.*)"', einsum or '"->"').groups()
    summed = " ".join(sorted(set(left) - set(right) - {","})) or "–"
    rows.append({"operation": operation, "summed": summed, "shapes": shapes, **ways})
    print(f"{operation:<36} {summed:<8} {len(results):<6} {shapes}")
    return results[0]


# %% [markdown]
# ## The one rule
#
# Left of the arrow every tensor gets one letter for each of its axes, and tensors are separated by commas. A letter
# that occurs twice is the same index in both places. Right of the arrow stand the axes of the result. **An index that
# is missing on the right is summed.** As loops: the outer ones go over the letters on the right, the inner ones over
# those that are missing there, and inside everything is multiplied. The product of matrices `ij,jk->ik`:

# %%
a = torch.arange(6.0).reshape(2, 3)
m = torch.arange(12.0).reshape(3, 4)

product = torch.zeros(2, 4)
for i in range(2):
    for k in range(4):
        for j in range(3):  # missing on the right
            product[i, k] += a[i, j] * m[j, k]
assert_close(einsum("ij,jk->ik", a, m), product)

# %% [markdown]
# ## One matrix
#
# With nothing missing on the right the axes only change places: a transpose. With everything missing, all is summed.
# A *row sum* is one number for each row: `i` stays and the sum goes over `j`, along the row. A *column sum* is one
# number for each column: `j` stays and the sum goes over `i`. torch's `dim` names the axis that is summed, so row
# sums have `dim=1`.
#
# einx writes axes as names with spaces between them, and brackets mark the axes that are summed: `"i [j]"`. Its
# functions are called what they do; `einx.id`, the identity, changes no number and only moves them. In the shapes below
# `()` is that of a single number.

# %%
print(f"a is {tuple(a.shape)}, m is {tuple(m.shape)}\n{a}\n")
print(f"{'operation':<36} {'summed':<8} {'equal':<6} shapes")
row("transpose", torch="a.T", einsum='einsum("ij->ji", a)', einx='einx.id("i j -> j i", a)')
row("sum", torch="a.sum()", einsum='einsum("ij->", a)', einx='einx.sum("[i j]", a)')
row_sums = row(
    "row sums",
    torch="a.sum(dim=1)",
    einsum='einsum("ij->i", a)',
    ellipsis='einsum("...j->...", a)',
    einx='einx.sum("i [j]", a)',
)
column_sums = row(
    "column sums",
    torch="a.sum(dim=0)",
    einsum='einsum("ij->j", a)',
    ellipsis='einsum("i...->...", a)',
    einx='einx.sum("[i] j", a)',
)
assert row_sums.tolist() == [0 + 1 + 2, 3 + 4 + 5]
assert column_sums.tolist() == [0 + 3, 1 + 4, 2 + 5]
assert [one["summed"] for one in rows] == ["–", "i j", "j", "i"]

# %% [markdown]
# The ellipsis stands for any number of axes, also for none. `...j->...` sums over the last axis whatever comes before
# it: row sums, of one matrix or of a stack of them.

# %%
stack = torch.randn(5, 2, 3)
assert_close(einsum("...j->...", stack), torch.stack([one.sum(dim=1) for one in stack]))
assert_close(einsum("...j->...", a[0]), a[0].sum())

# %% [markdown]
# ## Products
#
# A comma separates two tensors, and a letter in both of them is multiplied. In all three products `j` is in both and
# missing on the right.

# %%
u, r = torch.arange(3.0), torch.tensor([2.0, -1.0, 5.0])
row(
    "matrix-vector product",
    torch="a @ u",
    einsum='einsum("ij,j->i", a, u)',
    ellipsis='einsum("...j,j->...", a, u)',
    einx='einx.dot("i j, j -> i", a, u)',
)
row(
    "matrix-matrix product",
    torch="a @ m",
    einsum='einsum("ij,jk->ik", a, m)',
    ellipsis='einsum("...ij,...jk->...ik", a, m)',
    einx='einx.dot("i j, j k -> i k", a, m)',
)
row("dot product", torch="u @ r", einsum='einsum("j,j->", u, r)', einx='einx.dot("j, j ->", u, r)')

# %% [markdown]
# Brackets may mark the sum in a product too, and change nothing where the arrow says it already.

# %%
assert_close(einx.dot("i [j], [j] k -> i k", a, m), product)

# %% [markdown]
# ## softmax(wᵀM)
#
# Softmax makes positive weights with a sum of 1 of any numbers: `exp(l_j) / Σ_j' exp(l_j')`. Here it takes the
# product of a vector and a matrix, `wᵀM`. Over which index do the weights sum to 1? In plain torch the reader has to
# work out that `w @ M` has one axis and whose it is. The equation shows it: `i` is summed, `j` is left. einx then
# says it at the softmax as well: brackets mark the axis whose weights sum to 1.

# %%
w, M = torch.randn(5), torch.randn(5, 7)
weights = row(
    "softmax(wᵀM)",
    torch="torch.softmax(w @ M, dim=0)",
    einsum='torch.softmax(einsum("i,ij->j", w, M), dim=0)',
    ellipsis='torch.softmax(einsum("...i,ij->...j", w, M), dim=-1)',
    einx='einx.softmax("[j]", einx.dot("i, i j -> j", w, M))',
)
assert_close(weights.sum(), torch.tensor(1.0))

# %% [markdown]
# ## A linear layer
#
# From here on the letters are those of the library: `b` batch, `c` channels, `i` query token, `j` key token, `n`
# heads, `d` width of queries and keys in a head, `e` width of values. A *token* is a vector of `c` channels: a word,
# or a position of a feature map. `o` is an index of outputs, for as long as heads do not matter.
#
# A linear layer without bias has a weight `(o, c)`, outputs first, and computes `x Wᵀ`. In einsum no transpose is
# needed: `c` is summed, wherever it stands. einsum's letters are single; einx takes whole names, as in the first of
# these rows. The second, a batch of sequences, has a new equation, but with the ellipsis it is the same one.

# %%
b, tokens, c, n, d = 2, 6, 12, 4, 3
weight = nn.Linear(c, 5, bias=False).weight.detach()
batch = torch.randn(b, c)
row(
    "linear layer, a batch",
    torch="F.linear(batch, weight)",
    einsum='einsum("bc,oc->bo", batch, weight)',
    ellipsis='einsum("...c,oc->...o", batch, weight)',
    einx='einx.dot("batch in, out in -> batch out", batch, weight)',
)
x = torch.randn(b, tokens, c)
row(
    "linear layer, a batch of sequences",
    torch="F.linear(x, weight)",
    einsum='einsum("bic,oc->bio", x, weight)',
    ellipsis='einsum("...c,oc->...o", x, weight)',
    einx='einx.dot("b i c, o c -> b i o", x, weight)',
)
assert_close(F.linear(x, weight), x @ weight.T)

# %% [markdown]
# ## Multi-head attention, step by step
#
# Each token looks at all tokens of its sequence: its *query* is multiplied with every token's *key*, softmax makes
# weights of these *logits*, and the output is the sum of the *values* by these weights. Several *heads* do so side by
# side, each on `d` channels of its own. Queries, keys and values are three linear layers of the same tokens, and a
# fourth puts the heads together. As in [llama](https://github.com/meta-llama/llama/blob/main/llama/model.py) they are
# separate and have no bias: `wq`, `wk`, `wv`, `wo`. llama's rotation of queries and keys by position and its causal
# mask are left out here.
#
# One product makes the queries of all heads, `n·d` numbers for a token. Then they are split. einsum cannot split an
# axis, since a letter is a whole axis: it needs torch's `unflatten` first. einx can: `(n d)` is one axis made of two,
# the head first, and `n=n` says how long it is.

# %%
wq, wk, wv = (nn.Linear(c, n * d, bias=False).weight.detach() for _ in range(3))
wo = nn.Linear(n * d, c, bias=False).weight.detach()
scale = d**-0.5

print(f"\nmulti-head attention: b i c = {b} {tokens} {c}, n d = {n} {d}")
xq = row(
    "project",
    torch="x @ wq.T",
    einsum='einsum("bic,oc->bio", x, wq)',
    ellipsis='einsum("...c,oc->...o", x, wq)',
    einx='einx.dot("b i c, nd c -> b i nd", x, wq)',
)
q = row(
    "split heads",
    torch="xq.unflatten(2, (n, d)).transpose(1, 2)",
    einsum='einsum("bind->bnid", xq.unflatten(2, (n, d)))',
    einx='einx.id("b i (n d) -> b n i d", xq, n=n)',
)

# %% [markdown]
# Keys and values in the same way. In the logits the key has a letter of its own for its tokens, `j`: every query
# meets every key. With `i` in its place a query would meet only the key of its own token, the diagonal. `b` and `n`
# are in both tensors and on the right: everything happens in each example and head by itself, and the ellipsis says
# just that. In plain torch `@` takes the last two axes as matrices, which have to be brought there, and `.mT`
# transposes them.

# %%
k, v = ((x @ w.T).unflatten(2, (n, d)).transpose(1, 2) for w in (wk, wv))
logits = row(
    "logits",
    torch="scale * q @ k.mT",
    einsum='scale * einsum("bnid,bnjd->bnij", q, k)',
    ellipsis='scale * einsum("...id,...jd->...ij", q, k)',
    einx='scale * einx.dot("b n i d, b n j d -> b n i j", q, k)',
)
assert_close(scale * einsum("bnid,bnid->bni", q, k), logits.diagonal(dim1=2, dim2=3))

# %% [markdown]
# Softmax goes over the keys, so that the weights of one query sum to 1. It is no product, and einsum has no word for
# it.

# %%
weights = row("softmax over keys", torch="torch.softmax(logits, dim=3)", einx='einx.softmax("b n i [j]", logits)')
assert_close(weights.sum(dim=3), torch.ones(b, n, tokens))
y = row(
    "weighted sum of values",
    torch="weights @ v",
    einsum='einsum("bnij,bnje->bnie", weights, v)',
    ellipsis='einsum("...ij,...je->...ie", weights, v)',
    einx='einx.dot("b n i j, b n j e -> b n i e", weights, v)',
)
merged = row(
    "merge heads",
    torch="y.transpose(1, 2).flatten(2)",
    einsum='einsum("bnie->bine", y).flatten(2)',
    einx='einx.id("b n i e -> b i (n e)", y)',
)
out = row(
    "output projection",
    torch="merged @ wo.T",
    einsum='einsum("bif,cf->bic", merged, wo)',
    ellipsis='einsum("...f,cf->...c", merged, wo)',
    einx='einx.dot("b i ne, c ne -> b i c", merged, wo)',
)

# %% [markdown]
# ## Multi-head attention, whole
#
# The same four times, as functions. In einsum it is the weights that are split, not the tokens: with `(n, d, c)` the
# projection and the split are one equation, and so are the merge and the output projection. In einx no tensor is
# reshaped beforehand at all.


# %%
def attention_torch(x, wq, wk, wv, wo, n):
    q, k, v = ((x @ w.T).unflatten(2, (n, -1)).transpose(1, 2) for w in (wq, wk, wv))
    logits = q.shape[-1] ** -0.5 * q @ k.mT
    weights = torch.softmax(logits, dim=3)
    y = weights @ v
    return y.transpose(1, 2).flatten(2) @ wo.T


def attention_einsum(x, wq, wk, wv, wo, n):
    q, k, v = (einsum("bic,ndc->bnid", x, w.unflatten(0, (n, -1))) for w in (wq, wk, wv))
    logits = q.shape[-1] ** -0.5 * einsum("bnid,bnjd->bnij", q, k)
    weights = torch.softmax(logits, dim=3)
    y = einsum("bnij,bnje->bnie", weights, v)
    return einsum("bnie,cne->bic", y, wo.unflatten(1, (n, -1)))


def attention_ellipsis(x, wq, wk, wv, wo, n):
    q, k, v = (einsum("...ic,ndc->...nid", x, w.unflatten(0, (n, -1))) for w in (wq, wk, wv))
    logits = q.shape[-1] ** -0.5 * einsum("...id,...jd->...ij", q, k)
    weights = torch.softmax(logits, dim=-1)
    y = einsum("...ij,...je->...ie", weights, v)
    return einsum("...nie,cne->...ic", y, wo.unflatten(1, (n, -1)))


def attention_einx(x, wq, wk, wv, wo, n):
    q, k, v = (einx.dot("b i c, (n d) c -> b n i d", x, w, n=n) for w in (wq, wk, wv))
    logits = q.shape[-1] ** -0.5 * einx.dot("b n i d, b n j d -> b n i j", q, k)
    weights = einx.softmax("b n i [j]", logits)
    y = einx.dot("b n i j, b n j e -> b n i e", weights, v)
    return einx.dot("b n i e, c (n e) -> b i c", y, wo)


# %% [markdown]
# That four functions agree does not make them right: all may have the same mistake. So they are compared with two
# that nobody wrote for this page: `F.scaled_dot_product_attention` between the same projections, and
# `nn.MultiheadAttention(bias=False)`, which has `wq`, `wk` and `wv` one below the other in one matrix.

# %%
heads = [(x @ w.T).view(b, tokens, n, d).transpose(1, 2) for w in (wq, wk, wv)]
by_kernel = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(b, tokens, n * d) @ wo.T

module = nn.MultiheadAttention(c, n, bias=False, batch_first=True)
module.load_state_dict({"in_proj_weight": torch.cat([wq, wk, wv]), "out_proj.weight": wo})
by_module, _ = module(x, x, x)

print("\nas functions, the largest difference from")
print(f"{'':<20} {'scaled_dot_product_attention':<30} nn.MultiheadAttention")
for attention in (attention_torch, attention_einsum, attention_ellipsis, attention_einx):
    ours = attention(x, wq, wk, wv, wo, n)
    for expected in (out, by_kernel, by_module):
        assert_close(ours, expected)
    print(f"{attention.__name__:<20} {(ours - by_kernel).abs().max():<30.0e} {(ours - by_module).abs().max():.0e}")

# %% [markdown]
# The one with the ellipsis also takes a sequence without a batch, or a batch of batches, as it is.

# %%
assert_close(attention_ellipsis(x[0], wq, wk, wv, wo, n), out[0])
assert_close(attention_ellipsis(x[None], wq, wk, wv, wo, n), out[None])

# %% [markdown]
# In grouped-query attention ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)) a few heads of queries share
# one head of keys and values. With `m` heads of keys, each for a group of `g` heads of queries, the logits are one
# line of einx, and no key has to be repeated.

# %%
grouped = einx.dot("b (m g) i d, b m j d -> b (m g) i j", q, k[:, :2])
assert_close(grouped, q @ k[:, :2].repeat_interleave(2, dim=1).mT)

# %% [markdown]
# ## Why softmax is computed in float32
#
# Networks often run in float16 or bfloat16. float16 ends at 65504, so `exp` overflows above log(65504) ≈ 11.09: the
# sum of the weights is infinite, and infinity divided by itself is NaN. The cure is to subtract the largest logit
# first. It changes nothing, since a factor `exp(-max)` above and below the fraction bar cancels, and `exp` then gives
# 1 at most. bfloat16 has the range of float32 and does not overflow here. What both lack is digits.

# %%
end = torch.finfo(torch.float16).max
assert end == 65504
assert round(math.log(end), 2) == 11.09
logits = torch.tensor([11.0, 12.0])
as_written = logits.half().exp() / logits.half().exp().sum()
subtracted = (logits.half() - logits.half().max()).exp()
subtracted /= subtracted.sum()
print("\nsoftmax of 11, 12 in float16")
print(f"as written                   {as_written.tolist()}")
print(f"with the largest subtracted  {[round(weight, 3) for weight in subtracted.tolist()]}")
assert logits.half().exp().isfinite().tolist() == [True, False]
assert as_written[1].isnan()
assert logits.bfloat16().exp().isfinite().all()
exact = logits.double().exp() / logits.double().exp().sum()
assert_close(subtracted.double(), exact, rtol=2**-10, atol=0)

# %% [markdown]
# bfloat16 keeps 8 binary digits. Rounding to it once changes a number by a factor of up to 1 ± 2⁻⁸, 0.4 %, and that
# much has to be accepted where weights are kept in bfloat16. The table says how many such roundings the worst of 64 ×
# 4096 weights is off, against float64. The queries and keys are exact in bfloat16, and the logits have a standard
# deviation (std) of about 1, or of 4.

# %%
once = torch.finfo(torch.bfloat16).eps / 2
assert once == 2**-8
q, k = torch.randn(64, 64).bfloat16(), torch.randn(4096, 64).bfloat16()


def roundings(weights, exact):
    return ((weights.double() / exact - 1).abs().max() / once).item()


def step_by_step(logits):
    above = (logits - logits.amax(dim=1, keepdim=True)).exp()
    return above / above.sum(dim=1, keepdim=True)


def errors(size):
    logits = size / 8 * q.double() @ k.double().T  # 8 is √d
    assert abs(logits.std() / size - 1) < 0.05
    rounded = logits.bfloat16()
    exact, exact_of_rounded = (torch.softmax(some.double(), dim=1) for some in (logits, rounded))
    cast = torch.softmax(rounded.float(), dim=1).bfloat16()
    in_float32 = torch.softmax(size / 8 * q.float() @ k.float().T, dim=1).bfloat16()
    return {
        "softmax of bfloat16 logits, each step rounded": roundings(step_by_step(rounded), exact_of_rounded),
        "… by torch.softmax(logits.float()).bfloat16()": roundings(cast, exact_of_rounded),
        "… by torch.softmax(logits)": roundings(torch.softmax(rounded, dim=1), exact_of_rounded),
        "logits rounded to bfloat16, softmax exact": roundings(exact_of_rounded, exact),
        "logits and softmax in float32, then rounded": roundings(in_float32, exact),
    }


at_1, at_4 = errors(1), errors(4)
print(f"\n{'the worst weight is off, in roundings to bfloat16':<50} std 1  std 4")
for name in at_1:
    print(f"{name:<50} {at_1[name]:>5.1f} {at_4[name]:>6.1f}")

# %% [markdown]
# Line by line:
#
# 1. With each step rounded, most is lost in the difference to the largest logit. Between 8 and 16 the numbers of
#    bfloat16 are 1/16 apart, so a difference there may be off by 1/32, and `exp` makes of that a factor: 3 %, or 8
#    roundings.
# 2. With softmax in float32 only the last rounding is left.
# 3. torch's own softmax of a bfloat16 tensor is as good: it computes in float32 inside and rounds once.
# 4. Logits that come out of a product in bfloat16 are rounded already, and the larger they are, the more is lost. No
#    later softmax brings it back. So `softmax(logits.float())` after a product in bfloat16, as llama has it, gains
#    nothing over `softmax(logits)`, by lines 2 and 3.
# 5. What helps is float32 from the product on.

# %%
by_step, cast, own, logits_rounded, in_float32 = zip(at_1.values(), at_4.values(), strict=True)
assert max(cast + own + in_float32) < 1.01
assert by_step[0] > 5
assert by_step[1] > 20
assert logits_rounded[0] > 3
assert logits_rounded[1] > 10
eight = torch.tensor(8.0).bfloat16()
assert eight.nextafter(2 * eight) - eight == 1 / 16
assert round(math.expm1(1 / 32) / once) == 8

# %% [markdown]
# And the sum has to be kept in more digits than its terms. A running sum in bfloat16 stands still as soon as a term
# is less than half of its last digit; divided by it, the weights of a query sum to more than 2 instead of 1.
# `torch.sum` and `torch.softmax` do not add in this way.

# %%
rounded = (q.double() @ k.double().T / 8).bfloat16()
above = (rounded - rounded.amax(dim=1, keepdim=True)).exp()
running = sum(above.unbind(dim=1))  # one after the other, rounded each time
assert torch.tensor(256.0).bfloat16() + 1 == 256  # standing still
share = (above / running[:, None]).double().sum(dim=1).mean()
print(f"\nsum of the weights of a query over {len(k)} keys, after a running sum in bfloat16: {share:.2f}")
assert share > 2
for weights in (step_by_step(rounded), torch.softmax(rounded, dim=1)):
    assert_close(weights.double().sum(dim=1), torch.ones(64).double(), rtol=2 * once, atol=0)

# %% [markdown]
# In the library every implementation computes the product and softmax in at least float32, whatever the dtype of the
# inputs. With the identity matrix as values, the output is the weights: one or two roundings off, where the product in
# bfloat16 costs more than ten. `impl="flex"` is left out here and below, since a CPU needs a C++ compiler for it.

# %%
values = torch.eye(1024).bfloat16()[None, None]
inputs = 4 * q[None, None], k[None, None, :1024]
exact = torch.softmax(inputs[0].double() @ inputs[1].double().mT / 8, dim=3)
product_in_bfloat16 = torch.softmax((inputs[0] @ inputs[1].mT / 8).float(), dim=3).bfloat16()
print("\nthe worst weight of 64 × 1024 at std 4, in roundings to bfloat16")
print(f"{'product in bfloat16, softmax in float32':<50} {roundings(product_in_bfloat16, exact):>5.1f}")
assert roundings(product_in_bfloat16, exact) > 10
impls = [impl for impl in va.IMPLS if impl != "flex"]
for impl in impls:
    weights = attend(*inputs, values, impl=impl)
    print(f"impl={impl!r:<45} {roundings(weights, exact):>5.1f}")
    assert roundings(weights, exact) < 2.5

# %% [markdown]
# ## The same numbers in a block of the library
#
# `va.Attention1d` attends along a map `(b, c, w)` with one axis, `va.Attention2d` between the positions of a map
# `(b, c, h, w)`. Both have `wq`, `wk` and `wv` in one convolution `qkv`, one below the other, and `wo` is `proj`. Rows
# of `qkv` are ordered by heads and then by width, as in `(n d)` above. The sides of the 1×1 kernel are axes of
# length 1.

# %%
print("\nblocks of the library: the largest difference from the rows above")
maps = {va.Attention1d: ("b w c -> b c w", {}), va.Attention2d: ("b (h w) c -> b c h w", {"h": 2})}
for kind, (to_map, sizes) in maps.items():
    block = kind(c, n, qkv_bias=False, proj_bias=False)
    ones = (1,) * kind.rank
    state = {"qkv.weight": torch.cat([wq, wk, wv]), "proj.weight": wo}
    block.load_state_dict({name: matrix.reshape(*matrix.shape, *ones) for name, matrix in state.items()})
    for impl in impls:
        with va.use_impl(block, impl):
            ours = block(einx.id(to_map, x, **sizes))
        expected = einx.id(to_map, out, **sizes)
        assert_close(ours, expected)
    print(f"va.{kind.__name__}  {shape(ours):<8} {(ours - expected).abs().max():.0e}")

# %% [markdown]
# ## The table
#
# As markdown, to paste, and as a picture of one A4 page in landscape, to print.

# %%
RULE = "An index that is missing on the right of the arrow is summed."
LETTERS = (
    "b batch, c channels, i query token, j key token, n heads, d width of queries and keys in a head, "
    "e width of values in a head, o outputs of a linear layer, f features of all heads, nd and ne the same"
)


def table(rows):
    """Rows as a table in markdown, code in backticks, columns aligned."""
    header = ["operation", "summed", *WAYS, "shapes"]
    cells = [[f"`{one[key]}`" if key in WAYS and one[key] else one[key] or "–" for key in header] for one in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * width for width in widths], *cells]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


sheet = f"{RULE}\n\n{table(rows)}\n{LETTERS}\n"
print(f"\n{' einsum_cheatsheet.md ':-^120}\n{sheet}{'':-^120}")
write_atomically(OUTPUT / "einsum_cheatsheet.md", sheet.encode())
print(f"written: {OUTPUT / 'einsum_cheatsheet.md'}")

# %%
figure = Figure(figsize=(11.69, 8.27))  # A4 in landscape, in inches
line = 0.0178


def write(rows, left, top):
    """Operation after operation, downwards from (left, top), in fractions of the page."""
    for one in rows:
        figure.text(left, top, one["operation"], size=9.5, weight="bold")
        summed = "" if one["summed"] == "–" else f"sum over {one['summed']}     "
        figure.text(left + 0.45, top, summed + one["shapes"], size=8.5, ha="right")
        for way in WAYS:
            if one[way]:
                top -= line
                figure.text(left, top, "with ellipsis" if "ellipsis" in way else way, size=8, color="0.35")
                figure.text(left + 0.075, top, one[way], size=8.5, family="monospace")
        top -= 1.45 * line
    return top


figure.text(0.03, 0.955, RULE, size=11)
write(rows[:10], 0.03, 0.92)
below = write(rows[10:], 0.52, 0.92)
figure.text(0.52, below - line, LETTERS.replace(", ", "\n"), size=9, va="top", linespacing=1.4)
save_figure(figure, OUTPUT / "einsum_cheatsheet.png")
print(f"written: {OUTPUT / 'einsum_cheatsheet.png'}")
figure
