"""The servers of one home folder: Prefect, MLflow and a worker, started by ``hacrl up`` and kept running by a supervisor."""
