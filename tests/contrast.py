"""How legible the text of a page is, from the colours that the browser computed."""

SEEN = """all => all.filter(one => one.offsetParent && one.innerText.trim()).map(one => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = () => [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  const grounds = [];
  let opacity = 1;
  for (let at = one; at; at = at.parentElement) {
    const style = getComputedStyle(at);
    grounds.unshift(style.backgroundColor);
    opacity *= Number(style.opacity);
  }
  const paint = (colour, alpha) => {
    canvas.globalAlpha = alpha;
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
  };
  const own = grounds.pop();
  for (const ground of grounds) paint(ground, 1);
  paint(own, opacity);
  const behind = pixel();
  paint(getComputedStyle(one).color, opacity);
  return [behind, pixel()];
})"""


def contrasts(page, selector: str) -> list[float]:
    """Return the contrast, 1 to 21 as WCAG defines it, of each visible text with its background.

    Opacity is that of the element with the background, since these pages dim only such elements.
    """
    return [_contrast(*colours) for colours in page.locator(selector).evaluate_all(SEEN)]


def _contrast(one: list[int], other: list[int]) -> float:
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: list[int]) -> float:
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
