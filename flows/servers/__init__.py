"""The servers of one home folder: Prefect, MLflow and a worker.

``hacrl up`` starts them and a supervisor keeps them running.
"""
