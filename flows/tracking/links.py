"""Where a campaign is in MLflow's pages, written down so that others can say it without importing MLflow."""

import json
from pathlib import Path
from urllib.parse import quote

from hacrl_core.artifacts.files import replace_synced
from hacrl_core.config.addresses import is_http, without_userinfo

NAME = "mlflow.json"
# Where ``mlflow ui`` listens.
LOCAL = "http://127.0.0.1:5000"


def note_place(folder: Path, uri: str, experiment: str) -> None:
    """Write down in which experiment of which server a campaign is."""
    found = json.dumps({"uri": without_userinfo(uri), "experiment": experiment})
    path = folder / NAME
    if not path.exists() or path.read_text(encoding="utf-8") != found:
        replace_synced(path, found)


def page_of(folder: Path, server: str) -> str:
    """Return the address of the page with the campaign's runs and charts; a server's first page where it is not known.

    MLflow's own first page is about chat and empty.
    """
    address = without_userinfo(server).rstrip("/") if is_http(server) else LOCAL
    try:
        experiment = json.loads((folder / NAME).read_text(encoding="utf-8"))["experiment"]
    except (OSError, ValueError, KeyError, TypeError):
        return address
    chosen = quote(f"tags.`hacrl.campaign` = '{folder.name}'", safe="")
    return f"{address}/#/experiments/{experiment}/runs?compareRunsMode=CHART&searchFilter={chosen}"
