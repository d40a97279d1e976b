"""MLflow, as a projection of the manifests: everything that it shows can be sent again from them."""
