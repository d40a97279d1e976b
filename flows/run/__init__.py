"""Running campaigns: from a config to stages that were executed, wherever they ran."""
