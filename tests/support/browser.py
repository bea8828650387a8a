"""Pages of ``entrain-bench ui`` as a headless Chromium shows them."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

from mlflow import MlflowClient
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import frame_to_be_available_and_switch_to_it
from selenium.webdriver.support.ui import WebDriverWait

from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.tracking.log import WORKFLOW
from entrain_bench.records.records import Record, Results
from support.servers import free_port, serving

# A page of MLflow loads several megabytes of scripts.
PAGE_S = 90.0
WIDTH, HEIGHT = 1360, 1000
# What MLflow remembers of its assistant, which covers a quarter of the first page.
CLOSED = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true", "mlflow.assistant.panelOpen_v1": "false"}


def chromium() -> tuple[str, str] | None:
    """Programs of the browser and its driver; None where they are not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages behind the links of ``entrain-bench ui``.

    Attributes:
        driver: the browser.
        base: address of the server.
        answer: the printed link to a sweep's answer.
        runs: the printed link to its runs.
    """

    driver: webdriver.Chrome
    base: str
    answer: str
    runs: str

    def show_answer(self, texts: Sequence[str]) -> str:
        """Open the sweep's answer; returns the text of its frame once that has some texts."""
        self.driver.get(self.answer)
        wait = WebDriverWait(self.driver, PAGE_S)
        wait.until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
        try:
            wait.until(
                lambda driver: all(text in text_of(driver) for text in texts), f"the answer lacks one of {texts}"
            )
            return text_of(self.driver)
        finally:
            self.driver.switch_to.default_content()

    def show_runs(self, texts: Sequence[str]) -> str:
        """Open the sweep's runs; returns the page's text once it has some texts."""
        return self._show(self.runs, texts)

    def show_comparison(self, names: Sequence[str], texts: Sequence[str]) -> str:
        """Open MLflow's comparison of the runs of these names; returns the page's text once it has some texts."""
        experiment = self.runs.split("/experiments/")[1].split("/")[0]
        runs = MlflowClient(tracking_uri=self.base).search_runs([experiment])
        run_ids = {run.info.run_name: run.info.run_id for run in runs}
        lists = {"runs": [run_ids[name] for name in names], "experiments": [experiment]}
        query = urlencode({name: json.dumps(each) for name, each in lists.items()} | WORKFLOW)
        return self._show(f"{self.base}/#/compare-runs?{query}", texts)

    def _show(self, address: str, texts: Sequence[str]) -> str:
        self.driver.get(address)

        def shown(driver: webdriver.Chrome) -> bool:
            return all(text in text_of(driver) for text in texts)

        WebDriverWait(self.driver, PAGE_S).until(shown, f"{address}: lacks one of {texts}")
        return text_of(self.driver)


def text_of(driver: webdriver.Chrome) -> str:
    return str(driver.execute_script("return document.body.innerText"))


def time_text(record: Record) -> str:
    """A run's time in whole milliseconds, cut off as the pages do that show more digits than fit."""
    return f"{math.floor(record.metrics[TIME] * 1e3) / 1e3:.3f}"


@contextmanager
def headless(browser: str, driver: str) -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = browser
    # The sandbox needs what containers do not give.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    found = webdriver.Chrome(options, Service(driver))
    try:
        found.set_page_load_timeout(PAGE_S)
        yield found
    finally:
        found.quit()


@contextmanager
def opened(results: Results) -> Iterator[Pages]:
    programs, port = chromium(), free_port()
    if programs is None:
        raise RuntimeError("chromium and chromedriver must be on PATH")
    command = [sys.executable, "-m", "entrain_bench.cli", "ui", f"results_dir={results.root}", f"port={port}"]
    with serving(command, port) as server:
        assert server.stdout is not None
        links = dict[str, str]()
        while "runs:" not in links:
            name, _, link = server.stdout.readline().strip().partition(" ")
            links[name] = link.strip()
        with headless(*programs) as driver:
            driver.get(f"http://127.0.0.1:{port}")
            for name, value in CLOSED.items():
                driver.execute_script("localStorage.setItem(arguments[0], arguments[1])", name, value)
            yield Pages(driver, f"http://127.0.0.1:{port}", links["answer:"], links["runs:"])
