"""The figures: panels described as data (panel.py), drawn as the page's SVG (svg.py) and as files (matplotlib_files.py)."""
