"""Debian's Chromium, driven by selenium: a real browser for the page and for reports."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.ringctl import wait_for

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--disable-crash-reporter", "--disable-breakpad", "--hide-scrollbars",
)  # fmt: skip
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium")


class Browser:
    """One window, and what tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Again if the machine's network changed meanwhile, at which a browser drops what it is about."""
        from selenium.common.exceptions import WebDriverException

        for _ in range(5):
            try:
                self.driver.get(address)
            except WebDriverException as error:
                if "ERR_NETWORK_CHANGED" not in str(error):
                    raise
            if "ERR_NETWORK_CHANGED" not in self.text():
                return
        raise AssertionError(f"{address}: the network changes all the time")

    def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """How large the window is, and what colours whoever looks at it likes."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        likes = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": likes})

    def script(self, text: str, *given: Any) -> Any:
        return self.driver.execute_script(text, *given)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str, seconds: float = 20.0) -> Any:
        """The first that there is, waited for."""
        found = wait_for(lambda: self.all(selector), f"{selector} on the page", seconds)
        return found[0]

    def text(self, selector: str = "body") -> str:
        """What can be read there now; "" if there is nothing."""
        read = "const it = document.querySelector(arguments[0]); return it ? it.innerText : ''"
        return str(self.script(read, selector))

    def texts(self, selector: str) -> list[str]:
        """What each of them says that can be seen, all at one moment."""
        seen = "[...document.querySelectorAll(arguments[0])].filter((it) => it.checkVisibility())"
        return list(self.script(f"return {seen}.map((it) => it.innerText ?? it.textContent)", selector))

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
        try:
            return wait_for(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the page says:\n{self.text()[:2000]}") from None

    def wait_for_text(self, words: str, selector: str = "main", seconds: float = 30.0) -> None:
        self.wait(lambda: words in self.text(selector), f"{words!r} on the page", seconds)

    def click(self, selector: str) -> None:
        self.one(selector)
        self.script("document.querySelector(arguments[0]).click()", selector)  # also what lies under a toast

    def type(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def complaints(self) -> list[str]:
        """What its console has said since it was asked last: errors, and what a policy has kept out."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Whatever the document has asked for."""
        return list(self.script("return performance.getEntriesByType('resource').map((one) => one.name)"))


@contextlib.contextmanager
def quiet_network(*ports: int) -> Iterator[None]:
    """A network of our own with nothing but loopback, for this thread and what it starts meanwhile: other
    tests put up hosts, and at each a browser drops its connections. What listens outside at one of these
    ports is reached in here, too. Without root, we live with the drops."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, before)
        ways = [stack.enter_context(Way(port)) for port in ports]  # their threads stay outside
        if libc.unshare(NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for way in ways:
                way.open()
            yield
        finally:
            if libc.setns(before, NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")


class Way:
    """Hands on what comes to a port of the network that `open` is called in, to the same port of the network
    that it was made in."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=f"way to {port}")

    def __enter__(self) -> Way:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        asyncio.run_coroutine_threadsafe(self._listen(listener), self.loop).result(10)

    async def _listen(self, listener: socket.socket) -> None:
        self.server = await asyncio.start_server(self._hand_on, sock=listener)

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one end is gone, and with it the other
            there, further = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.gather(pour(reader, further), pour(there, writer))
        writer.close()

    async def _end(self) -> None:
        self.server.close()
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def pour(source: asyncio.StreamReader, into: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            into.write(data)
            await into.drain()
    finally:
        into.close()


@contextlib.contextmanager
def browsing(width: int = 1360, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone afterwards."""
    from selenium import webdriver

    folder = Path(tempfile.mkdtemp(prefix="chromium-", dir="/tmp"))  # a socket in it must have a short path
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER, env=environment(folder))
    try:
        driver = webdriver.Chrome(options=options, service=service)
        try:
            browser = Browser(driver)
            browser.size(width, height)
            yield browser
        finally:
            driver.quit()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def share(browser: Browser) -> float:
    """How far the progress bar is."""
    return float(browser.script("return document.querySelector('[role=progressbar]')?.ariaValueNow ?? 0"))


def curve(browser: Browser) -> str:
    """The first one, as it is drawn."""
    return str(
        browser.script("return document.querySelector('svg.curves path.line')?.getAttribute('d') ?? ''")
    )


def skipped_headings(browser: Browser) -> list[str]:
    """Those that are more than a level below the one before, so that whoever hears the page misses one."""
    found = browser.script(
        "return [...document.querySelectorAll('main :is(h1, h2, h3, h4)')]"
        ".filter((it) => it.checkVisibility()).map((it) => it.tagName + ' ' + it.textContent)"
    )
    levels = [int(words[1]) for words in found]
    steps = itertools.pairwise([0, *levels])
    return [words for words, (before, now) in zip(found, steps, strict=True) if now > before + 1]


def environment(folder: Path) -> dict[str, str]:
    """Whatever it writes goes below its own folder."""
    return {**os.environ, "TMPDIR": str(folder), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
