"""The picture of a pass: where it is idle, and who is slow."""

from PIL import Image
from recorded import costs_of, order_of, timeline_of

from titan_dit.pipeline.timeline import (
    COMPUTED,
    GAP,
    IDLE_COLOUR,
    LEFT,
    RIGHT,
    ROW,
    TOP,
    WIDTH,
    draw_timeline,
    suspects,
)


def colours_of_rows(path, ranks):
    """Of each row, share of the pixels by colour, in the middle between text and border."""
    with Image.open(path) as image:
        page = image.convert("RGB")
    shares = []
    for rank in range(ranks):
        y = TOP + rank * (ROW + GAP) + 6
        row = [page.getpixel((x, y)) for x in range(LEFT, WIDTH - RIGHT)]
        named = ["#{:02x}{:02x}{:02x}".format(*pixel) for pixel in row]
        shares.append({colour: named.count(colour) / len(row) for colour in set(named)})
    return shares


def test_a_row_has_each_kind_in_proportion_to_its_time(tmp_path):
    order = order_of("1f1b", microbatches=4, virtual_stages=1)
    timeline = timeline_of(order, costs_of(order, 0, sigma=0.0))
    draw_timeline(tmp_path / "timeline.png", timeline, suspects(timeline))
    idle = {colour for _, colour in IDLE_COLOUR.values()}
    for shares in colours_of_rows(tmp_path / "timeline.png", 4):
        # The bubble is (p - 1) / (m + p - 1) = 3 / 7, and an action has a pixel's edge.
        assert abs(sum(shares.get(colour, 0.0) for colour in idle) - 3 / 7) < 0.02
        assert abs(shares[COMPUTED["F"][1]] - 4 / 21) < 0.02
        assert abs(shares[COMPUTED["B"][1]] - 8 / 21) < 0.02


def test_stages_of_a_rank_differ_and_kinds_have_colours_of_their_own(tmp_path):
    order = order_of()
    timeline = timeline_of(order, costs_of(order, 0, slow=1))
    draw_timeline(tmp_path / "timeline.png", timeline, suspects(timeline))
    for shares in colours_of_rows(tmp_path / "timeline.png", 4):
        for kind in "FIW":
            # The first stage, on rank 0, has hardly any input gradient.
            assert shares[COMPUTED[kind][2]] > 0.02
            assert kind == "I" or shares[COMPUTED[kind][1]] > 0.02
