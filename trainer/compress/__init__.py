"""How gradients shrink on the wire: one file a format, one dict of names."""

from __future__ import annotations

FORMATS: dict[str, str | None] = {
    "none": None,  # gradients travel as they are
}
"""Name of each format, and where it is as "module:Class": text, so that names cost no import of torch."""
