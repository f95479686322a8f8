"""The conformance suite: checks a method of your own against the promises that this library makes about every method.

from fedfactor.testing import PROMISES, check_method

check_method(MyMethod(strength=0.1))  # all promises, one error with all that are broken

@pytest.mark.parametrize("promise", PROMISES)  # or each promise as a test of its own
def test_my_method(promise):
    promise(MyMethod(strength=0.1))
"""

from fedfactor.testing.federation import SmallNet, run
from fedfactor.testing.promises import PROMISES, Promise, check_method

__all__ = ["PROMISES", "Promise", "SmallNet", "check_method", "run"]
