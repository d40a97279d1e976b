"""A judge behind a real HTTP endpoint: scores, pairs in both orders, kept answers, and failures that are no zeros."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hacrl_core.config.verification import VerifyConfig
from hacrl_core.problems import Problem
from hacrl_core.verification import Verdict, verify_batch
from hacrl_core.verification.judge import Judging


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that scores a response by its length, prefers what comes first, or fails."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.asked.append(body)
        prompt = body["messages"][0]["content"]
        if "UNAVAILABLE" in prompt and server.failures > 0:
            server.failures -= 1
            return self._reply(503, {"error": "busy"})
        if "FORBIDDEN" in prompt:
            return self._reply(400, {"error": "no"})
        if "Response A" in prompt:
            first, second = re.findall(r"Response [AB]:\n(.*?)\n", prompt)
            answer = "Better: A" if "BIASED" in prompt or len(first) > len(second) else "Better: B"
        else:
            response = re.findall(r"Response:\n(.*?)\n", prompt)[0]
            answer = "no idea" if response == "SILENT" else f"Score: 99\nScore: {min(10, len(response))}"
        return self._reply(200, {"choices": [{"message": {"role": "assistant", "content": answer}}]})

    def _reply(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.asked, server.failures = [], 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def judge(
    server: Any, responses: list[str], kept: Path | None = None, answer: str = "right", **settings: Any
) -> list[Verdict]:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    config = VerifyConfig.model_validate({"verifier": "judge", "judge": {"url": url, "model": "m", **settings}})
    problem = Problem("p", ({"role": "user", "content": "write something"},), answer, "toy")
    problems = [problem] * len(responses)
    return verify_batch(responses, [answer] * len(responses), config, problems=problems, judging=Judging(kept))


def test_a_score_is_scaled_and_the_last_one_counts(endpoint: Any) -> None:
    low, high = judge(endpoint, ["abcd", "abcdefghijkl"])
    assert (low.verdict, low.raw, low.reward) == ("incorrect", 4.0, 0.4)
    assert (high.verdict, high.raw, high.reward) == ("correct", 10.0, 1.0)
    assert {(asked["temperature"], asked["model"]) for asked in endpoint.asked} == {(0, "m")}


def test_answers_are_kept_by_template_model_and_response(endpoint: Any, tmp_path: Path) -> None:
    first = judge(endpoint, ["abcd", "abcd", "ab"], tmp_path)
    assert len(endpoint.asked) == 2
    again = judge(endpoint, ["abcd", "ab", "ab"], tmp_path)
    assert len(endpoint.asked) == 2
    assert [v.reward for v in again] == [first[0].reward, first[2].reward, first[2].reward]
    judge(endpoint, ["abcd"], tmp_path, model="other")
    judge(endpoint, ["abcd"], tmp_path, template="{problem} Response:\n{response}\n")
    assert len(endpoint.asked) == 4
    damaged = next(tmp_path.glob("*/*.json"))
    damaged.write_text(damaged.read_text().replace("Score", "Scare"))
    judge(endpoint, ["abcd", "ab"], tmp_path)
    judge(endpoint, ["abcd"], tmp_path, model="other")
    judge(endpoint, ["abcd"], tmp_path, template="{problem} Response:\n{response}\n")
    assert len(endpoint.asked) == 5, "only the damaged answer is asked for again"


def test_a_pair_is_asked_in_both_orders(endpoint: Any) -> None:
    better, worse, biased = judge(endpoint, ["longer than it", "x", "BIASED"], answer="reference", mode="pair")
    assert [v.reward for v in (better, worse, biased)] == [1.0, 0.0, 0.5]
    assert len(endpoint.asked) == 6


def test_failures_are_errors_and_never_zero_rewards(endpoint: Any) -> None:
    silent, refused, fine = judge(endpoint, ["SILENT", "FORBIDDEN", "abcde"])
    assert [v.verdict for v in (silent, refused, fine)] == ["error", "error", "incorrect"]
    assert "no score" in silent.message
    assert "400" in refused.message
    (outside,) = judge(endpoint, ["abcde"], range=(0, 3))
    assert outside.verdict == "error"
    endpoint.failures = 1
    (late,) = judge(endpoint, ["UNAVAILABLE"])
    assert late.verdict == "correct", "a passing failure is tried again"
    endpoint.failures = 9
    (never,) = judge(endpoint, ["UNAVAILABLE once more"], tries=2)
    assert (never.verdict, never.reward) == ("error", 0.0)


def test_a_response_cannot_fill_the_template(endpoint: Any) -> None:
    judge(endpoint, ["{answer} {problem}"], answer="secret")
    assert "Response:\n{answer} {problem}\n" in endpoint.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"url": "localhost", "model": "m"}, "no address"),
        ({"url": "http://x/v1"}, "model is missing"),
        ({"model": "m"}, "either url"),
        ({"url": "http://x/v1", "model": "m", "template": "rate it"}, "does not contain {problem}"),
        ({"url": "http://x/v1", "model": "m", "pattern": "score"}, "has no group"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_once(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        VerifyConfig.model_validate({"verifier": "judge", "judge": settings})
    with pytest.raises(ValueError, match="judge is missing"):
        VerifyConfig.model_validate({"verifier": "judge"})
