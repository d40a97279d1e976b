-- Prefect and MLflow each keep a table of migrations of the same name, so each has a database of its own.
create database hacrl_prefect;
create database hacrl_mlflow;
