"""What a run says about itself: the adapter, a machine-readable privacy report, a model card and a web page.

`facts` gathers everything once, as plain JSON; `render` and `card` are pure functions of that JSON.
"""

from privlora.reporting.publication import publish, rewrite_report

__all__ = ["publish", "rewrite_report"]
