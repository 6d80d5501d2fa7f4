"""The reference is what the docstrings say, and names everything that is public."""

from pathlib import Path

import hmpx
from tests.support.api import GROUPS, reference


def test_the_reference_is_up_to_date(request):
    path = Path(hmpx.__file__).parent / "API.md"
    if request.config.getoption("--update"):
        path.write_text(reference(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == reference(), "python -m pytest tests/test_api.py --update writes it"


def test_the_reference_has_every_public_name():
    assert {*hmpx.__all__} <= {*" ".join(GROUPS.values()).split()}
