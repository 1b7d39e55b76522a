"""Images made from formulas, on which the bundled backbones were pretrained."""
