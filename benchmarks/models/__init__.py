"""Whole steps of models as transformers has them, with torch's attention and with ours."""
