"""Bad numbers are refused by name: which rollout, which value, what to do."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hacrl_core.errors import AlgorithmError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SHOWN = 3


def as_floats(what: str, values: npt.ArrayLike, *, axes: str) -> FloatArray:
    """A float64 array with one axis per letter of ``axes``, or an error: ragged nesting means unequal groups."""
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
    """A float64 array and where it holds: everywhere, unless ``values`` is a `numpy.ma` masked array."""
    if isinstance(values, np.ma.MaskedArray):
        return as_floats(what, values.data, axes=axes), ~np.ma.getmaskarray(values)
    array = as_floats(what, values, axes=axes)
    return array, np.ones(array.shape, dtype=np.bool_)


def name_rollouts(bad: npt.ArrayLike, rollout_ids: Sequence[str] | npt.NDArray[np.str_] | None) -> str:
    """The first offenders by rollout id, or by position where the caller gave no ids."""
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
