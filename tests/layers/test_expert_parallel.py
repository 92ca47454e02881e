import pytest

from fp4zoo.layers.expert_parallel import Mixture


@pytest.mark.parametrize(
    ("shape", "capacity_factor", "group_size", "uses_fp4", "tokens"),
    [
        ((8, 256), None, None, True, 1024),  # four short sequences share their padding
        ((6, 400), None, None, True, 800),
        ((5, 256), None, None, True, 256),  # no number of them up to 1,024 tokens divides five
        ((8, 4096), None, None, True, 4096),
        ((8, 256), None, 64, True, 64),
        ((8, 256), 1.25, None, True, 256),  # a capacity is of one sequence
        ((8, 1), None, None, True, 8),  # decoding
        ((8, 256), None, None, False, 2048),  # nothing to keep apart
    ],
)
def test_tokens_a_group(shape, capacity_factor, group_size, uses_fp4, tokens):
    mixture = Mixture(8, 2, capacity_factor, group_size, uses_fp4, uses_fp4, "moe")
    assert mixture._group_tokens(shape) == tokens
