"""``hacrl diagnose``: why a campaign does not learn, by rules over its artifacts."""
