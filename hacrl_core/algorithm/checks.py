"""Refuse bad numbers by name: which rollout, which value, what to do."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import AlgorithmError

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SHOWN = 3


def as_floats(what: str, values: npt.ArrayLike, *, axes: str) -> FloatArray:
    """Return a float64 array with one axis per letter of ``axes``, or raise: ragged nesting means unequal groups."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise AlgorithmError(
            f"{what}: cannot be read as one array with axes {axes} ({error}); "
            "every agent must answer every prompt the same number of times; mask what is missing"
        ) from None
    if array.ndim != len(axes):
        raise AlgorithmError(f"{what}: shape {array.shape} has {array.ndim} axes, wanted {len(axes)} ({axes})")
    return array


def masked_floats(what: str, values: npt.ArrayLike, *, axes: str) -> tuple[FloatArray, BoolArray]:
    """Return a float64 array and where it is valid: everywhere, unless ``values`` is a `numpy.ma` masked array."""
    if isinstance(values, np.ma.MaskedArray):
        return as_floats(what, values.data, axes=axes), ~np.ma.getmaskarray(values)
    array = as_floats(what, values, axes=axes)
    return array, np.ones(array.shape, dtype=np.bool_)


def name_rollouts(bad: npt.ArrayLike, rollout_ids: Sequence[str] | npt.NDArray[np.str_] | None) -> str:
    """Name the first offenders by rollout id, or by position where the caller gave no ids."""
    bad_flat = np.flatnonzero(np.asarray(bad))
    if rollout_ids is None:
        places = [str(tuple(map(int, index))) for index in np.argwhere(np.asarray(bad))[:SHOWN]]
        named = "position " + ", ".join(places)
    else:
        ids_flat = np.asarray(rollout_ids, dtype=object).reshape(-1)
        named = "rollout " + ", ".join(str(ids_flat[index]) for index in bad_flat[:SHOWN])
    more = len(bad_flat) - SHOWN
    return named + (f" and {more} more" if more > 0 else "")


def require(
    what: str,
    good: npt.ArrayLike,
    values: npt.ArrayLike,
    remedy: str,
    rollout_ids: Sequence[str] | npt.NDArray[np.str_] | None = None,
) -> None:
    """Raise unless every element of ``good`` is true; the message carries the first bad value."""
    bad = ~np.asarray(good)
    if bad.any():
        first = np.asarray(values)[bad].reshape(-1)[0]
        raise AlgorithmError(f"{what}: {first} at {name_rollouts(bad, rollout_ids)}; {remedy}")


def require_finite(tensors: "Mapping[str, Tensor]", rollout_ids: Sequence[str] | None) -> None:
    """Raise if a tensor holds NaN or an infinity."""
    for what, tensor in tensors.items():
        values = tensor.detach()
        if not bool(values.isfinite().all()):
            numbers = values.cpu().numpy()
            require(what, np.isfinite(numbers), numbers, "score the response again", rollout_ids)


def require_shared(
    is_own: "Tensor", advantage: "Tensor", config: HacpoConfig, rollout_ids: Sequence[str] | None
) -> None:
    """Raise for a foreign response with an advantage where rollouts are not shared: it has no term."""
    if not config.share_rollouts:
        foreign = (~is_own & (advantage != 0)).cpu().numpy()
        remedy = "share_rollouts is false, so only own responses belong in the minibatch"
        require("advantage of a foreign response", ~foreign, advantage.detach().cpu().numpy(), remedy, rollout_ids)


def require_calibrated(config: HacpoConfig) -> None:
    """Raise if the window is still to be calibrated.

    A bound taken from one minibatch would differ from the iteration's.
    """
    if config.calibrated_share is not None:
        raise AlgorithmError(
            f"calibrated_share {config.calibrated_share:g}: the window is not chosen yet; "
            "pass the config through calibrated_config with the iteration's scores first"
        )


def require_loss_inputs(
    numbers: "Mapping[str, Tensor]",
    is_own: "Tensor",
    mask_BT: "Tensor | None",
    update_index: int,
    config: HacpoConfig,
    rollout_ids: Sequence[str] | None,
    *,
    checked: bool = False,
) -> None:
    """Raise unless the inputs of the loss fit together and, unless ``checked`` before, are finite.

    ``numbers`` starts with the learner's log-probs. Those per token are checked by the objective, which knows the rows.
    """
    if config.ratio_level == "token" and mask_BT is None:
        raise AlgorithmError("ratio_level 'token': mean log-probs do not determine this loss; use make_objective")
    if update_index < 0:
        raise AlgorithmError(f"update_index {update_index}: counts the updates already made, from 0")
    shapes = [tuple(values.shape) for values in (*numbers.values(), is_own)]
    if len(shapes[0]) != (1 if mask_BT is None else 2) or 0 in shapes[0] or set(shapes) != {shapes[0]}:
        raise AlgorithmError(f"loss: shapes {shapes}; all five must have the same single axis, not empty")
    if checked:
        return
    if mask_BT is None:
        require_finite(numbers, rollout_ids)
    require_shared(is_own, numbers["advantage"], config, rollout_ids)
