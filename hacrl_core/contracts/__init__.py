"""The contracts between stages: table schemas and the manifest. Nothing here imports torch."""
