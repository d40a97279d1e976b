"""The objective given to the trainer: rows of a minibatch in, their share of `hacpo.hacpo_loss` out.

The trainer knows no algorithm.

This module picks rows and denominators, measures KL and refuses bad input; the mathematics is in `hacpo`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hacrl_core.algorithm import hacpo
from hacrl_core.algorithm.checks import name_rollouts, require_calibrated, require_finite, require_shared
from hacrl_core.algorithm.diagnostics import RowStats
from hacrl_core.config.algorithm import HacpoConfig
from hacrl_core.errors import AlgorithmError, NotFiniteError

Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
TokenLists = Sequence[Tensor | None]


@dataclass(frozen=True)
class ObjectiveRows:
    """A minibatch without its tokens.

    ``old_logprobs`` are the learner's at the start of the iteration, from the score stage.
    """

    sampler_mean_logprob_B: Tensor
    advantage_B: Tensor
    is_own_B: Tensor
    omega_B: Tensor  # ω(sampler, learner)
    weight_B: Tensor  # how many identical responses the row stands for
    total_weight: float  # of the whole minibatch, skipped rows included
    old_logprobs: TokenLists | None = None
    # The old log-probs are of the update's own passes: then an own ratio is 1 before the first update by computation.
    old_of_update: bool = False
    reference_logprobs: TokenLists | None = None  # of the starting policy, for KL; None for foreign rows
    rollout_ids: Sequence[str] | None = None
    # What the learner's mean log-prob is multiplied with in the ratio (`hacpo.length_factors`); None: 1.
    learner_factor_B: Tensor | None = None

    def __post_init__(self) -> None:
        size = len(self.sampler_mean_logprob_B)
        for name, value in vars(self).items():
            if name not in ("total_weight", "old_of_update") and value is not None and len(value) != size:
                raise AlgorithmError(f"objective: {name} has {len(value)} rows, sampler_mean_logprob_B has {size}")
        summed = float(self.weight_B.sum())
        if not self.total_weight >= summed * (1 - 1e-6) or not self.total_weight > 0:
            raise AlgorithmError(
                f"objective: total_weight {self.total_weight} is below the rows' {summed}; "
                "it counts every response of the minibatch, skipped ones included"
            )


def make_objective(
    rows: ObjectiveRows, *, update_index: int, config: HacpoConfig, window_index: int | None = None
) -> Objective:
    """Return a function from the learner's log-probs of some rows to their share of the loss; shares add up.

    HACPO and GSPO take one ratio per response; GRPO one per token, averaged over the response, so that in each of them
    a long response weighs as much as a short one. Works in float64 whatever the model's dtype: GSPO's window is 3e-4
    wide. ``window_index`` is the m of the foreign window where it is not the number of updates made.
    """
    require_calibrated(config)
    numbers = {"sampler log-prob": rows.sampler_mean_logprob_B, "advantage": rows.advantage_B, "omega": rows.omega_B}
    require_finite(numbers, rows.rollout_ids)
    require_shared(rows.is_own_B.bool(), rows.advantage_B, config, rows.rollout_ids)
    old, reference = (
        None if lists is None else _TokenTable.of(what, lists, rows.rollout_ids)
        for what, lists in (("old_logprobs", rows.old_logprobs), ("reference_logprobs", rows.reference_logprobs))
    )
    window = update_index if window_index is None else window_index
    objective = _RowObjective(rows, update_index, window, config, old, reference)
    objective.require_denominators()
    return objective


@dataclass(frozen=True)
class _RowObjective:
    """The callable that `make_objective` returns."""

    rows: ObjectiveRows
    update_index: int
    window_index: int
    config: HacpoConfig
    old: "_TokenTable | None"
    reference: "_TokenTable | None"
    placed: "dict[torch.device, _Placed]" = field(default_factory=dict)
    unsettled: "list[_Faults]" = field(default_factory=list)

    def __call__(self, logprobs_BT: Tensor, mask_BT: Tensor, rows_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        here = self.on(logprobs_BT.device)
        mask_BT, index_B = mask_BT.bool(), rows_B.to(logprobs_BT.device, non_blocking=True)
        self.look_over(here, logprobs_BT, mask_BT, index_B)
        logprobs_BT64 = logprobs_BT.double()
        is_own_B, weight_B = here.is_own_B[index_B], here.weight_B[index_B]
        by_token = self.config.ratio_level == "token"
        now = logprobs_BT64 if by_token else hacpo.sequence_mean(logprobs_BT64, mask_BT)
        if here.learner_factor_B is not None:
            now = now * here.learner_factor_B[index_B]

        def shaped(values_B: Tensor) -> Tensor:
            picked = values_B[index_B]
            return picked[:, None].expand_as(now) if by_token else picked

        kl_B, measured_B = self.kl(here, logprobs_BT64, mask_BT, index_B)
        loss, terms = hacpo.hacpo_loss(
            now,
            self.denominator(here, now, mask_BT, index_B, shaped),
            shaped(here.advantage_B),
            shaped(here.is_own_B),
            shaped(here.omega_B),
            update_index=self.window_index,
            config=self.config,
            mask_BT=mask_BT if by_token else None,
            penalty_B=self.config.kl_coefficient * kl_B,
            weight_B=weight_B,
            total_weight=self.rows.total_weight,
            checked=True,
        )
        kl_stat_B = torch.where(measured_B, kl_B.detach(), torch.nan)
        stats = RowStats.of(terms, is_own=is_own_B, count=weight_B, kl=kl_stat_B, mask_BT=mask_BT if by_token else None)
        mismatch = self.score_mismatch(here, logprobs_BT64.detach(), mask_BT, index_B)
        return loss.to(logprobs_BT.dtype), stats.as_dict() | mismatch

    def on(self, device: torch.device) -> "_Placed":
        """Return the rows on a device. They are copied once: a copy per call would make the GPU wait each time."""
        if device not in self.placed:
            self.placed[device] = _Placed.of(self, device)
        return self.placed[device]

    def denominator(
        self, here: "_Placed", now: Tensor, mask_BT: Tensor, index_B: Tensor, shaped: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what each response is compared with: its sampler, or the learner at the start of the iteration.

        Before the first update the learner still *is* that policy, so its ratio is 1 by definition: the denominator is
        its present value. The noise between two forward passes would be wider than GSPO's window. Old log-probs of the
        update's own passes have no such noise.
        """
        sampler = shaped(here.sampler_mean_logprob_B)
        if self.update_index == 0 and not self.rows.old_of_update:
            learner_then = now.detach()
        elif here.old is not None:
            old_BT = here.old.padded(index_B, mask_BT, fill_BT=torch.zeros_like(mask_BT, dtype=torch.float64))
            learner_then = old_BT if now.ndim == 2 else hacpo.sequence_mean(old_BT, mask_BT)
        else:
            learner_then = sampler  # for own responses the sampler was the learner
        return torch.where(shaped(here.against_learner_B), learner_then, sampler)

    @property
    def against_learner_B(self) -> Tensor:
        """Where the denominator is the learner at the start of the iteration, not the sampler."""
        own = self.rows.is_own_B.bool()
        return torch.ones_like(own) if self.config.foreign_treatment == "as_own" else own

    def score_mismatch(
        self, here: "_Placed", logprobs_BT: Tensor, mask_BT: Tensor, index_B: Tensor
    ) -> dict[str, Tensor]:
        """Before the first update: how far each own response's mean log-prob is from the scored one; NaN for others.

        The policies are the same then, so this is the noise between the two stages' forward passes, which the ratio of
        the first update, 1 by definition, does not show.
        """
        if self.update_index or here.old is None or self.rows.old_of_update:
            return {}
        old_BT = here.old.padded(index_B, mask_BT, fill_BT=torch.full_like(logprobs_BT, torch.nan))
        off_B = hacpo.sequence_mean(logprobs_BT, mask_BT) - hacpo.sequence_mean(old_BT, mask_BT)
        fits_B = here.is_own_B[index_B] & ~here.old.misfits(index_B, mask_BT.sum(dim=1))
        return {"score_mismatch": torch.where(fits_B, off_B.abs(), torch.nan)}

    def kl(self, here: "_Placed", logprobs_BT: Tensor, mask_BT: Tensor, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return each own response's mean k3 to the starting policy, 0 for the others, and where it was measured."""
        is_own_B = here.is_own_B[index_B]
        if here.reference is None:
            return torch.zeros_like(is_own_B, dtype=torch.float64), torch.zeros_like(is_own_B)
        # A row without reference is compared with itself: its KL and its gradient are exactly 0.
        reference_BT = here.reference.padded(index_B, mask_BT, fill_BT=logprobs_BT.detach())
        measured_B = is_own_B & (here.reference.length_B[index_B] > 0)
        kl_B = hacpo.sequence_mean(hacpo.k3(logprobs_BT, reference_BT, self.config.max_abs_log_ratio), mask_BT)
        return torch.where(measured_B, kl_B, 0.0), measured_B

    def require_denominators(self) -> None:
        """Raise where the log-probs of a denominator or of the KL's reference are missing."""
        needs_old = self.config.ratio_level == "token" or bool(
            (self.against_learner_B & ~self.rows.is_own_B.bool()).any()
        )
        if self.update_index > 0 and needs_old and self.rows.old_logprobs is None:
            raise AlgorithmError(
                f"objective: foreign_treatment {self.config.foreign_treatment!r} and "
                f"ratio_level {self.config.ratio_level!r} need "
                "old_logprobs after the first update; pass the learner's scores of the start of the iteration"
            )
        if self.update_index > 0 and self.old is not None:
            without = self.against_learner_B.cpu() & (self.old.length_B == 0)
            if bool(without.any()):
                raise AlgorithmError(
                    f"old_logprobs: none for {name_rollouts(without, self.rows.rollout_ids)}; score it again"
                )
        if self.config.kl_coefficient > 0:
            reference = self.rows.reference_logprobs
            missing = [
                own and (reference is None or reference[i] is None) for i, own in enumerate(self.rows.is_own_B.tolist())
            ]
            if any(missing):
                raise AlgorithmError(
                    f"objective: kl_coefficient {self.config.kl_coefficient:g} needs reference_logprobs "
                    f"for every own response; none at {name_rollouts(missing, self.rows.rollout_ids)}"
                )

    def look_over(self, here: "_Placed", logprobs_BT: Tensor, mask_BT: Tensor, index_B: Tensor) -> None:
        """Find rows that cannot be used. On the CPU they are refused at once, elsewhere by `settle`."""
        wanted_B = mask_BT.sum(dim=1)
        broken_B = (~torch.isfinite(logprobs_BT.detach()) & mask_BT).any(dim=1)
        reference_B, old_B = (
            torch.zeros_like(broken_B) if table is None else table.misfits(index_B, wanted_B)
            for table in (here.reference, here.old if self.update_index or self.rows.old_of_update else None)
        )
        faults = _Faults(torch.stack([wanted_B == 0, broken_B, reference_B, old_B]), wanted_B, index_B)
        if logprobs_BT.device.type != "cpu":
            self.unsettled.append(faults)
        elif bool(faults.found_KB.any()):
            self.refuse(faults)

    def settle(self) -> None:
        """Raise for the first bad row that was seen on a GPU since the last call.

        The trainer calls it once per minibatch, before it uses the gradient: a question per call of the objective would
        make the GPU wait each time.
        """
        seen = list(self.unsettled)
        self.unsettled.clear()
        if seen and bool(torch.stack([faults.found_KB.any() for faults in seen]).any()):
            for faults in seen:
                self.refuse(_Faults(faults.found_KB.cpu(), faults.wanted_B.cpu(), faults.index_B.cpu()))

    def refuse(self, faults: "_Faults") -> None:
        """Raise for the first kind of fault that was found, naming the rollouts."""
        empty_B, broken_B, reference_B, old_B = faults.found_KB
        names = [_name(self.rows.rollout_ids, row) for row in faults.index_B]
        if bool(empty_B.any()):
            raise AlgorithmError(
                f"response without tokens: {name_rollouts(empty_B, names)}; leave it out and count it in total_weight"
            )
        if bool(broken_B.any()):
            raise NotFiniteError(
                f"log-prob that is NaN or infinite: {name_rollouts(broken_B, names)}; the learner has diverged or an "
                "attention mask is wrong: lower the learning rate or score the response again"
            )
        for table, wrong_B in ((self.reference, reference_B), (self.old, old_B)):
            if table is not None and bool(wrong_B.any()):
                place = int(wrong_B.nonzero()[0])
                raise AlgorithmError(
                    f"{table.what}: {int(table.length_B[faults.index_B[place]])} log-probs for the "
                    f"{int(faults.wanted_B[place])} tokens of {names[place]}; score it again"
                )


@dataclass(frozen=True)
class _Faults:
    """Which of the rows of a call cannot be used, by kind: no tokens, not finite, reference or old of other length."""

    found_KB: Tensor
    wanted_B: Tensor  # tokens of the response
    index_B: Tensor  # rows of the minibatch


@dataclass(frozen=True)
class _Placed:
    """What a call picks its rows from, on one device; numbers in float64."""

    sampler_mean_logprob_B: Tensor
    advantage_B: Tensor
    is_own_B: Tensor
    against_learner_B: Tensor
    omega_B: Tensor
    weight_B: Tensor
    learner_factor_B: Tensor | None
    old: "_TokenTable | None"
    reference: "_TokenTable | None"

    @classmethod
    def of(cls, objective: _RowObjective, device: torch.device) -> Self:
        """Copy the rows of an objective to the device."""
        rows = objective.rows
        is_own_B, against_B = (
            flag.to(device, torch.bool, non_blocking=True) for flag in (rows.is_own_B, objective.against_learner_B)
        )
        sampler_B, advantage_B, omega_B, weight_B = (
            column.to(device, torch.float64, non_blocking=True)
            for column in (rows.sampler_mean_logprob_B, rows.advantage_B, rows.omega_B, rows.weight_B)
        )
        factor_B = None
        if rows.learner_factor_B is not None:
            factor_B = rows.learner_factor_B.to(device, torch.float64, non_blocking=True)
        old, reference = (None if table is None else table.on(device) for table in (objective.old, objective.reference))
        return cls(sampler_B, advantage_B, is_own_B, against_B, omega_B, weight_B, factor_B, old, reference)


@dataclass(frozen=True)
class _TokenTable:
    """Per-token lists of all rows in one flat tensor, so that a call gathers instead of looping."""

    what: str
    flat: Tensor
    start_B: Tensor
    length_B: Tensor  # 0 where a row has none

    @classmethod
    def of(cls, what: str, lists: TokenLists, rollout_ids: Sequence[str] | None) -> Self:
        """Flatten the lists, refusing what is not finite."""
        end = torch.zeros(1, dtype=torch.float64)  # never empty: a place to point at; and all numbers become float64
        flat = torch.cat([*(row.detach().cpu() for row in lists if row is not None), end])
        length_B = torch.tensor([0 if row is None else len(row) for row in lists])
        table = cls(what, flat, length_B.cumsum(0) - length_B, length_B)
        if not bool(torch.isfinite(flat).all()):
            bad = [row is not None and not bool(torch.isfinite(row).all()) for row in lists]
            raise AlgorithmError(f"{what}: NaN or infinite at {name_rollouts(bad, rollout_ids)}; score it again")
        return table

    def on(self, device: torch.device) -> Self:
        """Return the table on a device."""
        flat, start_B, length_B = (t.to(device, non_blocking=True) for t in (self.flat, self.start_B, self.length_B))
        return replace(self, flat=flat, start_B=start_B, length_B=length_B)

    def misfits(self, index_B: Tensor, wanted_B: Tensor) -> Tensor:
        """Where a chosen row has a list of another length than its response."""
        have_B = self.length_B[index_B]
        return (have_B != wanted_B) & (have_B > 0)

    def padded(self, index_B: Tensor, mask_BT: Tensor, *, fill_BT: Tensor) -> Tensor:
        """Return the chosen rows at the places of the mask; a row without a list takes ``fill_BT``.

        Rows that misfit read other rows' numbers, never beyond the table, and are refused elsewhere.
        """
        present_BT = mask_BT & (self.length_B[index_B] > 0)[:, None]
        source_BT = torch.where(present_BT, self.start_B[index_B][:, None] + mask_BT.cumsum(dim=1) - 1, 0)
        values_BT = self.flat[source_BT.clamp(max=len(self.flat) - 1)]
        return torch.where(present_BT, values_BT, fill_BT)


def _name(rollout_ids: Sequence[str] | None, row: int | Tensor) -> str:
    return f"row {int(row)} of the minibatch" if rollout_ids is None else str(rollout_ids[int(row)])
