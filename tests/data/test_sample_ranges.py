import itertools
import random

from titan_dit.data.order import count, merged, numbers_of, ranges_of


def test_numbers_and_spans_stand_for_each_other():
    generator = random.Random(0)
    for size in range(12):
        numbers = sorted(generator.sample(range(20), size))
        spans = ranges_of(numbers)
        assert list(numbers_of(spans)) == numbers
        # Minimal: no two ranges are adjacent.
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def test_merged_is_the_union_as_few_spans_as_it_can_be():
    generator = random.Random(1)
    for size in range(12):
        spans = [tuple(sorted(generator.choices(range(40), k=2))) for _ in range(size)]
        numbers = sorted({n for span in spans for n in range(*span)})
        assert list(merged(spans)) == ranges_of(numbers)
        assert count(merged(spans)) == len(numbers)
        assert count(merged(spans), below=17) == sum(n < 17 for n in numbers)
