"""Orchestration: Prefect and MLflow live here and nowhere else."""
