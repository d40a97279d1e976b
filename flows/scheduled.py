"""The former address of the scheduled flow: deployments that were stored in Prefect before it moved name it."""

from flows.scheduling.scheduled import scheduled_campaign

__all__ = ["scheduled_campaign"]
