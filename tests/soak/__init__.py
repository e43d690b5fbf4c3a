"""Faults at random on real hosts, and after each a look whether all that was promised still holds."""
