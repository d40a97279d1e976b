"""Products in C against plain ones in float64: values, gradients, and where they are not wanted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from hacrl_core.native import products
from hacrl_core.native.products import add_linear, linear, product_library

pytestmark = pytest.mark.skipif(
    product_library() is None or product_library().product_rows() == 0, reason="no compiled products on this machine"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def close(found, expected, inner):
    """Within what a sum of so many float32 products of about 1 can be off."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * max(inner, 8))


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 140), st.integers(0, 1000))
@settings(deadline=None, max_examples=150)
def test_values_and_gradients_are_those_of_plain_products(rows, inner, columns, seed):
    """Whatever is left over behind whole blocks of rows and columns; the added rows have a gradient of their own."""
    given_ = draw(seed, (rows, inner), (columns, inner), (rows, columns))
    slope = draw(seed + 1, (rows, columns))[0]
    ours, exact = ([part.to(d).requires_grad_() for part in given_] for d in (torch.float32, torch.float64))
    for found, expected, count in (
        (linear(*ours[:2]), exact[0] @ exact[1].t(), 2),
        (add_linear(ours[2], *ours[:2]), exact[2] + exact[0] @ exact[1].t(), 3),
    ):
        close(found, expected, inner)
        gradients = torch.autograd.grad(found, ours[:count], slope)
        wanted = torch.autograd.grad(expected, exact[:count], slope.double())
        for one, other in zip(gradients, wanted, strict=True):
            close(one, other, max(rows, columns))


def test_weights_that_do_not_fit_into_the_near_cache_go_in_parts():
    x, weight = draw(2, (30, 700), (400, 700))
    close(linear(x, weight), x.double() @ weight.double().t(), 700)


def test_a_row_is_the_same_to_the_bit_wherever_it_lies():
    """Score and update lay their rows out differently, and the first ratios are 1."""
    x, weight, base = draw(3, (513, 128), (380, 128), (513, 380))
    whole = add_linear(base, x, weight)
    order = torch.randperm(513, generator=torch.Generator().manual_seed(1))
    assert torch.equal(add_linear(base[order], x[order], weight), whole[order])
    for rows in (8, 13, 100, 320):
        assert torch.equal(add_linear(base[:rows], x[:rows], weight), whole[:rows])


def test_inputs_may_lie_in_any_way_and_stay_as_they_were():
    x, weight, base = draw(4, (64, 20), (20, 33), (33, 64))
    views = base.t(), x[::2].repeat_interleave(2, 0), weight.t()
    before = [view.clone() for view in views]
    out = add_linear(*views)
    close(out, before[0].double() + before[1].double() @ before[2].double().t(), 20)
    assert all(torch.equal(view, kept) for view, kept in zip(views, before, strict=True))
    assert out.data_ptr() != base.data_ptr()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_stays_in_its_row_and_column(bad):
    x, weight = draw(5, (40, 16), (37, 16))
    x[7, 3] = bad
    weight[11, 2] = bad
    finite = torch.isfinite(linear(x, weight))
    expected = torch.ones(40, 37, dtype=torch.bool)
    expected[7] = expected[:, 11] = False
    assert torch.equal(finite, expected)


def test_what_the_functions_are_not_made_for_stays_with_torch(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("not for these")

    monkeypatch.setattr(products, "_product", refuse)
    x, weight, base = draw(6, (64, 8), (5, 8), (64, 5))
    assert torch.equal(linear(x[:3], weight), x[:3] @ weight.t())
    assert torch.equal(linear(x.double(), weight.double()), x.double() @ weight.double().t())
    assert linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    assert linear(x, weight[:0]).shape == (64, 0)
    assert torch.equal(linear(x[:, :0], weight[:, :0]), torch.zeros(64, 5))
    assert torch.equal(add_linear(base[:0], x[:0], weight), base[:0])
    torch.set_num_threads(2)
    assert torch.equal(add_linear(base, x, weight), torch.addmm(base, x, weight.t()))
    torch.set_num_threads(1)
    monkeypatch.setattr(products, "kernels", lambda name: None)
    assert torch.equal(add_linear(base, x, weight), torch.addmm(base, x, weight.t()))


def test_a_tensor_without_numbers_of_its_own_is_not_read():
    """Sharded and fake tensors have the address 0, which ended the process."""
    x, weight, base = draw(8, (64, 8), (5, 8), (64, 5))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(part) for part in (base, x, weight)]
        assert add_linear(*fake).shape == base.shape
        assert linear(*fake[1:]).shape == base.shape
    made_of_two = TwoTensor(weight, 2 * weight)
    found = linear(x, made_of_two)
    assert torch.equal(found.a, x @ weight.t())
    assert torch.equal(found.b, x @ (2 * weight).t())
    assert torch.equal(add_linear(base, x, made_of_two).a, torch.addmm(base, x, weight.t()))


def test_memory_does_not_grow_with_the_numbers_of_rows():
    """A library that keeps code for each shape did: 0.4 MB for each of them."""
    (weight,) = draw(7, (384, 128))
    most = torch.zeros(3000, 128)
    linear(most, weight)
    before = resident_mb()
    for rows in range(8, 3000, 10):
        linear(most[:rows], weight)
    assert resident_mb() - before < 30


def resident_mb():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6
