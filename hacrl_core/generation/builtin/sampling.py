"""Drawing tokens: a counter-based uniform per request and position, pushed through the inverse of the CDF.

A token is a function of its row's logits and of ``uniform(seed, position)`` only. The logits of a row depend on its
neighbours at the level of rounding (a matrix product of another shape may add up in another order), and a uniform that
falls within that distance of a boundary of the CDF could land on either side. Such draws are flagged ``ambiguous``; the
scheduler decides them on logits of the sequence computed alone, so the decision is the same in any company.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hacrl_core.generation.protocols import SamplingParams
from hacrl_core.native import kernels

# Four times the largest rounding noise of a CDF that was measured in float32 on models of up to a million weights,
# between batches of 1 to 201 rows with and without shared prompts (2.4e-7) and from the logits alone (2.6e-7).
AMBIGUITY_MARGIN = 1e-6
# A flat tail has a boundary everywhere: below this probability the check would flag every draw, so it is left alone.
AMBIGUITY_FLOOR = 256 * AMBIGUITY_MARGIN

_Pointer, _Count, _Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def stream_keys(seeds: np.ndarray) -> np.ndarray:
    """Spread seeds, also small consecutive ones, over 64 bits."""
    return _mix64(seeds.astype(np.uint64) + _WEYL)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Return the number at ``position`` of the stream ``key``, in [0, 1) with 53 bits: SplitMix64 with a counter."""
    words = _mix64(keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _WEYL)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Draw:
    """One token per row, its log-probs, and where rounding could have tipped the draw."""

    tokens_B: Tensor
    policy_logprobs_B: Tensor  # of the raw policy
    sampling_logprobs_B: Tensor  # of the distribution drawn from; 0 when greedy
    ambiguous_B: Tensor


def draw(logits_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> Draw:
    """Draw one token per row.

    The order of the filters is that of transformers and vLLM: temperature, top-k, top-p on what top-k left.
    """
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        return _greedy(logits_BV)
    plain = params.top_k == 0 and params.top_p >= 1
    if plain and (native := _native_draw(logits_BV, uniforms_B, params.temperature)) is not None:
        return native
    tempered_BV = logits_BV if params.temperature == 1 else logits_BV / params.temperature
    peak_B1 = tempered_BV.amax(-1, keepdim=True)
    weights_BV = torch.exp(tempered_BV - peak_B1)
    edge_B = None
    if not plain:
        keep_BV, edge_B = _nucleus(weights_BV, params.top_k, params.top_p)
        weights_BV = weights_BV * keep_BV
    cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    total_B1 = cdf_BV[:, -1:]
    # The product can round up to the total itself, which is beyond the last token.
    target_B1 = torch.minimum(uniforms_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    weight_B1 = weights_BV.gather(1, tokens_B1).double()
    above_B1 = cdf_BV.gather(1, tokens_B1) - target_B1
    margin_B1 = torch.minimum(above_B1, weight_B1 - above_B1)
    near_B1 = (margin_B1 < AMBIGUITY_MARGIN * total_B1) & (weight_B1 > AMBIGUITY_FLOOR * total_B1)
    ambiguous_B = near_B1[:, 0] if edge_B is None else near_B1[:, 0] | edge_B
    sampling_B = (tempered_BV.gather(1, tokens_B1) - peak_B1 - total_B1.log())[:, 0]
    same = plain and params.temperature == 1
    policy_B = sampling_B if same else logprobs_of(logits_BV, tokens_B1[:, 0])
    return Draw(tokens_B1[:, 0], policy_B, sampling_B, ambiguous_B)


def _native_draw(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> Draw | None:
    """Draw from the whole distribution in compiled code; None where there is none, or a row has no distribution."""
    library = kernels("decode") if logits_BV.device.type == "cpu" and logits_BV.shape[1] else None
    if library is None:
        return None
    library.draw_rows.argtypes = (_Pointer, _Pointer, _Count, _Count, ctypes.c_float, *(_Double,) * 2, *(_Pointer,) * 4)
    library.draw_rows.restype = _Count
    rows, vocabulary = logits_BV.shape
    logits_BV, uniforms_B = logits_BV.contiguous(), uniforms_B.double().contiguous()
    cumulated_V = torch.empty(vocabulary, dtype=torch.float64)
    tokens_B, logprobs_B = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float64)
    ambiguous_B = torch.empty(rows, dtype=torch.bool)
    failed = library.draw_rows(
        logits_BV.data_ptr(), uniforms_B.data_ptr(), rows, vocabulary, temperature, AMBIGUITY_MARGIN, AMBIGUITY_FLOOR,
        cumulated_V.data_ptr(), tokens_B.data_ptr(), logprobs_B.data_ptr(), ambiguous_B.data_ptr(),
    )  # fmt: skip
    if failed:
        return None
    policy_B = logprobs_B if temperature == 1 else logprobs_of(logits_BV, tokens_B)
    return Draw(tokens_B, policy_B, logprobs_B, ambiguous_B)


def logprobs_of(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the log-prob of one token per row, in float64."""
    return logits_BV.gather(1, tokens_B[:, None])[:, 0].double() - torch.logsumexp(logits_BV, -1)


def _greedy(logits_BV: Tensor) -> Draw:
    best_B2, index_B2 = logits_BV.topk(min(2, logits_BV.shape[1]), -1)
    tokens_B = index_B2[:, 0]
    policy_B = logprobs_of(logits_BV, tokens_B)
    ambiguous_B = best_B2[:, 0] - best_B2[:, -1] < 10 * AMBIGUITY_MARGIN
    if logits_BV.shape[1] == 1:
        ambiguous_B = torch.zeros_like(ambiguous_B)
    return Draw(tokens_B, policy_B, torch.zeros_like(policy_B), ambiguous_B)


def _nucleus(weights_BV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Which tokens stay, and which rows have a token so near the edge that rounding decides whether it stays."""
    ordered_BV, index_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    count = ordered_BV.shape[1]
    edge_B = torch.zeros(len(ordered_BV), dtype=torch.bool, device=ordered_BV.device)
    if 0 < top_k < count:
        edge_B = ordered_BV[:, top_k - 1] - ordered_BV[:, top_k] < AMBIGUITY_MARGIN * ordered_BV[:, top_k - 1]
        ordered_BV[:, top_k:] = 0
    keep_BV = ordered_BV > 0
    if top_p < 1:
        cdf_BV = ordered_BV.cumsum(-1, dtype=torch.float64)
        before_BV = (cdf_BV - ordered_BV) / cdf_BV[:, -1:]
        keep_BV &= before_BV < top_p  # the token that crosses top_p stays
        edge_B = edge_B | ((before_BV - top_p).abs() < AMBIGUITY_MARGIN).any(-1)
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter(1, index_BV, keep_BV), edge_B
