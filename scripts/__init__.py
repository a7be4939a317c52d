"""Programs that are run from a checkout (``python -m scripts.NAME``) and never installed."""
