"""A result for people: on a console, as Markdown, as plots; here alone figures become text."""
