"""Recipes for public scratch models, which whoever tries them fetches: how each is handed to ``porting suggest``."""
