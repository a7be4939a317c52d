"""Models as somebody writes them by hand with the names of the reference's parameters: the text of wrong ports."""
