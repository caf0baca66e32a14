"""Write examples/pictures. Run once: `python scripts/make_pictures.py PACKAGE`.

PACKAGE is the unpacked npm package emoji-datasource-google 16.0.0: the pictures of Google's Noto
Emoji with their names and categories. They lie there as 64x64 PNG files with transparency; here
they are on white, in one lossless sheet for each category, beside a line of JSON for each picture.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from PIL import Image

from titan_dit.pictures.output import COLUMNS, SHEET_CAPTIONS, SIZE, box

TARGET = Path(__file__).resolve().parent.parent / "examples" / "pictures"
TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium-light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium-dark skin tone",
    "1F3FF": "dark skin tone",
}


def main() -> None:
    """Write the sheets and captions.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    package = parser.parse_args().package
    pictures: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for emoji in json.loads((package / "emoji.json").read_text()):
        category = emoji["category"].lower().replace(" & ", "-and-").replace(" ", "-")
        name = (emoji["name"] or emoji["short_name"]).lower()
        pictures[category].append((emoji["image"], name))
        for tones, variation in emoji.get("skin_variations", {}).items():
            text = " and ".join(TONES.get(tone, tone) for tone in tones.split("-"))
            pictures[category].append((variation["image"], f"{name}, {text}"))
    lines = []
    for category in sorted(pictures):
        files = [
            (package / "img" / "google" / "64" / image, text)
            for image, text in sorted(pictures[category])
        ]
        files = [(path, text) for path, text in files if path.exists()]
        rows = -(-len(files) // COLUMNS)
        sheet = Image.new("RGB", (COLUMNS * SIZE, rows * SIZE), "white")
        for place, (path, text) in enumerate(files):
            picture = Image.open(path).convert("RGBA")
            sheet.paste(picture, box(place), picture)
            lines.append({"file_name": f"{category}/{path.name}", "label": category, "text": text})
        sheet.save(TARGET / f"{category}.webp", lossless=True, quality=100, method=6)
    (TARGET / SHEET_CAPTIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
