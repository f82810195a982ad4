"""The page: prose from page.html, facts and pictures from the chapters, in one file that needs no
other."""

import base64
import io
import json
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

import qkv
from tour.chapter import Chapter
from tour.style import PIXELS_PER_INCH

HERE = Path(__file__).parent


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def write_page(chapters: dict[str, Chapter], folder: Path) -> list[Path]:
    """Writes index.html and a PNG for each picture into `folder`, and returns their paths. Raises
    jinja2.UndefinedError if the prose names a fact or a picture that no chapter has, and ValueError
    if it leaves a picture out."""
    folder.mkdir(parents=True, exist_ok=True)
    images, sizes, used = {}, {}, set()
    for chapter in chapters.values():
        for name, figure in chapter.pictures.items():
            sizes[name] = [round(side * PIXELS_PER_INCH) for side in figure.get_size_inches()]
            images[name] = png(figure)

    def picture(name: str, alt: str) -> Markup:
        used.add(name)
        width, height = sizes[name]
        data = base64.b64encode(images[name]).decode()
        return Markup(
            f'<img alt="{escape(alt)}" width="{width}" height="{height}" '
            f'src="data:image/png;base64,{data}">'
        )

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = {name: chapter.facts for name, chapter in chapters.items()}
    html = environment.get_template("page.html").render(
        **facts,
        picture=picture,
        map_data=Markup(json.dumps(facts["heads"]["map"]).replace("<", "\\u003c")),
        version=qkv.__version__,
    )
    if left_out := images.keys() - used:
        raise ValueError(f"page.html shows no picture {', '.join(sorted(left_out))}")
    written = [folder / "index.html"]
    written[0].write_text(html, encoding="utf-8")
    for name, image in images.items():
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(image)
    return written
