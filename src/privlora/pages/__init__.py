"""What the HTML pages share: a template with the stylesheet, colours, figures as inline SVG, how numbers read."""
