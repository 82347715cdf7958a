"""Where data and weights come from: a table of sources, their download, and the folder of what is
here.
"""
