"""The pipeline's stages: one file each, all of one shape (see ``spec``), run by one ``runner``.

Stages never import each other.
"""
