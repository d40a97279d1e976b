"""Reports: what a campaign's manifests tell, as numbers, charts and one HTML page."""
