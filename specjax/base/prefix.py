"""What texts have in common."""


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many first tokens two texts have in common; halves of them are compared at a time."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        half = (same + most + 1) // 2
        if one[same:half] == other[same:half]:
            same = half
        else:
            most = half - 1
    return same
