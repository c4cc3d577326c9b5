"""Products of the compiled pass by every instruction set of this machine and from every layout of weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import packing
from models import tiny
from test_runtime import assert_same_bits, random_tree, words
from truedraft.runtime import native
from truedraft.runtime.native import Form, Op, OpKind
from truedraft.runtime.panel_blocks import TABLE, BlockForm, Blocks
from truedraft.runtime.panels import by_panel, dequantised, panels
from truedraft.runtime.weights import Weight, fields, padded
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
SETS = {"AVX2": 2, "AVX-VNNI": 3, "AVX-VNNI as AVX-512 encodes it": 4, "AVX-512": 5, "AVX512-VNNI": 6}
SETS |= {"AVX-512 with bf16": 7, "AMX": 8}
WIDTHS = (*range(1, 18), 24, 35, 63, 64, 65, 130)


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    library: Any = native.library()
    wanted = SETS[request.param]
    if library.truedraft_choose(wanted) != wanted:
        library.truedraft_choose(max(SETS.values()))
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.truedraft_choose(max(SETS.values()))


def integers(out: int, width: int, bits: int, group: int | None) -> Weight:
    most = 1 << (bits - 1)
    values = torch.randint(-most, most, (out, width)).to(torch.int8)
    return Weight(values, torch.rand(out, *([width // group] if group else [])) / most, None)


def in_groups(out: int, width: int, bits: int) -> Weight:
    """Integers in groups of as many columns as AMX's tiles have, where they divide the width, or half as many."""
    return integers(out, width, bits, 16 if width % 32 else 32)


IN_PLACE = {
    Form.FLOAT: lambda out, width: Weight(torch.randn(out, width), None, None),
    Form.BF16: lambda out, width: Weight(torch.randn(out, width).bfloat16(), None, None),
    Form.INT8: lambda out, width: integers(out, width, 8, None),
    Form.GROUPED: lambda out, width: integers(out, width, 8, 16),
}
IN_PANELS = {
    Form.PANEL_FLOAT: IN_PLACE[Form.FLOAT],
    Form.PANEL_BF16: IN_PLACE[Form.BF16],
    Form.PANEL_INT8: IN_PLACE[Form.INT8],
    Form.PANEL_INT4: lambda out, width: in_groups(out, width, 4),
}
WEIGHTS = {
    **{form.name.lower(): make for form, make in IN_PLACE.items()},
    **{form.name.lower(): lambda out, width, make=make: panels(make(out, width)) for form, make in IN_PANELS.items()},
    "panel_int8 in groups": lambda out, width: panels(in_groups(out, width, 8)),
    "panel_int8 with offsets": lambda out, width: with_offsets(in_groups(out, width, 8)),
    "panel_int4 with offsets": lambda out, width: with_offsets(in_groups(out, width, 4)),
    "panel_int4 with offsets in fp16": lambda out, width: in_fp16(with_offsets(in_groups(out, width, 4))),
    "panel_int8 in fp16": lambda out, width: in_fp16(panels(in_groups(out, width, 8))),
    "panel_int4 with one group": lambda out, width: panels(integers(out, width, 4, width)),
}


FORMS = {
    "Q4_0": BlockForm(4),
    "Q4_1": BlockForm(4, offset=True),
    "Q5_0": BlockForm(5),
    "Q5_1": BlockForm(5, offset=True),
    "Q8_0": BlockForm(8),
    "IQ4_NL": BlockForm(4, table=True),
    "IQ4_XS": BlockForm(4, fine=True, table=True),
    "Q4_K": BlockForm(4, offset=True, fine=True),
    "Q5_K": BlockForm(5, offset=True, fine=True),
    "Q6_K": BlockForm(6, fine=True),
}


def in_blocks(form: BlockForm, out: int, width: int) -> Blocks:
    """Random integers of all values, with scales of all values where they are fine."""

    def factors(groups: int) -> Tensor:
        if form.fine:
            least, end = (0, 64) if form.offset else (-128, 128) if form.bits == 6 else (-32, 32)
            return torch.randint(least, end, (out, groups), dtype=torch.int8)
        return (torch.randn(out, groups) / 64).half()

    def units() -> Tensor | None:
        return (torch.rand(out, width // 256) / 4096).half() if form.fine else None

    groups, codes = width // form.columns, torch.randint(0, 1 << form.bits, (out, width), dtype=torch.uint8)
    offsets = (factors(groups), units()) if form.offset else (None, None)
    return Blocks(form, codes, factors(groups), offsets[0], units(), offsets[1])


def in_super_blocks(instructions: str, kind: str) -> bool:
    """Whether a product takes 256 columns at once, see super_blocks.inc."""
    return instructions == "AMX" and kind in FORMS and FORMS[kind].fine


def packed(blocks: Blocks) -> Weight:
    out, width = blocks.codes.shape
    return Weight(packing.packed(blocks), None, None, (out, width), True, blocks=blocks.form)


def with_offsets(weight: Weight) -> Weight:
    assert weight.scales is not None
    return replace(panels(weight), offsets=by_panel(torch.randn_like(weight.scales)))


def in_fp16(weight: Weight) -> Weight:
    scales, offsets = (None if t is None else t.half() for t in (weight.scales, weight.offsets))
    return replace(weight, scales=scales, offsets=offsets)


def product(weight: Weight, x: Tensor, narrow: bool = False, threads: int = 2) -> Tensor:
    kept, given = fields(weight, padded)
    library: Any = native.library()
    op = Op(kind=OpKind.LINEAR, dst=1, scale=1.0, narrow=narrow, **given)
    y = torch.full((len(x), weight.shape[0]), torch.nan)
    assert kept and library.truedraft_linear(op, x.data_ptr(), len(x), y.data_ptr(), threads) == 0
    return y


def plain(weight: Weight) -> Tensor:
    """The matrix that a weight stands for."""
    out, width = weight.shape
    values = weight.values
    if weight.panels and values.dtype == torch.bfloat16:
        values = values.unflatten(2, (16, 2)).permute(0, 2, 1, 3)
    elif weight.panels:
        if values.dtype == torch.int32:
            places = [4 * pair + 16 * odd for pair in range(4) for odd in range(2)]
            values = torch.stack([values << (28 - place) >> 28 for place in places], 2)
        values = values.reshape(len(values), -1, 16).mT
    matrix = values.reshape(-1, width)[:out].double()
    if weight.scales is None:
        return matrix

    def by_column(factors: Tensor) -> Tensor:
        rows = factors.mT.flatten(0, 1)[:out] if weight.panels else factors.view(out, -1)
        return rows.double().repeat_interleave(width // rows.shape[1], 1)

    return matrix * by_column(weight.scales) + (0 if weight.offsets is None else by_column(weight.offsets))


@pytest.mark.covering(2)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("out", "width"), [(1, 16), (16, 48), (53, 96), (200, 304)])
def test_a_product_is_that_of_torch_with_the_same_bits_at_any_width(
    instructions: str, kind: str, out: int, width: int, narrow: bool
) -> None:
    torch.manual_seed(0)
    weight = WEIGHTS[kind](out, width)
    assert weight.form.name.lower() == kind.split()[0] and weight.shape == (out, width)
    x = torch.randn(max(WIDTHS), width).bfloat16().float()
    check_product(weight, plain(weight), x, narrow)


def check_product(weight: Weight, matrix: Tensor, x: Tensor, narrow: bool) -> None:
    """That the products are those of the matrix in fp64, and the same to the bit for some of the nodes."""
    width = weight.shape[1]
    whole = product(weight, x, narrow)
    expected = x.double() @ matrix.T
    error, rounding = (whole - expected).abs(), 2**-8 * expected.abs() if narrow else 0
    assert (error - rounding).max() < 1e-5 * expected.std() * width**0.5
    for count in WIDTHS:
        assert torch.equal(product(weight, x[:count].clone(), narrow, 1 + count % 3), whole[:count])
        assert torch.equal(product(weight, x[-count:].clone(), narrow), whole[-count:])


@pytest.mark.covering(2)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("out", "width"), [(1, 256), (53, 512), (200, 768)])
def test_a_product_of_blocks_is_that_of_torch_with_the_same_bits_at_any_width(
    instructions: str, kind: str, out: int, width: int, narrow: bool
) -> None:
    if not native.takes_blocks():
        pytest.skip("these instructions do not multiply integers")
    torch.manual_seed(0)
    blocks = in_blocks(FORMS[kind], out, width)
    weight = packed(blocks)
    x = torch.randn(max(WIDTHS), width).bfloat16().float()
    check_product(weight, blocks.matrix().double(), x, narrow)


@pytest.mark.parametrize("kind", ["panel_int8 in groups", "panel_int4 with offsets", *FORMS])
def test_numbers_of_all_sizes_are_rounded_by_the_greatest_of_their_block(instructions: str, kind: str) -> None:
    """Nodes as they are: a few numbers a thousand times as large as the others, zeros, and the ends of fp32's range."""
    if not native.takes_blocks():
        pytest.skip("these instructions do not multiply integers")
    as_floats = kind not in FORMS and instructions == "AMX"  # plain integers, where a model computes in bf16
    torch.manual_seed(0)
    weight = packed(in_blocks(FORMS[kind], 40, 512)) if kind in FORMS else WEIGHTS[kind](40, 512)
    matrix = dequantised(weight).double()
    columns = 256 if in_super_blocks(instructions, kind) else 16 if kind == "Q6_K" else 32
    x = torch.randn(9, 512)
    x[1, ::100] *= 1000
    x[2, 32:] = 0
    x[3] = 0
    x[4] *= 1e30
    x[5] *= 1e-30
    x[6] = torch.where(torch.rand(512) < 0.5, -1.0, 1.0) * (2.0 - 2.0**-23)
    for digits, narrow in ((24, False),) if as_floats else ((24, False), (16, True)):
        given = x.bfloat16().float() if narrow else x
        most = given.unflatten(1, (-1, columns)).abs().amax(2).repeat_interleave(columns, 1).double()
        step = 2.0 ** (1 - digits) * 1.01 * 2  # of the greatest number, up to the power of two above it
        error = (product(weight, given, narrow) - given.double() @ matrix.T).abs()
        rounding = (2.0**-8 if narrow else 2.0**-20) * (given.abs().double() @ matrix.abs().T)
        assert (error <= step / 2 * (most @ matrix.abs().T) + rounding).all()
    for bad in () if as_floats else (torch.inf, -torch.inf, torch.nan):
        x[7, 300] = bad
        given = x.bfloat16().float()
        y = product(weight, given, narrow=True)
        assert y[7].isnan().all() and y[8].isfinite().all()
        assert torch.equal(y[:7], product(weight, given[:7].clone(), narrow=True))


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [kind for kind in FORMS if FORMS[kind].fine])
def test_super_blocks_are_added_up_exactly(kind: str, narrow: bool) -> None:
    """Products by dot products and by tiles are to the bit what super_blocks.inc says, computed in integers of 64 bits:
    for random numbers of any size, and for the largest that there are, of both signs."""
    library: Any = native.library()
    if library.truedraft_choose(SETS["AMX"]) != SETS["AMX"]:
        pytest.skip("this processor has no AMX")
    torch.manual_seed(0)
    blocks, form = in_blocks(FORMS[kind], 80, 512), FORMS[kind]
    least, most = (0, 63) if form.offset else (-128, 127) if form.bits == 6 else (-32, 31)
    for row, (code, scale) in enumerate((code, scale) for code in (0, (1 << form.bits) - 1) for scale in (least, most)):
        blocks.codes[row], blocks.scales[row] = code, scale
    x = torch.randn(130, 512) * 10.0 ** torch.randint(-10, 11, (130, 1))
    x[0], x[1], x[2] = 2.0 - 2.0**-7, 2.0**-7 - 2.0, 0
    x = x.bfloat16().float() if narrow else x
    expected = in_integers(blocks, x, 2 if narrow else 3)
    expected = expected.bfloat16().float() if narrow else expected
    for nodes in (1, 3, 4, 16, 17, 33, 130):
        assert torch.equal(product(packed(blocks), x[:nodes].clone(), narrow), expected[:nodes])


def in_integers(blocks: Blocks, x: Tensor, digits: int) -> Tensor:
    """Products of super-blocks: integers times scales times x in fixed point, added up exactly for 256 columns."""
    form, y = blocks.form, torch.zeros(len(x), len(blocks.codes))
    codes = TABLE[blocks.codes.int()] if form.table else blocks.codes.int() - form.half
    integers = codes.long() * blocks.scales.long().repeat_interleave(form.columns, 1)
    assert blocks.units is not None
    for k, part in enumerate(x.split(256, 1)):
        most = part.abs().amax(1, keepdim=True) * torch.tensor(1.00396)
        step = 2.0 ** (torch.frexp(most).exponent - 8 * digits + 1).clamp(-100 - 8 * digits + 1).double()
        fixed = (part / step).round().long()
        total, radix = fixed @ integers[:, 256 * k : 256 * (k + 1)].T, 256 ** (digits - 1)
        total = ((total // radix).float().double() * radix + total % radix).float()
        y = ((total * step).float().double() * blocks.units[:, k].double() + y.double()).float()
        if blocks.offsets is not None and blocks.offset_units is not None:
            sums = fixed.unflatten(1, (8, 32)).sum(2).float().double()
            total = torch.zeros_like(y)
            for g in range(8):
                total = (sums[:, g, None] * blocks.offsets[:, 8 * k + g].double() + total.double()).float()
            y = ((total * step).float().double() * blocks.offset_units[:, k].double() + y.double()).float()
    return y


@pytest.mark.covering(2)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *((kind, width) for kind in WEIGHTS if "panel_int" in kind for width in (48, 96, 512)),
        *((k, 512) for k in FORMS),
    ],
)
def test_integers_have_the_same_bits_by_every_instruction_set(kind: str, width: int, narrow: bool) -> None:
    """Where plain integers are multiplied as floats, by AVX2 in fp32 and by AMX in bf16, products have other bits, as
    products of super-blocks have."""
    levels = [
        level
        for name, level in SETS.items()
        if (not in_super_blocks(name, kind) if kind in FORMS else name != ("AMX" if narrow else "AVX2"))
    ]
    torch.manual_seed(0)
    weight = packed(in_blocks(FORMS[kind], 53, width)) if kind in FORMS else WEIGHTS[kind](53, width)
    x = torch.randn(37, width)  # as many as three tiles have, the last two of which share nodes
    x = x.bfloat16().float() if narrow else x
    x[1, ::7] *= 1e5
    x[2] = torch.where(torch.rand(width) < 0.5, -1.0, 1.0) * (2.0 - 2.0**-7)
    x[3] = 0
    library: Any = native.library()
    found = []
    try:
        for level in levels:
            if library.truedraft_choose(level) == level and native.takes_blocks():
                found.append(product(weight, x, narrow))
    finally:
        library.truedraft_choose(max(SETS.values()))
    assert all(torch.equal(found[0], y) for y in found[1:])


@pytest.mark.parametrize("runtime", ["auto", "in-place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_node_has_the_same_bits_however_it_is_scored(instructions: str, runtime: str, dtype: torch.dtype) -> None:
    for architecture in ("qwen3", "qwen2_moe"):
        assert_same_bits(DecoderTarget(tiny(architecture, dtype), runtime, strict=True), seeds=1)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox", "gpt_oss", "nemotron", "opt"])
def test_a_pass_over_panels_has_the_same_bits_in_eight_lanes_and_in_sixteen(architecture: str) -> None:
    """Softmax with caps, sinks and windows, and each activation, over rows that end in a part of a vector."""
    target = DecoderTarget(tiny(architecture, torch.float32), strict=True)
    assert target.runner.copied is not None
    library: Any = native.library()
    rng, found = random.Random(3), []
    prompts = [words(rng, n) for n in (1, 7, 8, 9, 21, 40)]
    trees = [random_tree(rng, prompt[-1], 11) for prompt in prompts]
    try:
        for wanted in (SETS["AVX2"], SETS["AVX-512"]):
            if library.truedraft_choose(wanted) != wanted:
                pytest.skip("this processor has no AVX-512")
            target.reserve(len(prompts), 64)
            first = target.prefill([Prompt(torch.tensor(prompt)) for prompt in prompts]).logits
            found.append((first, target.score(trees).logits))
    finally:
        library.truedraft_choose(max(SETS.values()))
    assert all(map(torch.equal, *found))
