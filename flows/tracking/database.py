"""MLflow's database where this process opens it itself: what MLflow does object by object, in a few statements.

MLflow's own way to create a model and to register it is some sixty statements and five commits, 9 ms of CPU for each
version of an agent. Here a batch of versions costs about as much as one. The rows are the same. What is used of
MLflow's stores is not part of its interface: a release that lacks it, or a server, is spoken to through the client.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

# What is used of MLflow's stores.
_OF_RUNS = ("engine", "ManagedSessionMaker", "_check_run_is_active", "_get_run", "sanitize_metric_value")
_OF_MODELS = ("get_experiment", "_check_experiment_is_active", "MODELS_FOLDER_NAME", "ARTIFACTS_FOLDER_NAME")
_OF_VERSIONS = ("ManagedSessionMaker", "_get_registered_model", "_get_workspace_clauses")


@dataclass(frozen=True)
class ModelDraft:
    """A logged model to be created."""

    name: str
    run: str
    tags: Mapping[str, str]
    params: Mapping[str, str]


@dataclass(frozen=True)
class VersionDraft:
    """A version to be registered, with this number or, where that is taken, a higher one."""

    number: int
    source: str
    run: str
    model_id: str
    tags: Mapping[str, str]
    description: str


def open_store(client: Any) -> Any | None:
    """Return MLflow's store of runs and models where it is a sqlite database, built as it was known here; else None."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = getattr(getattr(client, "_tracking_client", None), "store", None)
    if not isinstance(store, SqlAlchemyStore) or not all(hasattr(store, name) for name in (*_OF_RUNS, *_OF_MODELS)):
        return None
    return store if store.engine.dialect.name == "sqlite" else None


def open_registry(client: Any) -> Any | None:
    """Return MLflow's store of registered models where it is a database, built as it was known here; else None."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    store = client._get_registry_client().store
    known = isinstance(store, SqlAlchemyStore) and all(hasattr(store, name) for name in _OF_VERSIONS)
    return store if known else None


def create_models(client: Any, experiment: str, drafts: Sequence[ModelDraft]) -> list[Any]:
    """Create logged models of agents and return them. They are pending until ``mark_ready``."""
    store = open_store(client)
    if store is None:
        return [
            client.create_logged_model(
                experiment,
                name=draft.name,
                source_run_id=draft.run,
                tags=dict(draft.tags),
                params=dict(draft.params),
                model_type="agent",
            )
            for draft in drafts
        ]
    return _insert_models(store, experiment, drafts) if drafts else []


def _insert_models(store: Any, experiment: str, drafts: Sequence[ModelDraft]) -> list[Any]:
    from mlflow.store.tracking.dbmodels.models import SqlLoggedModel, SqlLoggedModelParam, SqlLoggedModelTag

    place = store.get_experiment(experiment)
    store._check_experiment_is_active(place)
    models = [_model(store, place, draft) for draft in drafts]
    rows = [
        {
            "model_id": model.model_id,
            "experiment_id": experiment,
            "name": model.name,
            "artifact_location": model.artifact_location,
            "creation_timestamp_ms": model.creation_timestamp,
            "last_updated_timestamp_ms": model.last_updated_timestamp,
            "model_type": model.model_type,
            "status": model.status.to_int(),
            "source_run_id": model.source_run_id,
        }
        for model in models
    ]
    whose = [{"model_id": model.model_id, "experiment_id": experiment} for model in models]
    with store.ManagedSessionMaker(read_only=False) as session:
        _insert(session, SqlLoggedModel, rows)
        for table, word, of_each in (
            (SqlLoggedModelParam, "param", [draft.params for draft in drafts]),
            (SqlLoggedModelTag, "tag", [draft.tags for draft in drafts]),
        ):
            pairs = [(ids, *pair) for ids, found in zip(whose, of_each, strict=True) for pair in found.items()]
            _insert(session, table, [{**ids, f"{word}_key": k, f"{word}_value": v} for ids, k, v in pairs])
    return models


def _model(store: Any, experiment: Any, draft: ModelDraft) -> Any:
    from mlflow.entities import LoggedModel, LoggedModelStatus
    from mlflow.utils.uri import append_to_uri_path

    model_id, now = f"m-{uuid4().hex}", _milliseconds()
    below: Any = append_to_uri_path
    return LoggedModel(
        experiment_id=experiment.experiment_id,
        model_id=model_id,
        name=draft.name,
        artifact_location=below(
            experiment.artifact_location, store.MODELS_FOLDER_NAME, model_id, store.ARTIFACTS_FOLDER_NAME
        ),
        creation_timestamp=now,
        last_updated_timestamp=now,
        model_type="agent",
        source_run_id=draft.run,
        status=LoggedModelStatus.PENDING,
        tags=dict(draft.tags),
        params=dict(draft.params),
    )


def mark_ready(client: Any, models: Sequence[Any]) -> None:
    """Mark logged models as ready, in the database and in what is at hand of them."""
    from mlflow.entities import LoggedModelStatus
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking.dbmodels.models import SqlLoggedModel
    from sqlalchemy import update

    store, ready = open_store(client), LoggedModelStatus.READY
    if store is None:
        for model in models:
            client.finalize_logged_model(model.model_id, str(ready))
    elif models:
        table: Any = SqlLoggedModel
        chosen = update(table).where(table.model_id.in_([model.model_id for model in models]))
        with store.ManagedSessionMaker(read_only=False) as session:
            done = session.execute(
                chosen.values(status=ready.to_int(), last_updated_timestamp_ms=_milliseconds()),
                execution_options={"synchronize_session": False},
            )
            if done.rowcount != len(models):
                raise MlflowException(
                    f"{len(models) - done.rowcount} of {len(models)} logged models are gone from MLflow"
                )
    for model in models:
        model.status = ready


def register_versions(client: Any, name: str, drafts: Sequence[VersionDraft]) -> list[int]:
    """Register versions of a model in the order of their numbers; return the numbers that they got.

    MLflow counts up from the highest number, deleted versions included. A server offers no way to leave numbers out:
    there each of them is created and deleted.
    """
    store = open_registry(client)
    if store is None:
        return [_register_by_client(client, name, draft) for draft in drafts]
    return _insert_versions(store, name, drafts) if drafts else []


def _register_by_client(client: Any, name: str, draft: VersionDraft) -> int:
    while True:
        made = client.create_model_version(
            name,
            source=draft.source,
            run_id=draft.run,
            tags=dict(draft.tags),
            description=draft.description,
            await_creation_for=0,
            model_id=draft.model_id,
        )
        if int(made.version) >= draft.number:
            return int(made.version)
        client.delete_model_version(name, made.version)


def _insert_versions(store: Any, name: str, drafts: Sequence[VersionDraft]) -> list[int]:
    from mlflow.store.model_registry.dbmodels.models import SqlModelVersion, SqlModelVersionTag
    from sqlalchemy import func

    table: Any = SqlModelVersion
    now = _milliseconds()
    with store.ManagedSessionMaker(read_only=False) as session:
        model = store._get_registered_model(session, name)
        of_model = (table.name == name, *store._get_workspace_clauses(table))
        highest = session.query(func.max(table.version)).filter(*of_model).scalar() or 0
        numbers: list[int] = []
        for draft in drafts:
            highest = max(draft.number, highest + 1)
            numbers.append(highest)
        whose = {"workspace": model.workspace, "name": name}
        rows = [
            {
                **whose,
                "version": number,
                "creation_time": now,
                "last_updated_time": now,
                "source": draft.source,
                "storage_location": draft.source,
                "run_id": draft.run,
                "description": draft.description,
            }
            for number, draft in zip(numbers, drafts, strict=True)
        ]
        _insert(session, SqlModelVersion, rows)
        tags = [
            {**whose, "version": number, "key": key, "value": value}
            for number, draft in zip(numbers, drafts, strict=True)
            for key, value in draft.tags.items()
        ]
        _insert(session, SqlModelVersionTag, tags)
        model.last_updated_time = now
    return numbers


def _insert(session: Any, table: Any, rows: list[dict[str, Any]]) -> None:
    from sqlalchemy import insert

    if rows:
        session.execute(insert(table.__table__), rows)


def _milliseconds() -> int:
    return int(time.time() * 1000)
