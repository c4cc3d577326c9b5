"""Products of the compiled pass by every instruction set of this machine and from every layout of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models import tiny
from test_runtime import assert_same_bits
from truedraft.runtime import native
from truedraft.runtime.native import Form, Op, OpKind
from truedraft.runtime.panels import panels
from truedraft.runtime.weights import Weight, fields, padded
from truedraft.targets.decoder import DecoderTarget

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
SETS = {"AVX2": 2, "AVX-512": 5, "AVX-512 with bf16": 6}
WIDTHS = (*range(1, 18), 24, 63, 64, 65, 130)


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    library: Any = native.library()
    wanted = SETS[request.param]
    if library.truedraft_choose(wanted) != wanted:
        library.truedraft_choose(max(SETS.values()))
        pytest.skip(f"this processor has no {request.param}")
    yield
    library.truedraft_choose(max(SETS.values()))


def integers(out: int, width: int, bits: int, group: int | None) -> Weight:
    most = 1 << (bits - 1)
    values = torch.randint(-most, most, (out, width)).to(torch.int8)
    return Weight(values, torch.rand(out, *([width // group] if group else [])) / most, None)


IN_PLACE = {
    Form.FLOAT: lambda out, width: Weight(torch.randn(out, width), None, None),
    Form.BF16: lambda out, width: Weight(torch.randn(out, width).bfloat16(), None, None),
    Form.INT8: lambda out, width: integers(out, width, 8, None),
    Form.GROUPED: lambda out, width: integers(out, width, 8, 16),
}
IN_PANELS = {
    **{Form(form + Form.PANEL_FLOAT): make for form, make in IN_PLACE.items()},
    Form.PANEL_INT4: lambda out, width: integers(out, width, 4, 16),
}


def product(weight: Weight, x: Tensor, threads: int = 2) -> Tensor:
    kept, given = fields(weight, padded)
    library: Any = native.library()
    op, y = Op(kind=OpKind.LINEAR, dst=1, scale=1.0, **given), torch.full((len(x), weight.shape[0]), torch.nan)
    assert kept and library.truedraft_linear(op, x.data_ptr(), len(x), y.data_ptr(), threads) == 0
    return y


def plain(weight: Weight) -> Tensor:
    """The matrix that a weight not in panels stands for."""
    if weight.scales is None:
        return weight.values.double()
    scales = weight.scales.reshape(len(weight.values), -1)
    return weight.values * scales.double().repeat_interleave(weight.values.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize("form", [*IN_PLACE, *IN_PANELS], ids=lambda form: form.name.lower())
@pytest.mark.parametrize(("out", "width"), [(1, 16), (16, 48), (53, 80), (200, 304)])
def test_a_product_is_that_of_torch_with_the_same_bits_at_any_width(
    instructions: None, form: Form, out: int, width: int
) -> None:
    torch.manual_seed(0)
    original = {**IN_PLACE, **IN_PANELS}[form](out, width)
    weight = panels(original) if form in IN_PANELS else original
    assert weight.form == form and weight.shape == (out, width)
    x = torch.randn(max(WIDTHS), width).bfloat16().float()
    whole = product(weight, x)
    expected = x.double() @ plain(original).T
    assert (whole - expected).abs().max() < 1e-5 * expected.std() * width**0.5
    for count in WIDTHS:
        assert torch.equal(product(weight, x[:count].clone(), 1 + count % 3), whole[:count])
        assert torch.equal(product(weight, x[-count:].clone()), whole[-count:])


@pytest.mark.parametrize("runtime", ["auto", "in-place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_node_has_the_same_bits_however_it_is_scored(instructions: None, runtime: str, dtype: torch.dtype) -> None:
    for architecture in ("qwen3", "qwen2_moe"):
        assert_same_bits(DecoderTarget(tiny(architecture, dtype), runtime, strict=True), seeds=1)
