"""The page of two real models: its tables say what the readings say."""

import math

import census_page

ASKED = {"prompts": 2, "group": 1, "tokens": 9, "examples": 1, "seed": 0}
AGENT = {"responses": 2, "reward": 0.5, "tokens": 8.0, "cut_off": 0.0, "mean_logprob": -0.5, "prompts_with_signal": 1.0}


def written(folder):
    rows = ["learner,sampler,learner_mean,learner_tokens,sampler_mean,sampler_tokens"]
    # Ratios with own lengths: 0.9 and 0.5. With the sampler's length the second is 0.5² instead.
    rows += [f"smol,gemma,{math.log(0.9)},10,0.0,10", f"smol,gemma,{math.log(0.5)},20,0.0,10"]
    rows += ["gemma,smol,-0.2,10,-0.3,10", "gemma,smol,-0.4,10,-0.3,10"]
    (folder / "census-readings.csv").write_text("\n".join(rows) + "\n")
    return census_page.read(folder)


def test_ratios_both_ways_and_with_each_length(tmp_path):
    lines = census_page.ratio_table(written(tmp_path)).splitlines()
    assert lines[2].split(" | ")[2:] == ["0.70", "0.60, 0.70, 0.80", "0.50", "0.50", "0.50", "0.00 |"]
    assert lines[3].split(" | ")[2] == f"{(0.9 + 0.25) / 2:.2f}"
    assert lines[5].startswith("| gemma ← SmolLM2 | each agent's own length | 1.01 |")
    assert lines[5].endswith("| 0.50 |")


def test_the_page_has_what_was_asked_and_says_where_there_is_no_cosine(tmp_path):
    report = {"asked": ASKED, "agents": {"smol": AGENT, "gemma": AGENT}, "cosine": {}}
    page = census_page.page(written(tmp_path), report)
    assert "answered 2 word problems of two steps, 1 times each" in page
    assert "It was not measured." in page
    c = {"update/gradient_cosine": 0.25, "prompts": 3, "own_rows": 6, "foreign_rows": 5}
    said = census_page.cosines({"cosine": {"smol": c, "gemma": {"prompts": 0}}})
    assert "For SmolLM2 it is +0.25, over 6 own and 5 foreign responses to 3 prompts." in said
    assert "For gemma no prompt teaches both sides" in said


def test_the_picture_is_drawn(tmp_path):
    census_page.draw(written(tmp_path), tmp_path / "census.png")
    assert (tmp_path / "census.png").stat().st_size > 10_000
