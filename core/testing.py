"""The kit for authors of plugins, under the name they import it by. It lives in `testing/`, which builds on the core."""

from turnout import testing
from turnout.testing import *

__all__ = testing.__all__
