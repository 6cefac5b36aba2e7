# %% [markdown]
# # Einsum cheat sheet: from the transpose to multi-head attention
#
# This tutorial shows how to write any product of tensors as one expression that names its indices. Each operation, from
# row sums to multi-head attention, is written in plain torch, in `torch.einsum`, in einsum with an ellipsis where it
# helps, and in einx. The tutorial also explains which parts of attention need float32, and ends with a printable table
# of all operations. You need to know NumPy and matrix multiplication.
#
#     python examples/einsum_cheatsheet.py
#
# The script takes about eight seconds, mostly to import the libraries. Assertions check every statement about shapes
# and numbers.

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
from vision_attn.networks.capture.figures import Figure, save_figure
from vision_attn.networks.safe import write_atomically

torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
OUTPUT = Path("examples-output")
OUTPUT.mkdir(exist_ok=True)

# %% [markdown]
# Each operation is a call of `row`, which receives its versions as strings. `row` evaluates these strings, asserts that
# all results are equal, and stores them for the table at the end, so the table contains only code that has run. The
# column of summed indices is derived from the einsum equation by the rule of the next section.

# %%
rows = []
VERSIONS = ("torch", "einsum", "einsum with ellipsis", "einx")


def shape(tensor):
    return "×".join(map(str, tensor.shape)) or "()"


def row(operation, *, torch, einsum=None, ellipsis=None, einx):
    versions = dict(zip(VERSIONS, (torch, einsum, ellipsis, einx), strict=True))
    results = [eval(code, globals()) for code in versions.values() if code]
    for result in results:
        assert_close(result, results[0])
    operands = [globals().get(name) for name in re.findall(r"\w+", torch)]
    shapes = ", ".join(shape(x) for x in operands if isinstance(x, Tensor)) + " → " + shape(results[0])
    left, right = re.search('"(.*)->(.*)"', einsum or '"->"').groups()
    summed = " ".join(sorted(set(left) - set(right) - {","})) or "–"
    rows.append({"operation": operation, "summed": summed, "shapes": shapes, **versions})
    print(f"{operation:<36} {summed:<8} {len(results):<6} {shapes}")
    return results[0]


# %% [markdown]
# ## The rule
#
# On the left side of the arrow, each tensor has one letter for each of its axes, and commas separate the tensors. A
# letter that occurs twice denotes the same index in both positions. The right side lists the axes of the result. **An
# index that is missing on the right side is summed over.** Written as loops, the outer loops run over the letters on
# the right side, the inner loops over the missing letters, and the body multiplies all factors. This is the matrix
# product `ij,jk->ik`:

# %%
a = torch.arange(6.0).reshape(2, 3)
m = torch.arange(12.0).reshape(3, 4)

product = torch.zeros(2, 4)
for i in range(2):
    for k in range(4):
        for j in range(3):  # j is missing on the right side
            product[i, k] += a[i, j] * m[j, k]
assert_close(einsum("ij,jk->ik", a, m), product)

# %% [markdown]
# ## One matrix
#
# If no index is missing on the right side, the axes only change their order: a transpose. If all are missing, the
# result is the sum of all elements. A *row sum* is one number per row: `i` remains, and the sum runs over `j`, along
# the row. A *column sum* is one number per column: `j` remains, and the sum runs over `i`. In torch, `dim` names the
# axis that is summed over, so row sums use `dim=1`.
#
# einx separates axis names by spaces, and brackets mark the axes that are summed over: `"i [j]"`. Its functions are
# named after the operation; `einx.id`, the identity, changes no values and only rearranges axes. In the printed shapes,
# `()` is the shape of a scalar.

# %%
print(f"shapes: a {tuple(a.shape)}, m {tuple(m.shape)}\na = {a}\n")
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
assert [entry["summed"] for entry in rows] == ["–", "i j", "j", "i"]

# %% [markdown]
# The ellipsis represents any number of axes, including none. `...j->...` sums over the last axis of any tensor: it
# computes the row sums of one matrix or of a stack of matrices.

# %%
stack = torch.randn(5, 2, 3)
assert_close(einsum("...j->...", stack), torch.stack([matrix.sum(dim=1) for matrix in stack]))
assert_close(einsum("...j->...", a[0]), a[0].sum())

# %% [markdown]
# ## Products
#
# A comma separates two tensors, and a letter that occurs in both is an index of both factors. In the three products
# below, `j` occurs in both tensors and is missing on the right side.

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
# In einx, brackets may also mark the summed axes of a product. They are optional if the output already determines them.

# %%
assert_close(einx.dot("i [j], [j] k -> i k", a, m), product)

# %% [markdown]
# ## softmax(wᵀM)
#
# Softmax turns arbitrary numbers into positive weights that sum to 1: `exp(l_j) / Σ_j' exp(l_j')`. Here it is applied
# to the product of a vector and a matrix, `wᵀM`. Over which index do the weights sum to 1? In plain torch, the reader
# has to work out that `w @ M` has one axis, and which one. The einsum equation shows it: the sum runs over `i`, and `j`
# remains. einx also states it in the softmax: brackets mark the axis along which the weights sum to 1.

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
# From here on, the letters are those of the library: `b` batch, `c` channels, `i` query token, `j` key token, `n`
# heads, `d` width of queries and keys in a head, `e` width of values in a head. A *token* is a vector of `c` channels
# that represents a word or a position of a feature map. `o` is the index of the outputs of a linear layer.
#
# A linear layer without bias has a weight of shape `(o, c)`, outputs first, and computes `x Wᵀ`. In einsum no transpose
# is needed: `c` is summed over, regardless of its position. einsum uses single letters; einx also accepts names, as in
# the first row below. The second row, a batch of sequences, needs a new equation; the version with an ellipsis does not
# change.

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
# Each token attends to all tokens of its sequence: the dot products of its *query* with the *key* of every token are
# the *logits*, softmax turns them into weights, and the output is the sum of the *values*, multiplied by these weights.
# Several *heads* do this independently, each with its own `d` channels. Queries, keys and values are computed from the
# same tokens by three linear layers, and a fourth layer combines the heads. As in
# [Llama](https://github.com/meta-llama/llama/blob/main/llama/model.py), the layers are separate and have no bias: `wq`,
# `wk`, `wv`, `wo`. Llama's rotary position embeddings and causal mask are left out here.
#
# One product computes the queries of all heads, `n·d` numbers per token, which are then split. einsum cannot split an
# axis, because a letter denotes a complete axis; it needs torch's `unflatten` first. einx can: `(n d)` is one axis that
# consists of two, heads first, and `n=n` sets the number of heads.

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
# Keys and values are computed in the same way. In the logits, the tokens of the keys have a separate letter, `j`,
# because every query is multiplied with every key. With `i` in its place, each query would be multiplied only with the
# key of its own token: the diagonal. `b` and `n` occur in both tensors and on the right side, so each example and each
# head is computed independently; the ellipsis expresses exactly this. In plain torch, `@` multiplies matrices in the
# last two axes, so the axes have to be arranged for it, and `.mT` transposes the last two.

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
# The softmax runs over the keys, so that the weights of each query sum to 1. It is not a product and cannot be written
# in einsum.

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
# ## Multi-head attention as a function
#
# The next cell contains the four versions as functions. The einsum versions split the weights instead of the tokens:
# with weights of shape `(n, d, c)`, the projection and the split are one equation, and so are the merge and the output
# projection. The einx version reshapes no tensor beforehand.


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
# Four functions that agree can still share a mistake. They are therefore compared with two independent implementations:
# `F.scaled_dot_product_attention` between the same projections, and `nn.MultiheadAttention(bias=False)`, which stacks
# `wq`, `wk` and `wv` vertically in one matrix.

# %%
heads = [(x @ w.T).view(b, tokens, n, d).transpose(1, 2) for w in (wq, wk, wv)]
sdpa_out = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(b, tokens, n * d) @ wo.T

module = nn.MultiheadAttention(c, n, bias=False, batch_first=True)
module.load_state_dict({"in_proj_weight": torch.cat([wq, wk, wv]), "out_proj.weight": wo})
module_out, _ = module(x, x, x)

print("\nlargest difference of each function from")
print(f"{'':<20} {'scaled_dot_product_attention':<30} nn.MultiheadAttention")
for attention in (attention_torch, attention_einsum, attention_ellipsis, attention_einx):
    y = attention(x, wq, wk, wv, wo, n)
    for expected in (out, sdpa_out, module_out):
        assert_close(y, expected)
    print(f"{attention.__name__:<20} {(y - sdpa_out).abs().max():<30.0e} {(y - module_out).abs().max():.0e}")

# %% [markdown]
# The version with the ellipsis also accepts a single sequence or a batch of batches.

# %%
assert_close(attention_ellipsis(x[0], wq, wk, wv, wo, n), out[0])
assert_close(attention_ellipsis(x[None], wq, wk, wv, wo, n), out[None])

# %% [markdown]
# In grouped-query attention ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)), several query heads share one
# head of keys and values. With `m` key heads and `g` query heads per key head, the logits are one einx expression, and
# no keys are repeated.

# %%
grouped = einx.dot("b (m g) i d, b m j d -> b (m g) i j", q, k[:, :2])
assert_close(grouped, q @ k[:, :2].repeat_interleave(2, dim=1).mT)

# %% [markdown]
# ## Why softmax is computed in float32
#
# Networks often run in float16 or bfloat16. The largest number in float16 is 65504, so `exp` overflows above log(65504)
# ≈ 11.09: the sum of the weights is infinite, and infinity divided by infinity is NaN. The solution is to subtract the
# largest logit first. The result does not change, because the factor `exp(-max)` in the numerator and in the
# denominator cancels, and `exp` then returns at most 1. bfloat16 has the range of float32 and does not overflow here.
# Both types, however, have few digits.

# %%
largest = torch.finfo(torch.float16).max
assert largest == 65504
assert round(math.log(largest), 2) == 11.09
logits = torch.tensor([11.0, 12.0])
literal = logits.half().exp() / logits.half().exp().sum()
subtracted = (logits.half() - logits.half().max()).exp()
subtracted /= subtracted.sum()
print("\nsoftmax of 11, 12 in float16")
print(f"literally                          {literal.tolist()}")
print(f"after subtracting the largest      {[round(weight, 3) for weight in subtracted.tolist()]}")
assert logits.half().exp().isfinite().tolist() == [True, False]
assert literal[1].isnan()
assert logits.bfloat16().exp().isfinite().all()
exact = logits.double().exp() / logits.double().exp().sum()
assert_close(subtracted.double(), exact, rtol=2**-10, atol=0)

# %% [markdown]
# bfloat16 has a precision of 8 binary digits. One rounding to bfloat16 changes a number by a relative error of at most
# 2⁻⁸, or 0.4 %; this error is unavoidable if weights are stored in bfloat16. The table shows the largest relative error
# among 64 × 4096 weights compared with float64, in units of this rounding error. Queries and keys are exact in
# bfloat16, and the logits have a standard deviation (std) of about 1 or of 4.

# %%
one_rounding = torch.finfo(torch.bfloat16).eps / 2
assert one_rounding == 2**-8
q, k = torch.randn(64, 64).bfloat16(), torch.randn(4096, 64).bfloat16()


def roundings(weights, exact):
    """Return the largest relative error, in units of one rounding to bfloat16."""
    return ((weights.double() / exact - 1).abs().max() / one_rounding).item()


def step_by_step(logits):
    numerator = (logits - logits.amax(dim=1, keepdim=True)).exp()
    return numerator / numerator.sum(dim=1, keepdim=True)


def errors(size):
    logits = size / 8 * q.double() @ k.double().T  # (64, 4096); 8 is √d
    assert abs(logits.std() / size - 1) < 0.05
    rounded = logits.bfloat16()
    exact, exact_of_rounded = (torch.softmax(values.double(), dim=1) for values in (logits, rounded))
    cast = torch.softmax(rounded.float(), dim=1).bfloat16()
    in_float32 = torch.softmax(size / 8 * q.float() @ k.float().T, dim=1).bfloat16()
    return {
        "1. bfloat16 logits, softmax rounded at each step": roundings(step_by_step(rounded), exact_of_rounded),
        "2. bfloat16 logits, softmax(logits.float())": roundings(cast, exact_of_rounded),
        "3. bfloat16 logits, softmax(logits)": roundings(torch.softmax(rounded, dim=1), exact_of_rounded),
        "4. logits rounded to bfloat16, exact softmax": roundings(exact_of_rounded, exact),
        "5. logits and softmax in float32": roundings(in_float32, exact),
    }


at_1, at_4 = errors(1), errors(4)
print(f"\n{'largest error of a weight, in roundings to bfloat16':<52} std 1  std 4")
for name in at_1:
    print(f"{name:<52} {at_1[name]:>5.1f} {at_4[name]:>6.1f}")

# %% [markdown]
# Row by row:
#
# 1. If every step is rounded, most precision is lost in the difference from the largest logit. Between 8 and 16,
#    adjacent bfloat16 numbers are 1/16 apart, so the difference has an error of up to 1/32. After `exp`, this is a
#    relative error of 3 %, or 8 roundings.
# 2. If softmax is computed in float32, only the final rounding remains.
# 3. torch's softmax of a bfloat16 tensor is equally precise: it computes in float32 internally and rounds once.
# 4. Logits from a product in bfloat16 are already rounded, and the error grows with their size. No later softmax can
#    undo it. Rows 2 and 3 therefore imply that `softmax(logits.float())` after a product in bfloat16, as in Llama, has
#    no advantage over `softmax(logits)`.
# 5. To be precise, compute in float32 from the product on.

# %%
each_step, cast, builtin, rounded_logits, in_float32 = zip(at_1.values(), at_4.values(), strict=True)
assert max(cast + builtin + in_float32) < 1.01
assert each_step[0] > 5
assert each_step[1] > 20
assert rounded_logits[0] > 3
assert rounded_logits[1] > 10
eight = torch.tensor(8.0).bfloat16()
assert eight.nextafter(2 * eight) - eight == 1 / 16
assert round(math.expm1(1 / 32) / one_rounding) == 8

# %% [markdown]
# The sum also needs more digits than its terms. A running sum in bfloat16 stops growing as soon as a term is smaller
# than half of its last digit. If the terms are divided by this sum, the weights of a query sum to more than 2 instead
# of 1. `torch.sum` and `torch.softmax` do not have this problem.

# %%
rounded = (q.double() @ k.double().T / 8).bfloat16()
numerator = (rounded - rounded.amax(dim=1, keepdim=True)).exp()
running = sum(numerator.unbind(dim=1))  # term by term, rounded after each addition
assert torch.tensor(256.0).bfloat16() + 1 == 256  # the sum stops growing
total = (numerator / running[:, None]).double().sum(dim=1).mean()
print(f"\nsum of the weights of a query over {len(k)} keys, with a running sum in bfloat16: {total:.2f}")
assert total > 2
for weights in (step_by_step(rounded), torch.softmax(rounded, dim=1)):
    assert_close(weights.double().sum(dim=1), torch.ones(64).double(), rtol=2 * one_rounding, atol=0)

# %% [markdown]
# Every implementation of this library computes the product and softmax in at least float32, regardless of the dtype of
# the inputs. With the identity matrix as values, the output is equal to the weights. Their error is one or two
# roundings; with the product in bfloat16, it is more than ten. `impl="flex"` is left out here and below because it
# needs a C++ compiler on a CPU.

# %%
values = torch.eye(1024).bfloat16()[None, None]
inputs = 4 * q[None, None], k[None, None, :1024]
exact = torch.softmax(inputs[0].double() @ inputs[1].double().mT / 8, dim=3)
product_in_bfloat16 = torch.softmax((inputs[0] @ inputs[1].mT / 8).float(), dim=3).bfloat16()
print("\nlargest error among 64 × 1024 weights, std 4, in roundings to bfloat16")
print(f"{'product in bfloat16, softmax in float32':<50} {roundings(product_in_bfloat16, exact):>5.1f}")
assert roundings(product_in_bfloat16, exact) > 10
impls = [impl for impl in va.implementations.IMPLS if impl != "flex"]
for impl in impls:
    weights = attend(*inputs, values, impl=impl)
    print(f"impl={impl!r:<45} {roundings(weights, exact):>5.1f}")
    assert roundings(weights, exact) < 2.5

# %% [markdown]
# ## The same numbers with a block of the library
#
# `va.blocks.Attention1d` attends along feature maps `(b, c, w)` with one spatial axis, and `va.Attention2d` between the
# positions of feature maps `(b, c, h, w)`. Both stack `wq`, `wk` and `wv` vertically in the convolution `qkv`, and `wo`
# is `proj`. The rows of `qkv` are ordered by head and then by width, as in `(n d)` above. The 1×1 kernels add axes of
# length 1.

# %%
print("\nlargest difference of the library's blocks from the operations above")
maps = {va.blocks.Attention1d: ("b w c -> b c w", {}), va.Attention2d: ("b (h w) c -> b c h w", {"h": 2})}
for block_class, (to_map, sizes) in maps.items():
    block = block_class(c, n, qkv_bias=False, proj_bias=False)
    ones = (1,) * block_class.rank
    state = {"qkv.weight": torch.cat([wq, wk, wv]), "proj.weight": wo}
    block.load_state_dict({name: matrix.reshape(*matrix.shape, *ones) for name, matrix in state.items()})
    for impl in impls:
        with va.use_impl(block, impl):
            y = block(einx.id(to_map, x, **sizes))
        expected = einx.id(to_map, out, **sizes)
        assert_close(y, expected)
    print(f"va.{block_class.__name__}  {shape(y):<8} {(y - expected).abs().max():.0e}")

# %% [markdown]
# ## The table
#
# The table is written as Markdown and as a figure for one A4 page in landscape format.

# %%
RULE = "An index that is missing on the right side of the arrow is summed over."
LETTERS = (
    "b batch, c channels, i query token, j key token, n heads, d width of queries and keys in a head, "
    "e width of values in a head, o outputs of a linear layer, f (or nd and ne) features of all heads"
)


def table(rows):
    """Format rows as a Markdown table with code in backticks and aligned columns."""
    header = ["operation", "summed", *VERSIONS, "shapes"]
    cells = [[f"`{row[key]}`" if key in VERSIONS and row[key] else row[key] or "–" for key in header] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [header, ["-" * width for width in widths], *cells]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)


sheet = f"# Einsum cheat sheet\n\n{RULE}\n\n{table(rows)}\n{LETTERS}\n"
print(f"\n{' einsum_cheatsheet.md ':-^120}\n{sheet}{'':-^120}")
write_atomically(OUTPUT / "einsum_cheatsheet.md", sheet.encode())
print(f"written: {OUTPUT / 'einsum_cheatsheet.md'}")

# %%
figure = Figure(figsize=(11.69, 8.27))  # A4 in landscape, in inches
line = 0.0178


def write(rows, left, top):
    """Write the operations from (left, top) downwards, in fractions of the page."""
    for row in rows:
        figure.text(left, top, row["operation"], size=9.5, weight="bold")
        summed = "" if row["summed"] == "–" else f"sum over {row['summed']}     "
        figure.text(left + 0.45, top, summed + row["shapes"], size=8.5, ha="right")
        for version in VERSIONS:
            if row[version]:
                top -= line
                figure.text(left, top, "with ellipsis" if "ellipsis" in version else version, size=8, color="0.35")
                figure.text(left + 0.075, top, row[version], size=8.5, family="monospace")
        top -= 1.45 * line
    return top


figure.text(0.03, 0.955, RULE, size=11)
write(rows[:10], 0.03, 0.92)
below = write(rows[10:], 0.52, 0.92)
figure.text(0.52, below - line, LETTERS.replace(", ", "\n"), size=9, va="top", linespacing=1.4)
save_figure(figure, OUTPUT / "einsum_cheatsheet.png")
print(f"written: {OUTPUT / 'einsum_cheatsheet.png'}")
figure
