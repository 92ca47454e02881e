import pytest


@pytest.fixture(scope="module", autouse=True)
def numerics_as_users_have_them(optimized):
    """What is equal bit for bit has to be so after every fusion."""
