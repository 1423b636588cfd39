"""Keeps setuptools' scratch out of the tree; everything else is in pyproject.toml.

Its default scratch folder is build/, which is source here. A temporary folder also has no leftovers of removed modules.
"""

import tempfile
from pathlib import Path

from setuptools import setup

Path(".cache").mkdir(exist_ok=True)
with tempfile.TemporaryDirectory() as scratch:
    setup(options={"build": {"build_base": scratch}, "egg_info": {"egg_base": ".cache"}})
