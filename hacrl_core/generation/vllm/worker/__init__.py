"""What runs inside vLLM's own environment.

This project is not installed there: these files import only the standard library, vLLM and what it needs (torch,
safetensors), and this folder is on the worker's PYTHONPATH, so each file is a top-level module over there.
"""
