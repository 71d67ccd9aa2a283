"""Judge a result against the fp64 oracle: an error budget for numbers, equality for ids.

The budget of an output is twice the sum of what the eager reference loses in the same dtypes and
of what rounding the truth to the output's dtype loses, in relative L2; besides, every element
stays within a bound. NaN and infinities must stand where the truth has them.
"""

from __future__ import annotations

import math

import torch

from ..attend import attend
from . import oracle
from .make import Inputs

ELEMENT_BOUND = 2e-2
"""Largest error of an element, relative to itself or to its row's root mean square."""

FP8_QUERY_ELEMENT_BOUND = 3e-2
LSE_BOUND = 1e-3
"""Largest absolute error of an LSE."""


def expected_scores(inputs: Inputs) -> torch.Tensor:
    """Oracle's scores ``[Hi, T + spare, num_blocks]``, rounded to fp32 once, on the CPU."""
    q, pages = inputs.index_q.cpu().double(), inputs.index.tensor.cpu().float()
    scores = oracle.index_scores(q, pages, inputs.cpu_batch)
    return scores[..., : inputs.plan().num_blocks].float()


def expected_block_ids(inputs: Inputs) -> torch.Tensor:
    """Oracle's selection ``[T + spare, Hkv, topk]`` int32, on the CPU."""
    return oracle.select_blocks(expected_scores(inputs), inputs.cpu_batch, inputs.config)


def expected_attention(
    inputs: Inputs, block_ids: torch.Tensor, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle's out ``[T, Hq, D]`` and LSE ``[T, Hq]`` of the query tokens, fp64 on the CPU."""
    k, v = (side.cpu() for side in inputs.cache.dequantize(torch.float64))
    scale = inputs.config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    scale *= 1.0 if inputs.q_scale is None else float(inputs.q_scale)
    tokens = inputs.case.num_tokens
    q, ids = inputs.q.cpu().double()[:tokens], block_ids.cpu()[:tokens]
    return oracle.attend(q, k, v, ids, inputs.cpu_batch, scale)


def assert_attention(
    inputs: Inputs,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
) -> None:
    """``out`` (and ``lse``) of the query tokens are within the budget of attend's reference."""
    tokens = inputs.case.num_tokens
    truth, truth_lse = expected_attention(inputs, block_ids, softmax_scale)
    baseline = attend(
        inputs.q,
        inputs.cache,
        block_ids,
        inputs.plan(),
        q_scale=inputs.q_scale,
        softmax_scale=softmax_scale,
        out=torch.empty_like(out),
        impl="reference",
    )
    assert isinstance(baseline, torch.Tensor)
    is_fp8 = inputs.q.dtype == torch.float8_e4m3fn
    assert_close(
        "out",
        out[:tokens],
        truth,
        baseline=baseline[:tokens],
        element_bound=FP8_QUERY_ELEMENT_BOUND if is_fp8 else ELEMENT_BOUND,
    )
    if lse is not None:
        assert_lse("lse", lse[:tokens], truth_lse)


def assert_close(
    name: str,
    got: torch.Tensor,
    truth: torch.Tensor,
    *,
    baseline: torch.Tensor | None = None,
    element_bound: float = ELEMENT_BOUND,
) -> None:
    """``got`` is ``truth`` (fp64) within the budget.

    Args:
        baseline: the eager reference's result in the same dtypes; None: the budget is the output's
            rounding alone, which is what the reference itself is held to.
        element_bound: of an element's error, relative to itself or to the root mean square of its
            row (the last axis), whichever is larger. A row of zeros must be exactly 0.
    """
    got64, truth = got.detach().cpu().double(), truth.detach().cpu().double()
    _require_same_shape(name, got64, truth)
    _assert_same_anomalies(name, got64, truth)
    got64, truth = (x.nan_to_num(0.0, 0.0, 0.0) for x in (got64, truth))
    error = (got64 - truth).abs()
    row_rms = truth.square().mean(-1, keepdim=True).sqrt()
    bound = element_bound * truth.abs().maximum(row_rms)
    if bool((error > bound).any()):
        ratio = (error / bound).nan_to_num(0.0)
        raise AssertionError(
            f"{name}: {int((error > bound).sum())} of {error.numel()} elements beyond the bound "
            f"{element_bound:g}; worst at {_worst(ratio, got64, truth)}"
        )
    budget = error_budget(truth, got.dtype, baseline)
    measured = relative_error(got64, truth)
    if measured > budget:
        raise AssertionError(
            f"{name}: relative error {measured:.3e} beyond the budget {budget:.3e}; "
            f"worst at {_worst(error, got64, truth)}"
        )


def assert_lse(
    name: str, got: torch.Tensor, truth: torch.Tensor, *, bound: float = LSE_BOUND
) -> None:
    """``got`` is the LSE ``truth`` within an absolute error; -inf stands where it has to."""
    got, truth = got.detach().cpu().double(), truth.detach().cpu().double()
    _require_same_shape(name, got, truth)
    _assert_same_anomalies(name, got, truth)
    got, truth = (x.nan_to_num(0.0, 0.0, 0.0) for x in (got, truth))
    error = (got - truth).abs()
    if bool((error > bound).any()):
        raise AssertionError(f"{name}: beyond {bound:g}; worst at {_worst(error, got, truth)}")


def assert_same_ids(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Block ids are equal, entry for entry."""
    got, want = got.detach().cpu(), want.detach().cpu()
    _require_same_shape(name, got, want)
    wrong = got != want
    if bool(wrong.any()):
        row = tuple(wrong.nonzero()[0].tolist()[:-1])
        raise AssertionError(
            f"{name}: {int(wrong.any(-1).sum())} rows differ; first {_at(row)}: "
            f"got {got[row].tolist()}, expected {want[row].tolist()}"
        )


def assert_bitwise_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, NaN payloads and signs of zero included."""
    _require_same_shape(name, got, want)
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    got_bits, want_bits = (x.detach().cpu().contiguous().view(torch.uint8) for x in (got, want))
    wrong = (got_bits != want_bits).unflatten(-1, (-1, got.dtype.itemsize)).any(-1)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in bits; first "
            f"{_at(at)}: got {got[at].item()!r}, expected {want[at].item()!r}"
        )


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 error; of an all-zero truth the norm of what was got."""
    difference, norm = (got.double() - truth.double()).norm(), truth.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def error_budget(
    truth: torch.Tensor, dtype: torch.dtype, baseline: torch.Tensor | None = None
) -> float:
    """``2 * (error of the baseline + rounding to dtype)``, in relative L2."""
    rounding = relative_error(truth.to(dtype), truth) + _FP32_SUM_ERROR
    if baseline is None:
        return 2 * rounding
    finite = baseline.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    return 2 * (relative_error(finite, truth) + rounding)


_FP32_SUM_ERROR = 1e-6  # a sum of some thousand fp32 numbers; matters for fp32 outputs only


def _require_same_shape(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"


def _assert_same_anomalies(name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
    for kind, of in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = of(got) != of(truth)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {kind} in other places than the truth has it ({int(wrong.sum())} differ);"
                f" first {_at(at)}: got {float(got[at]):g}, expected {float(truth[at]):g}"
            )


def _worst(badness: torch.Tensor, got: torch.Tensor, truth: torch.Tensor) -> str:
    flat = int(badness.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), badness.shape))
    error = math.fabs(float(got[at]) - float(truth[at]))
    return f"{_at(at)}: got {float(got[at]):g}, expected {float(truth[at]):g}, error {error:.3e}"


def _at(index: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, index)) + "]"
