"""The documentation as a site: pages of docs/, and pages made of what the suite knows, built by Sphinx.

``python -m sitegen`` (``make docs``) writes ``build/docs/html``; nothing of it needs a network.
"""
