"""What stages promise each other: table schemas and the manifest. No torch here."""
