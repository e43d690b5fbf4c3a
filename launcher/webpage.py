"""Opens a page in the user's browser."""

from __future__ import annotations

import click


def open_page(address: str) -> int:
    """In a browser, if there is one; printed in any case."""
    import webbrowser

    click.echo(address)
    try:
        kind = webbrowser.get()
    except webbrowser.Error:
        return 0
    if not isinstance(kind, webbrowser.GenericBrowser) or isinstance(kind, webbrowser.BackgroundBrowser):
        kind.open(address)  # not one that would take this terminal
    return 0
