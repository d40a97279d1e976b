"""infra/ as far as it can be checked without a container engine; test_infra_native.py starts its processes for real."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows import scheduled
from flows.scheduling.deployments import FLOW
from flows.servers.serve import _parser
from flows.servers.state import POOL
from tests.servers.compose_file import INFRA, read_compose, variables

VALUES = {"HACRL_USER": "ada", "HACRL_PASSWORD": "0123456789abcdef", "HACRL_POSTGRES_PASSWORD": "fedcba9876543210"}


@pytest.fixture(scope="module")
def compose():
    return read_compose(VALUES)


def test_compose_keeps_to_its_schema_and_refuses_to_start_without_passwords(compose):
    assert set(compose.services) == {"postgres", "prefect", "mlflow", "worker", "worker-cuda"}
    for missing in VALUES:
        with pytest.raises(KeyError, match=missing):
            read_compose({name: value for name, value in VALUES.items() if name != missing})


def test_compose_names_things_that_exist(compose):
    stages = re.findall(r"^FROM \S+ AS (\S+)", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    for name, service in compose.services.items():
        assert set(service.depends_on) <= set(compose.services), name
        for needed in service.depends_on:
            assert compose.services[needed].healthcheck is not None, f"{name} waits for the health of {needed}"
        for volume in service.volumes:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (INFRA / source).exists(), volume
            else:
                assert source in compose.volumes, volume
        if service.build is not None:
            assert (INFRA / service.build.context / service.build.dockerfile).exists()
            assert service.build.target in stages
            assert service.build.target in service.image


def test_servers_run_as_nobody_special(compose):
    for name, service in compose.services.items():
        if name != "postgres":  # its image drops root by itself
            assert service.user == "10001:10001", name
            assert service.read_only, name
            assert service.cap_drop == ["ALL"], name
        assert not service.image.endswith(":latest"), name
    assert compose.services["postgres"].ports == []


def test_commands_of_the_compose_file_are_commands_of_ours(compose):
    for name, service in compose.services.items():
        if service.command:
            assert service.command[:3] == ["python", "-m", "hacrl.serve"]
            options = _parser().parse_args(service.command[3:])
            if name in ("prefect", "mlflow"):
                assert options.server == name
                assert options.name == [name]  # the worker calls it by this name, and the host check must know it
                assert [f"127.0.0.1:{options.port}:{options.port}"] == service.ports
                assert f":{options.port}/" in service.healthcheck.test[-1]
    worker = compose.services["worker"].environment
    assert worker["PREFECT_API_URL"] == "http://prefect:4200/api"
    assert worker == compose.services["worker-cuda"].environment


def test_the_environment_file_names_every_variable_and_holds_no_secret():
    lines = [
        line.lstrip("#") for line in (INFRA / "env.example").read_text().splitlines() if re.match(r"#?[A-Z_]+=", line)
    ]
    given = dict(line.split("=", 1) for line in lines)
    assert set(given) == variables()
    assert all(value == "" for name, value in given.items() if "PASSWORD" in name or "USER" in name)
    assert "infra/.env" in (INFRA.parent / ".gitignore").read_text().splitlines()
    for path in INFRA.rglob("*"):
        # A test imports infra/house.py: its compiled form may lie there.
        if path.is_file() and not {"vllm", "__pycache__"} & set(path.parts):
            assert not re.search(r"(?i)(password|secret|token)\s*[=:]\s*['\"]?[a-z0-9]{8,}", path.read_text()), path


def test_the_dockerfile_passes_hadolint_and_ends_without_root():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", INFRA / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    text = (INFRA / "Dockerfile").read_text()
    for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        if re.match(r"\S+ AS (cpu|cuda)\n", stage):
            assert re.findall(r"^USER (\S+)", stage, re.MULTILINE)[-1] == "10001:10001"
    for image in re.findall(r"^FROM (\S+:\S+)", text, re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+", image), f"{image} is not pinned"
    allowed = {
        line[1:] for line in (INFRA / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert copied == allowed


def test_the_systemd_unit_is_sound(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (INFRA / "systemd" / "hacrl.service").read_text()
    command = re.search(r"^ExecStart=(\S+)(.*)$", unit, re.MULTILINE)
    (tmp_path / "hacrl.service").write_text(unit.replace(command[1], "/bin/true"))  # ours is not installed there
    done = subprocess.run([analyze, "verify", str(tmp_path / "hacrl.service")], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert command[2].split() == ["up", "--foreground"]


def test_the_handwritten_deployment_is_the_one_that_hacrl_deploy_makes():
    (deployment,) = yaml.safe_load((INFRA / "prefect.yaml").read_text())["deployments"]
    assert deployment["entrypoint"] == scheduled.ENTRYPOINT
    assert scheduled.scheduled_campaign.name == FLOW
    assert deployment["work_pool"]["name"] == POOL
    assert set(deployment["parameters"]) == set(scheduled.scheduled_campaign.parameters.properties)
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


@pytest.mark.parametrize("script", sorted(INFRA.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script):
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_rays_cluster_file_passes_rays_own_check():
    from ray.autoscaler._private.util import prepare_config, validate_config

    raw = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    validate_config(prepare_config(raw))
    started = " ".join(raw["head_start_ray_commands"] + raw["worker_start_ray_commands"])
    for option in re.findall(r"ray start (.*?)(?= /opt|$)", started):
        parse_ray_start(option.split(" RAY_USAGE")[0].split())
    with pytest.raises(Exception, match=r"unknown|not allowed|unexpected|Additional"):
        validate_config(prepare_config({**raw, "head_start_commands": []}))


def parse_ray_start(words: list[str]) -> None:
    """Parse the options of ``ray start`` with its own parser, without starting anything."""
    from ray.scripts.scripts import start

    with start.make_context("start", [word for word in words if word != "/opt/hacrl/.venv/bin/ray"]):
        pass


def test_kuberay_reads_the_resources_that_stages_ask_for():
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    raw = yaml.safe_load((INFRA / "ray" / "kuberay.yaml").read_text())
    raw["metadata"].setdefault("namespace", "default")
    found = _derive_autoscaling_config_from_ray_cr(raw)["available_node_types"]
    assert found["headgroup"]["resources"]["CPU"] == 0
    assert found["gpus"]["resources"]["GPU"] == 8
    assert "GPU" not in found["checkers"]["resources"]
    assert found["checkers"]["max_workers"] == 8
    import ray

    assert raw["spec"]["rayVersion"] == ray.__version__
