"""Alert rules for Prometheus and a dashboard for Grafana, over what `kvprobe metrics` serves."""

FILES = ("alerts.yaml", "dashboard.json")
