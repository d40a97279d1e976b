"""HACPO, its baselines and its ablations as one config model: every one of them is a setting of the same code."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from hacrl_core.config.base import IdentityUnlessDefault, NotIdentity, StrictConfig
from hacrl_core.errors import ConfigError
from hacrl_core.methods import METHODS, Method

# exp(80) is still finite in float32; a larger product of unclipped ratios would be inf, and inf * 0 is NaN.
LARGEST_LOG_WEIGHT = 80.0


class CreditConfig(StrictConfig):
    """What a method says about credit: whose rewards count, and against which baseline."""

    share_rollouts: bool = Field(
        default=True, description="Learn from the other agents' responses too. Off: GSPO or GRPO on one's own."
    )
    capability_aware_advantage: bool = Field(
        default=True, description="Weigh rewards by capability ratio in the baseline. Off: the plain pooled mean."
    )
    method: Annotated[str, IdentityUnlessDefault] = Field(
        default="hacpo",
        description="Where foreign responses get their credit and their term from. hacpo: from the settings here "
        "(HACPO and its baselines). Else a method of hacrl_core/methods, e.g. topr; hacrl methods lists them.",
    )
    capability_window: int = Field(
        default=5, ge=1, description="Iterations over which an agent's mean reward is averaged, this one included (K)."
    )

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value != "hacpo" and value not in METHODS:
            raise ValueError(f"method {value!r} is unknown; use hacpo or one of {', '.join(METHODS)}")
        return value

    @property
    def plug_in(self) -> Method | None:
        """The method's own file; None where the settings here say it all."""
        return METHODS.get(self.method)

    @property
    def learns_from_others(self) -> bool:
        """Whether other agents' responses have a gradient."""
        return self.share_rollouts and (self.plug_in is None or self.plug_in.foreign is not None)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a result; a method's version counts with its name."""
        version = {} if self.plug_in is None else {"method_version": self.plug_in.version}
        return {**super().identity(), **version}


class HacpoConfig(CreditConfig):
    """What one learner does with its own responses and with the others'. The defaults are HACPO as published."""

    self_clip_low: float = Field(
        default=3e-4, ge=0, lt=1, description="Own responses: the ratio is clipped below at 1 minus this (GSPO)."
    )
    self_clip_high: float = Field(
        default=4e-4, ge=0, description="Own responses: the ratio is clipped above at 1 plus this (GSPO)."
    )
    cross_clip_delta: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Foreign responses: the window of the ratio is [1 - delta, 1] before the first update (δ). "
        "The paper's table 5 lists the lower bound itself: 0.8 there is 0.2 here.",
    )
    cross_clip_step: float = Field(
        default=0.025, ge=0, description="How far the foreign window's lower bound rises with every update (δ_step)."
    )
    alpha: float = Field(
        default=1.0,
        ge=-1,
        description="Exponent that weighs foreign responses down the further their ratio is from 1 (α): inside the "
        "window a response counts s^(1 + α). -1 gives all of them the weight 1.",
    )
    max_abs_log_ratio: float = Field(
        default=10.0, gt=0, le=LARGEST_LOG_WEIGHT, description="Log-ratios are clamped to ± this before exp."
    )
    ratio_level: Literal["sequence", "token"] = Field(
        default="sequence", description="One ratio per response (GSPO, HACPO) or one per token (GRPO)."
    )
    capability_in_gradient: bool = Field(
        default=True, description="Multiply a foreign response's term by ω(sampler, learner). Off: by 1."
    )
    stepwise_clip: bool = Field(
        default=True, description="Narrow the foreign window with every update. Off: cross_clip_step counts as 0."
    )
    cross_clip: bool = Field(default=True, description="Clip foreign ratios. Off: only max_abs_log_ratio limits them.")
    foreign_treatment: Literal["hacpo", "as_own", "sampler_ratio_min"] = Field(
        default="hacpo",
        description="hacpo: the foreign objective of the paper. as_own: as if the learner had written the response "
        "(ratio to "
        "its own policy at the start of the iteration, GSPO's min). sampler_ratio_min: ratio to the sampler, GSPO's "
        "min.",
    )
    ratio_length: Annotated[Literal["own", "sampler", "learner"], IdentityUnlessDefault] = Field(
        default="own",
        description="Tokens that a foreign response's log-prob is divided by in the ratio. own: each agent's own "
        "number (the authors' code). sampler, learner: that agent's number for both (the paper prints one length).",
    )
    calibrated_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Extension, not of the paper: choose cross_clip_delta every iteration so that this share of the "
        "foreign responses is inside the windows that their minibatches meet.",
    )
    pessimistic: bool = Field(
        default=False,
        description="Extension, not of the paper: foreign successes below the window still count, with less weight; "
        "foreign "
        "failures there do not.",
    )
    foreign_failure_cap: Annotated[float | None, IdentityUnlessDefault] = Field(
        default=None,
        ge=1,
        description="Extension, not of the paper: a foreign failure (negative advantage) whose ratio is above this "
        "teaches nothing, so that no failure outweighs it. Empty: only max_abs_log_ratio limits it.",
    )
    replay_iterations: Annotated[int, IdentityUnlessDefault] = Field(
        default=0,
        ge=0,
        description="Extension, not of the paper: learn again from the other agents' successes of so many iterations "
        "before. 0: from this iteration's responses alone.",
    )
    kl_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the k3 estimate of KL to the starting policy, on own responses only."
    )
    measure_kl: bool = Field(
        default=True, description="Measure KL to the starting policy on a subsample of own responses each iteration."
    )
    gradient_cosine: bool = Field(
        default=True, description="Measure the cosine between own and foreign gradient, every so many iterations."
    )
    gradient_cosine_every: Annotated[PositiveInt, NotIdentity] = Field(
        default=10, description="Iterations between two measurements of gradient_cosine; changes no training result."
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        foreign_hacpo = self.share_rollouts and self.foreign_treatment == "hacpo"
        if self.share_rollouts and self.ratio_level == "token" and self.foreign_treatment != "as_own":
            raise ValueError(
                f"ratio_level 'token' with foreign_treatment {self.foreign_treatment!r}: a sampler's per-token "
                "log-probs mean "
                "nothing in the learner's tokens; set share_rollouts: false or foreign_treatment: as_own"
            )
        for name, wanted in (
            ("pessimistic", self.pessimistic),
            ("calibrated_share", self.calibrated_share is not None),
        ):
            if wanted and not self.has_window:
                raise ValueError(
                    f"{name} changes the foreign window, and this config has none; "
                    "set share_rollouts and cross_clip to true and foreign_treatment to hacpo, or leave it out"
                )
        if self.ratio_length != "own" and (not self.share_rollouts or self.foreign_treatment == "as_own"):
            raise ValueError(
                f"ratio_length {self.ratio_length!r} changes the ratio to the sampler, and this config has none; set "
                "share_rollouts to true and foreign_treatment to hacpo or sampler_ratio_min, or leave it out"
            )
        if self.method != "hacpo" and (not self.share_rollouts or self.foreign_treatment != "hacpo"):
            raise ValueError(
                f"method {self.method!r} says what becomes of foreign responses; leave share_rollouts and "
                "foreign_treatment at their defaults"
            )
        self._check_extensions()
        log_weight = (1 + self.alpha) * self.max_abs_log_ratio
        if foreign_hacpo and not self.cross_clip and log_weight > LARGEST_LOG_WEIGHT:
            raise ValueError(
                f"cross_clip false with alpha {self.alpha:g} and max_abs_log_ratio {self.max_abs_log_ratio:g}: a "
                "weight may reach "
                f"exp({log_weight:g}), which overflows; keep (1 + alpha) * max_abs_log_ratio <= {LARGEST_LOG_WEIGHT:g}"
            )
        return self

    def _check_extensions(self) -> None:
        if self.foreign_failure_cap is not None and (not self.share_rollouts or self.method != "hacpo"):
            raise ValueError(
                f"foreign_failure_cap {self.foreign_failure_cap:g} limits the ratio of foreign failures, and this "
                "config has none; set share_rollouts to true and method to hacpo, or leave it out"
            )
        if not self.replay_iterations:
            return
        if not self.learns_from_others or self.foreign_treatment == "as_own":
            raise ValueError(
                f"replay_iterations {self.replay_iterations} replays responses against their sampler's log-probs, and "
                "this config learns from no such responses; choose a method that does, or leave it out"
            )
        if self.calibrated_share is not None:
            raise ValueError(
                f"replay_iterations {self.replay_iterations} with calibrated_share {self.calibrated_share:g}: the "
                "window is chosen by log-probs of now, which replayed responses do not have; leave one of them out"
            )

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a result; a calibrated share says which windows it is calibrated for.

        Versions of before, when it was calibrated for a window that no foreign response met, have other keys.
        """
        calibrated = {} if self.calibrated_share is None else {"calibrated_for": "windows met"}
        return {**super().identity(), **calibrated}

    @property
    def has_window(self) -> bool:
        """Whether foreign responses are clipped to the window of δ."""
        return self.share_rollouts and self.foreign_treatment == "hacpo" and self.cross_clip and self.method == "hacpo"

    @property
    def credit(self) -> CreditConfig:
        """The part that the credit stage reads; changing any other setting does not compute credit again."""
        return CreditConfig(**{name: getattr(self, name) for name in CreditConfig.model_fields})


_GSPO = {"share_rollouts": False}
_NAIVE = {
    "capability_aware_advantage": False,
    "capability_in_gradient": False,
    "stepwise_clip": False,
    "cross_clip": False,
}
_SHARED_GSPO = {**_NAIVE, "foreign_treatment": "sampler_ratio_min"}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "hacpo": {},
        "gspo": _GSPO,
        # Both also change the campaign: see campaign_overrides.
        "gspo_x2": _GSPO,
        "gspo_xn": _GSPO,
        "grpo": {**_GSPO, "ratio_level": "token", "self_clip_low": 0.2, "self_clip_high": 0.28},
        "naive": {**_NAIVE, "foreign_treatment": "as_own"},
        "naive_sampler_ratio": _SHARED_GSPO,
        # Ablations of the paper.
        "without_capability_advantage": {"capability_aware_advantage": False},
        "without_capability_gradient": {"capability_in_gradient": False},
        "alpha_0": {"alpha": 0.0},
        "alpha_1": {"alpha": 1.0},
        "alpha_2": {"alpha": 2.0},
        "alpha_3": {"alpha": 3.0},
        "without_stepwise": {"stepwise_clip": False},
        "without_clipping": {"cross_clip": False},
        # Extensions, not of the paper.
        # The second reading of Naive under a name of its own: docs/shared-gspo.md.
        "shared_gspo": _SHARED_GSPO,
        "hacpo_calibrated": {"calibrated_share": 0.5},
        "hacpo_pessimistic": {"pessimistic": True},
        # SAPO trains on local and external rollouts alike, without any correction: naive sharing as own.
        "sapo": {**_NAIVE, "foreign_treatment": "as_own"},
        # Methods with a file of their own.
        **{name: {"method": name} for name in METHODS},
    }
)


def preset(name: str, **changes: Any) -> HacpoConfig:
    """Return a named method, with single settings changed: ``preset("hacpo", alpha=3.0)``."""
    return HacpoConfig(**{**_known(name), **changes})


@dataclass(frozen=True)
class CampaignOverrides:
    """What a method changes outside the objective, as factors on the campaign's own numbers."""

    samples_per_prompt: float = 1.0
    minibatch_prompts: float = 1.0


def campaign_overrides(name: str, agents: int) -> CampaignOverrides:
    """Return what a method changes in a campaign of so many agents.

    GSPO×2 has as many rollouts as two agents share, and as many responses in a minibatch, hence twice the updates: the
    same budget for GSPO. GSPO×n is the same for n agents.
    """
    _known(name)
    factor = {"gspo_x2": 2, "gspo_xn": agents}.get(name, 1)
    return CampaignOverrides(samples_per_prompt=float(factor), minibatch_prompts=1 / factor)


def _known(name: str) -> Mapping[str, Any]:
    if name not in PRESETS:
        raise ConfigError(f"method {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
