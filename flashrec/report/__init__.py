"""What a journal says about each recovery: pure functions from lines to data, text and HTML.

    records     lines of JSON -> typed lines; a torn last line is a crash, not an error
    timeline    lines -> recoveries with their marks, phases and figures
    text, html  recoveries -> something to look at

What the journal does not say is None in the data and `unknown` on the screen, never 0.
"""
