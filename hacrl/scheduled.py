"""The entry point of deployed campaigns, under a name that a work tree and a wheel share."""

from flows.scheduled import scheduled_campaign

__all__ = ["scheduled_campaign"]
