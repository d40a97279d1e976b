"""Equations and sources of the methods that are settings of `hacrl_core/algorithm/hacpo.py`, for `hacrl methods`."""

_HACPO = "HACPO, arXiv 2603.02604"
_OURS = "an extension of ours"

# Name of the preset → the term of a response, and where it is from.
PAGE: dict[str, tuple[str, str]] = {
    "hacpo": ("clip(s, window)·stopgrad(clip(s, window))^α·ω·A for foreign responses; GSPO for own ones", _HACPO),
    "gspo": ("min(s·A, clip(s, 1 − 3e-4, 1 + 4e-4)·A), own responses only", "GSPO, arXiv 2507.18071"),
    "gspo_x2": ("gspo with twice the samples", "the paper's baseline of equal rollouts, " + _HACPO),
    "gspo_xn": ("gspo with n times the samples", "the same for n agents"),
    "grpo": ("gspo per token, clip 0.2 and 0.28", "GRPO, arXiv 2402.03300; clip of DAPO, arXiv 2503.14476"),
    "naive": ("gspo for everybody's responses, s against the learner itself", "the paper's baseline, first reading"),
    "naive_sampler_ratio": ("gspo for everybody's responses, s against the sampler", "the same, second reading"),
    "sapo": ("as naive: external rollouts as if they were local, without correction", "SAPO, arXiv 2509.08721"),
    "shared_gspo": ("as naive_sampler_ratio", _OURS + ", docs/shared-gspo.md"),
    "hacpo_calibrated": ("hacpo, δ chosen so that half of the foreign responses are inside", _OURS),
    "hacpo_pessimistic": ("min(s·A, clip(s, window)·A)·stopgrad(min(s, 1))^α·ω", _OURS),
}
