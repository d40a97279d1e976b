"""MLflow: a projection of the manifests."""
