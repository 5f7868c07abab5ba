"""Chromium, which `make test-web` installs."""

import pytest
from support.web import browser

if not browser.CHROMIUM:
    pytest.exit("Chromium is not installed: run 'make test-web', or install the package 'chromium'.", 2)
