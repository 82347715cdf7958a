"""Where data and weights come from: a catalog of published sources, their download, and the folder
where they are stored.
"""
