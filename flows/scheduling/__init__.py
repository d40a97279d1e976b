"""Prefect: its server, its pages, deployments and slots."""
