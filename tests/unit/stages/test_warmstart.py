"""warmstart: an architecture, a tokenizer and a corpus in; a first agent, taught a little, out."""

from stage_bench import warmstart_slice

from hacrl_core.agents.agent import load_agent


def test_the_artifact_is_an_ordinary_checkpoint(shared, ada):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in ada.path.iterdir()}
    agent = load_agent(ada.path)
    assert agent.model.config.model_type == "llama"
    assert agent.tokenizer.decode(agent.tokenizer.encode("1+2=?", add_special_tokens=False)) == "1+2=?"


def test_it_learns(bench):
    few, many = (bench.run("warmstart", warmstart_slice(steps=steps)).metrics for steps in (2, 60))
    assert many["warmstart/loss"] < few["warmstart/loss"]


def test_the_seed_decides_every_bit(bench, shared, ada):
    again = bench.run("warmstart", warmstart_slice(), seed=1)
    assert not again.cached  # another store
    assert again.ref.digest == ada.digest
    assert bench.run("warmstart", warmstart_slice(), seed=3).ref.digest != ada.digest
