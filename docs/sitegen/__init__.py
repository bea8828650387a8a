"""The documentation as a site, built by Sphinx without a network: pages of the repository, and generated ones."""
