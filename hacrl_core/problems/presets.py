"""The datasets of the paper by name: where they live, which columns count, how the answer is written in them.

A revision is pinned where one is publicly quoted; without one the hub's main branch is read, and the content digest
tells two states apart.
"""

from hacrl_core.config.problems import Columns, DatasetProblems, PresetName, PresetProblems

PRESETS: dict[PresetName, DatasetProblems] = {
    "math": DatasetProblems(
        hub="DigitalLearningGmbH/MATH-lighteval",
        split="train",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
        columns=Columns(problem="problem", answer="solution", tags={"level": "level", "subject": "type"}),
        answer_format="boxed",
        source="math",
    ),
    "gsm8k": DatasetProblems(
        hub="openai/gsm8k",
        subset="main",
        split="train",
        revision="740312add88f781978c0658806c59bc2815b9866",
        columns=Columns(problem="question", answer="answer"),
        answer_format="after_hashes",
        source="gsm8k",
    ),
    "gsm8k_test": DatasetProblems(
        hub="openai/gsm8k",
        subset="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        columns=Columns(problem="question", answer="answer"),
        answer_format="after_hashes",
        source="gsm8k_test",
    ),
    "math500": DatasetProblems(
        hub="HuggingFaceH4/MATH-500",
        split="test",
        columns=Columns(id="unique_id", tags={"level": "level", "subject": "subject"}),
        source="math500",
    ),
    "aime2025": DatasetProblems(
        hub="math-ai/aime25",
        split="test",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        columns=Columns(),
        source="aime2025",
    ),
    "amc2023": DatasetProblems(
        hub="math-ai/amc23", split="test", columns=Columns(problem="question"), source="amc2023"
    ),
    "minerva_math": DatasetProblems(
        hub="math-ai/minervamath", split="test", columns=Columns(problem="question"), source="minerva_math"
    ),
    "olympiadbench": DatasetProblems(
        hub="Hothan/OlympiadBench",
        # Open-ended, text only, maths, English, competitions.
        subset="OE_TO_maths_en_COMP",
        # The hub dataset has no other split.
        split="train",
        columns=Columns(
            problem="question", answer="final_answer", context="context", id="id", tags={"subject": "subfield"}
        ),
        source="olympiadbench",
    ),
}


def resolve_preset(config: PresetProblems) -> DatasetProblems:
    """Return the preset as a dataset config, with the user's changes to it."""
    settings = PRESETS[config.name].model_dump()
    changes = config.model_dump(include={"revision", "prompt", "system"}, exclude_none=True)
    if config.path is not None:
        changes |= {"path": config.path, "hub": None, "subset": None, "revision": None}
    return DatasetProblems.model_validate({**settings, **changes, "filters": config.filters})
