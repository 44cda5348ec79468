"""What is shown of a collector and its policies: one document for page, terminal and report.

`answers` makes the document from facts, with `rewards` and `decision_words`; `page` and `chart`
draw it. Imports the history of rewards and wording, and uses no file, clock or thread.
"""

__all__ = ["answers", "chart", "decision_words", "page"]
